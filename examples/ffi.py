#!/usr/bin/env python3
"""Drives libkvpage.so from Python with cffi alone: no compiler, no binding to build.

    python3 ffi.py libkvpage.so model.gguf "What is the capital of France?"

The declarations come from the public header itself, cut down to what cffi reads, so that they
cannot fall behind it.
"""
import codecs
import pathlib
import re
import sys

import cffi

HEADER = pathlib.Path(__file__).resolve().parent.parent / "include" / "kvpage.h"


def declarations(header):
    """kvpage.h as cffi takes it: no comments, no directives but numbers, statuses spelled out."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    statuses = re.findall(r"X\((KVP_\w+), (-?\d+),", text)
    numbers = re.findall(r"^#define (KVP_\w+)[ \t]+\(?(-?(?:0x)?[0-9a-fA-F]+)u?\)?[ \t]*$",
                         text, re.M)
    text = text.replace("\\\n", "")
    text = re.sub(r"enum kvp_status_code \{.*?\};", "", text, flags=re.S)
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.M)
    text = re.sub(r'extern "C" \{(.*)\}', r"\1", text, flags=re.S).replace("KVP_API ", "")
    defines = "".join(f"#define {name} {number}\n" for name, number in statuses + numbers)
    return defines + text


def new(ffi, kind, **fields):
    """A zeroed struct with its size filled in, as every kvpage struct wants it."""
    return ffi.new(f"{kind} *", {"size": ffi.sizeof(kind), **fields})


def check(ffi, lib, status, error):
    if status < 0:
        name = ffi.string(lib.kvp_status_name(status)).decode()
        raise RuntimeError(f"{name}: {ffi.string(error.text).decode(errors='replace')}")


def main():
    if len(sys.argv) != 4:
        sys.exit("usage: ffi.py LIBKVPAGE.so MODEL.gguf PROMPT")
    ffi = cffi.FFI()
    ffi.cdef(declarations(HEADER.read_text()))
    lib = ffi.dlopen(sys.argv[1])
    error = new(ffi, "kvp_error")

    def make(create, *args):
        out = ffi.new({"kvp_model_open": "kvp_model **", "kvp_pool_create": "kvp_pool **",
                       "kvp_batch_create": "kvp_batch **", "kvp_seq_create": "kvp_seq **"}[create])
        check(ffi, lib, getattr(lib, create)(*args, out, error), error)
        return out[0]

    def domain(status):
        """Raises what a call on the pool, its sequences or its batch has to say."""
        lib.kvp_pool_last_error(pool, error)
        check(ffi, lib, status, error)
        return status

    model = make("kvp_model_open", sys.argv[2].encode(), ffi.NULL)
    pool = make("kvp_pool_create", model, ffi.NULL)
    batch = make("kvp_batch_create", pool, ffi.NULL)
    seq = make("kvp_seq_create", pool, new(ffi, "kvp_seq_options", max_tokens=64))

    # Inputs are copied by the library: these temporaries may go once the call is over.
    prompt = sys.argv[3].encode()
    text, role = ffi.new("char[]", prompt), ffi.new("char[]", b"user")
    message = ffi.new("kvp_chat_message[1]", [(role, text, len(prompt))])
    info = new(ffi, "kvp_model_info")
    domain(lib.kvp_model_get_info(model, info))
    if info.chat_format == lib.KVP_CHAT_NONE:
        domain(lib.kvp_seq_append_text(seq, text, len(prompt), lib.KVP_TOKENIZE_SPECIAL_START))
    else:
        domain(lib.kvp_seq_append_chat(seq, message, 1, ffi.sizeof("kvp_chat_message"),
                                       lib.KVP_CHAT_ADD_REPLY))
    domain(lib.kvp_batch_add(batch, seq))

    event = new(ffi, "kvp_event")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    status = lib.KVP_OK
    while status != lib.KVP_DONE:
        status = domain(lib.kvp_step(batch))
        while lib.kvp_next_event(batch, event) == lib.KVP_OK:
            print(decoder.decode(ffi.buffer(event.text, event.text_bytes)[:]), end="", flush=True)
            if event.kind == lib.KVP_EVENT_ENDED:
                usage = event.usage
                print(f"\n[{usage.prompt} tokens of prompt, {usage.generated} generated]")
        if status == lib.KVP_AGAIN:
            lib.kvp_wait(batch, -1)  # cffi lets other Python threads run meanwhile

    for destroy, handle in ((lib.kvp_seq_destroy, seq), (lib.kvp_batch_destroy, batch),
                            (lib.kvp_pool_destroy, pool), (lib.kvp_model_destroy, model)):
        destroy(handle)


if __name__ == "__main__":
    main()
