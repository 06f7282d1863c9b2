#!/usr/bin/env python3
"""What others make of the strings: ask.py llama|transformers|published MODEL.gguf [TEXTS.json] > ids.json

llama: llama.cpp. transformers: its tokenizer made from the same file. published: the tokenizers
library with the pre-tokenizer that the model's authors published, which transformers does not take
from a GGUF file (byte-level BPE only).

Ids without special tokens ("plain") and with those written in the text ("parse"), no BOS, for each
string; null where it cannot take the string. TEXTS.json: more texts, a list or an object of strings.
"""
import json
import os
import sys

from strings import strings


def texts(path):
    data = json.load(open(path, encoding="utf-8"))
    found = []

    def walk(x):
        if isinstance(x, str):
            found.append(x.encode("utf-8"))
        elif isinstance(x, dict):
            for v in x.values():
                walk(v)
        elif isinstance(x, list):
            for v in x:
                walk(v)

    walk(data)
    return found


def ask_llama(model):
    os.environ["GGML_NO_BACKTRACE"] = "1"
    import llama_cpp
    llm = llama_cpp.Llama(model, vocab_only=True, verbose=False)

    def ask(s, parse):
        # In a child: some invalid UTF-8 ends the process.
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                os.write(w, json.dumps(llm.tokenize(s, add_bos=False, special=parse)).encode())
            finally:
                os._exit(0)
        os.close(w)
        with os.fdopen(r) as f:
            answer = f.read()
        os.waitpid(child, 0)
        return json.loads(answer) if answer else None

    return ask


def ask_transformers(model):
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(os.path.dirname(model) or ".", gguf_file=os.path.basename(model))
    return ask_fast(tok.backend_tokenizer)


def ask_fast(fast):
    def ask(s, parse):
        fast.encode_special_tokens = not parse
        try:
            return fast.encode(s.decode("utf-8"), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return None

    return ask


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST],
    "tekken": [r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
               r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
               r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "deepseek-v3": [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
}


def published(model):
    """The tokenizer itself, with the model's published pre-tokenizer."""
    import gguf
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    fields = gguf.GGUFReader(model).fields
    get = lambda key: fields["tokenizer.ggml." + key].contents()
    tokens, types, pre = get("tokens"), get("token_type"), get("pre")
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in get("merges")],
                               ignore_merges=pre in ("llama-bpe", "tekken")))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2"))
    if pre == "smollm":
        cuts = [pre_tokenizers.Digits(individual_digits=True)]
    else:
        cuts = [pre_tokenizers.Split(Regex(r), "isolated") for r in PUBLISHED.get(pre, [])]
    tok.pre_tokenizer = pre_tokenizers.Sequence(cuts + [whole])
    tok.add_special_tokens([t for t, k in zip(tokens, types) if k == 3])
    tok.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == 4])
    return tok


def ask_published(model):
    return ask_fast(published(model))


def main():
    who, model = sys.argv[1:3]
    ask = {"llama": ask_llama, "transformers": ask_transformers,
           "published": ask_published}[who](model)
    todo = strings() + (texts(sys.argv[3]) if len(sys.argv) > 3 else [])
    json.dump([[s.hex(), ask(s, False), ask(s, True)] for s in todo], sys.stdout)


if __name__ == "__main__":
    main()
