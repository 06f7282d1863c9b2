"""A float checkpoint folder of a GGUF file, for peers that read no GGUF: the same weights in bf16.

usage: make_checkpoint.py MODEL.gguf FOLDER    (with torch, transformers, gguf and accelerate)
"""
import os
import sys

import torch
import transformers


def main():
    source, folder = os.path.abspath(sys.argv[1]), sys.argv[2]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.dirname(source), gguf_file=os.path.basename(source), dtype=torch.float32)
    # What was loaded remembers that it came from a GGUF file; a plain model does not.
    plain = type(loaded)(type(loaded.config)(**{
        key: value for key, value in loaded.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path", "dtype")}))
    plain.load_state_dict(loaded.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
