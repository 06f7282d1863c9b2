#!/usr/bin/env python3
"""Writes tiny-bpe.gguf and tiny-spm.gguf: vocabularies alone, small enough to be kept here.

Both are trained on the strings of strings.py without any cutting into words, so that they have
tokens across spaces, digits and signs, and every place where a pre-tokenizer cuts shows in the ids.
Usage: tiny.py DIRECTORY [PRE ...]  (PRE: also tiny-bpe-PRE.gguf for each of these pre-tokenizers)
"""
import collections
import sys

import gguf

from strings import strings

CONTROL, USER, UNKNOWN, BYTE, NORMAL = 3, 4, 2, 6, 1
# The library takes these for control tokens whatever their type.
CHAT = ["<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
        "<|begin_of_text|>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
MARKS = {"<|im_start|>", "<|im_end|>", "<|endoftext|>", *CHAT}


def byte_characters():
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in plain}
    for b in range(256):
        if b not in table:
            table[b] = chr(0x100 + len(table) - len(plain))
    return table


def train(words, merges, never, most=24):
    """The usual training, most frequent pair first; ties to the smaller pair. Never makes `never`."""
    found = []
    for _ in range(merges):
        pairs = collections.Counter()
        for w in words:
            pairs.update(zip(w, w[1:]))
        pairs = {p: n for p, n in pairs.items() if len(p[0] + p[1]) <= most and p[0] + p[1] not in never}
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        if pairs[best] < 2:
            break
        found.append(best)
        for i, w in enumerate(words):
            out, j = [], 0
            while j < len(w):
                if j + 1 < len(w) and (w[j], w[j + 1]) == best:
                    out.append(w[j] + w[j + 1])
                    j += 2
                else:
                    out.append(w[j])
                    j += 1
            words[i] = out
    return found


def write(path, model, pre, tokens, types, merges=None, scores=None, **ids):
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model(model)
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(types)
    if merges:
        w.add_token_merges(merges)
    if scores:
        w.add_token_scores(scores)
    for name, value in ids.items():
        (w.add_bool if isinstance(value, bool) else w.add_uint32)(f"tokenizer.ggml.{name}", value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()


def bpe(directory, pres):
    table = byte_characters()
    words = [[table[b] for b in s] for s in strings()]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mark>", "<mark>ed"] + CHAT
    merges = train(words, 1400, set(tokens) | MARKS)
    types = [CONTROL, CONTROL, CONTROL, USER, USER] + [CONTROL] * len(CHAT)
    # One byte is left out, as in SmolLM2's vocabulary.
    plain = [table[b] for b in range(256) if b != 0x1D]
    have = set(plain)
    for left, right in merges:
        if left + right not in have:
            have.add(left + right)
            plain.append(left + right)
    tokens += plain
    types += [NORMAL] * len(plain)
    for pre in ["smollm"] + pres:
        name = "tiny-bpe.gguf" if pre == "smollm" else f"tiny-bpe-{pre}.gguf"
        write(f"{directory}/{name}", "gpt2", pre, tokens, types, merges=[f"{a} {b}" for a, b in merges],
              bos_token_id=tokens.index("<|begin_of_text|>"), eos_token_id=2, add_bos_token=False)


def spm(directory):
    # llama.cpp takes no NUL in a piece.
    words = [list("\u2581" + part.replace(" ", "\u2581")) for s in strings()
             for part in s.decode("utf-8", "ignore").split("\0")]
    letters = sorted({c for w in words for c in w if ord(c) < 0x3000})
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["<mark>", "\n\n\n"]
    merges = train(words, 900, set(tokens) | MARKS)
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [USER, USER]
    scores = [0.0] * len(tokens)
    have = set(tokens)
    for rank, piece in enumerate(a + b for a, b in merges):
        if piece not in have:
            have.add(piece)
            tokens.append(piece)
            types.append(NORMAL)
            scores.append(float(-(rank // 3)))  # some ties
    for c in letters:
        if c not in have:
            tokens.append(c)
            types.append(NORMAL)
            scores.append(-1000.0)
    write(f"{directory}/tiny-spm.gguf", "llama", "default", tokens, types, scores=scores,
          bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_bos_token=True)


def main():
    bpe(sys.argv[1], sys.argv[2:])
    spm(sys.argv[1])


if __name__ == "__main__":
    main()
