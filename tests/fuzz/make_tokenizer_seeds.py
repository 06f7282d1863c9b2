#!/usr/bin/env python3
"""Writes the seeds of fuzz_tokenizer (see there for what an input is): make_tokenizer_seeds.py DIRECTORY

Texts for each of the kept vocabularies, and small files of its own: right ones, and some that are
wrong in one way each.
"""
import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "tokenizer"))
from strings import strings  # noqa: E402

U32, F32, BOOL, STR, ARR, I32 = 4, 6, 7, 8, 9, 5


def text(s):
    s = s if isinstance(s, bytes) else s.encode("utf-8")
    return struct.pack("<Q", len(s)) + s


def value(v):
    if isinstance(v, bool):
        return struct.pack("<IB", BOOL, v)
    if isinstance(v, int):
        return struct.pack("<II", U32, v)
    if isinstance(v, (str, bytes)):
        return struct.pack("<I", STR) + text(v)
    kind = STR if not v or isinstance(v[0], (str, bytes)) else F32 if isinstance(v[0], float) else I32
    body = b"".join(text(x) if kind == STR else struct.pack("<f" if kind == F32 else "<i", x) for x in v)
    return struct.pack("<IIQ", ARR, kind, len(v)) + body


def gguf(**keys):
    body = b"".join(text("tokenizer." + ("ggml." if k != "chat_template" else "") + k) + value(v) for k, v in keys.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + body


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)

    def save(name, which, flags, s, file=b""):
        s = s if isinstance(s, bytes) else s.encode("utf-8")
        with open(os.path.join(folder, name), "wb") as f:
            f.write(struct.pack("<BBH", which, flags, len(s)) + s + file)

    some = [s for s in strings() if len(s) < 120]
    for which in range(8):
        for flags in (0, 2, 7):
            save(f"kept{which}-{flags}", which, flags, b"\n".join(some[(which * 3 + flags)::11])[:500])
    bpe = dict(model="gpt2", pre="gpt-2", tokens=["<e>", "a", "b", "\u0120", "ab", "\u0120a", "<u>", "<|im_start|>", "<|im_end|>", "", "a"],
               token_type=[3, 1, 1, 1, 1, 1, 4, 3, 3, 1, 1], merges=["a b", "\u0120 a", "a x", "ab", " ", "\u4f60 a", "a b"],
               bos_token_id=0, eos_token_id=8, eot_token_id=8, add_bos_token=True)
    spm = dict(model="llama", tokens=["<unk>", "<s>", "</s>", "<0x41>", "<0xZZ>", "a", "b", "ab", "\u2581", "\u2581a", "\n\n", "[INST]"],
               scores=[0.0, 0.0, 0.0, 0.0, 0.0, -3.0, -3.0, -1.0, -2.0, -1.0, -9.0, -9.0], token_type=[2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 4, 4])
    words = "ab <e>a<u> b<|im_end|>a\n\nA</s>x a"
    save("bpe", 8, 7, words, gguf(**bpe))
    save("bpe-plain", 8, 0, words, gguf(**bpe))
    save("spm", 8, 7, words, gguf(**spm))
    save("spm-plain", 8, 0, words, gguf(**spm))
    save("spm-bare", 8, 0, words, gguf(**{**spm, "token_type": [], "add_space_prefix": False, "unknown_token_id": 0xFFFFFFFF}))
    templates = {"chatml": "'<|im_start|>system\\nHi\\'s<|im_end|>'", "llama": "<|start_header_id|>", "gemma": "<start_of_turn>",
                 "mistral": "' [INST] ' ' [/INST]' loop.last and system_message '|trim'", "none": "x"}
    for name, template in templates.items():
        save("chat-" + name, 8, 4, "ab", gguf(**{**bpe, "chat_template": template}))
    wrong = {"no-model": {"tokens": ["a"]}, "kind": {**bpe, "model": "bert"}, "pre": {**bpe, "pre": "?"}, "empty": {**bpe, "tokens": []},
             "types": {**bpe, "token_type": [1]}, "id": {**bpe, "bos_token_id": 11}, "long": {**bpe, "tokens": ["a" * 5000]},
             "scores": {**spm, "scores": [0.0]}, "nan": {**spm, "scores": [float("nan")] * 12},
             "no-merges": {k: v for k, v in bpe.items() if k != "merges"}, "bool": {**bpe, "add_bos_token": 3},
             "flags": {**spm, "add_space_prefix": 2}, "template": {**bpe, "chat_template": 1}}
    for name, keys in wrong.items():
        save("wrong-" + name, 8, 0, "ab", gguf(**keys))


main()
