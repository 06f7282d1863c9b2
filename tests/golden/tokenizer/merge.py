#!/usr/bin/env python3
"""Puts the answers of ask.py together: merge.py NAME LLAMA.json [OTHER.json] [BASE.ids] > NAME.ids

A line per string: who is followed, the ids, and after "|" those with special tokens parsed if they
are others. "=": both agree. "l", "t": they do not, and llama.cpp or the other is followed (see
docs/tokenizer-differences.md for why). "-": nobody is, because the string is no UTF-8, which one
refuses and the other rewrites. '"': as the same line of BASE.ids.
Without arguments it writes the strings themselves: merge.py [TEXTS.json] > strings.txt
"""
import json
import sys

from ask import texts
from strings import strings

FOLLOW_OTHER = {"tiny-bpe-tekken"}
FOLLOW_OTHER_FOR = {"gemma3": {b"</s>"}}


def escaped(s):
    return "".join(chr(b) if 0x20 <= b < 0x7F and b != 0x5C else f"\\x{b:02x}" for b in s)


def is_utf8(s):
    try:
        s.decode("utf-8")
        return True
    except UnicodeDecodeError:
        return False


def chosen(name, s, llama, other):
    if not is_utf8(s):
        return "-", None
    if llama == other:
        return "=", llama
    if name in FOLLOW_OTHER or s in FOLLOW_OTHER_FOR.get(name, ()):
        return "t", other
    return "l", llama


def load(path):
    return json.load(open(path)) if path else None


def main():
    if len(sys.argv) < 3:
        for s in strings() + (texts(sys.argv[1]) if len(sys.argv) > 1 else []):
            print(escaped(s))
        return
    ids = [a for a in sys.argv[2:] if a.endswith(".json")]
    base = [a for a in sys.argv[2:] if a.endswith(".ids")]
    llama, other = load(ids[0]), load(ids[1] if len(ids) > 1 else None)
    lines = open(base[0]).read().split("\n") if base else []
    for i, (hexed, *answers) in enumerate(llama):
        s = bytes.fromhex(hexed)
        parts, marks = [], []
        for k, answer in enumerate(answers):
            mark, picked = chosen(sys.argv[1], s, answer, other[i][1 + k] if other else None)
            marks.append(mark)
            parts.append(" ".join(map(str, picked or [])))
        line = next(m for m in "-tl=" if m in marks) + " " + parts[0]
        if parts[1] != parts[0]:
            line += " | " + parts[1]
        print('"' if lines and lines[i] == line.rstrip() else line.rstrip())


if __name__ == "__main__":
    main()
