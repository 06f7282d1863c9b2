"""A host in another language: drives the shared library through cffi and nothing else.

usage: consumer.py LIBRARY HEADER
The declarations are the header's own text, with the preprocessor's lines taken out.
"""
import re
import sys

import cffi

library, header = sys.argv[1:3]
text = open(header).read()
text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
statuses = re.findall(r"X\((KVP_\w+), (-?\d+),", text)
numbers = re.findall(r"#define (KVP_\w+) \(?(-?(?:0x)?[0-9a-f]+)u?\)?\s*$", text, flags=re.M)
text = text.replace('extern "C" {', "")
text = re.sub(r"\\\n", " ", text)
text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
text = re.sub(r"enum kvp_status_code \{.*?\};", "", text, flags=re.S)
text = text.replace("KVP_API ", "")
text = re.sub(r"^\}\s*$", "", text, flags=re.M)

ffi = cffi.FFI()
ffi.cdef(text)
lib = ffi.dlopen(library)
code = {name: int(number) for name, number in statuses}
value = {name: int(number, 0) for name, number in numbers}

for name, number in code.items():
    assert ffi.string(lib.kvp_status_name(number)).decode() == name


def options(kind):
    o = ffi.new(kind + " *")
    getattr(lib, kind + "_init")(o, ffi.sizeof(kind))
    assert o.size == ffi.sizeof(kind)
    return o


def check(status, err=None):
    assert status >= 0, (status, ffi.string(err.text) if err else "")


err = options("kvp_error")
group = ffi.new("kvp_layer_group *", {"layers": 2, "kv_heads": 1, "key_dim": 64, "value_dim": 64})
geometry = options("kvp_geometry")
geometry.n_groups, geometry.groups = 1, group
model = ffi.new("kvp_model **")
check(lib.kvp_model_create(geometry, ffi.NULL, model, err), err)

plan = options("kvp_plan_options")
plan.tokens = 1000
result = options("kvp_plan_result")
check(lib.kvp_plan(model[0], plan, result, err), err)
assert result.kv_bytes_per_token == 2 * (64 + 64) * 2
assert result.blocks == 63

bad = options("kvp_plan_options")
bad.block_tokens = 3
assert lib.kvp_plan(model[0], bad, result, err) == code["KVP_ERR_INVALID_ARG"]
assert ffi.string(err.text)

pool_options = options("kvp_pool_options")
pool_options.blocks = 8
pool = ffi.new("kvp_pool **")
check(lib.kvp_pool_create(model[0], pool_options, pool, err), err)
stats = options("kvp_pool_stats")
check(lib.kvp_pool_get_stats(pool[0], stats))
assert stats.blocks == 8 and stats.free == 8 and value["KVP_KV_F16"] == 1
lib.kvp_model_destroy(model[0])
lib.kvp_pool_destroy(pool[0])
print("cffi: good")
