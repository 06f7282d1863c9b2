"""Writes what records the ABI from include/kvpage.h: the version map and tests/abi/layout.c.

usage, from the repository's root: python3 tests/abi/write.py [CC]
Run by hand when the header has grown, and the difference looked at: before the first release
anything may change; afterwards only additions may appear.
"""
import os
import re
import subprocess
import sys
import tempfile

CC = sys.argv[1] if len(sys.argv) > 1 else "cc"
header = open("include/kvpage.h").read()
plain = re.sub(r"/\*.*?\*/", "", header, flags=re.S)


def fields(body):
    """The names of a struct's members, function pointers and arrays included."""
    for declaration in body.split(";"):
        declaration = declaration.strip()
        if not declaration:
            continue
        pointer = re.search(r"\(\*(\w+)\)\s*\(", declaration)
        if pointer:
            yield pointer.group(1)
            continue
        for part in declaration.split(","):
            yield re.search(r"(\w+)\s*(\[[^\]]*\])?$", part.strip()).group(1)


structs = [(name, list(fields(body)))
           for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", plain, re.S)]
functions = re.findall(r"KVP_API[^;()]*?\b(kvp_\w+)\s*\(", plain)
constants = re.findall(r"^#define (KVP_\w+) (?!__)[^\s(].*$|^#define (KVP_\w+) \(-.*$", plain, re.M)
constants = [a or b for a, b in constants
             if not (a or b).startswith(("KVP_VERSION", "KVP_API", "KVP_STATUS"))]

probe = ["#include <kvpage.h>", "#include <stdio.h>", "int main(void) {"]
for name, members in structs:
    probe.append(f'printf("SIZE({name}, %zu)\\n", sizeof({name}));')
    for m in members:
        probe.append(f'printf("FIELD({name}, {m}, %zu, %zu)\\n", offsetof({name}, {m}), '
                     f'sizeof((({name} *)0)->{m}));')
for c in constants:
    probe.append(f'printf("VALUE({c}, %lld)\\n", (long long)({c}));')
probe.append("return 0; }")
with tempfile.TemporaryDirectory() as d:
    open(d + "/probe.c", "w").write("\n".join(probe))
    subprocess.run([CC, "-Iinclude", "-o", d + "/probe", d + "/probe.c"], check=True)
    lines = subprocess.run([d + "/probe"], check=True, capture_output=True, text=True).stdout
statuses = re.findall(r"X\((KVP_\w+), (-?\d+),", header)

with open("tests/abi/layout.c", "w") as f:
    f.write("""/*
 * The place and width of every public field and the value of every public constant, on 64-bit
 * targets. This file compiles or the ABI has changed; nothing in it runs. A released line is never
 * edited: new fields come at a struct's end and get new lines (tests/abi/write.py makes them).
 */
#include <kvpage.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type);
#define FIELD(type, field, offset, bytes)                                                         \\
    _Static_assert(offsetof(type, field) == (offset) && sizeof(((type *)0)->field) == (bytes),    \\
                   #type "." #field);
#define VALUE(name, value) _Static_assert((long long)(name) == (value), #name);

""")
    f.write(re.sub(r"^SIZE", "\nSIZE", lines, flags=re.M).lstrip("\n").replace("\nVALUE", "\n\nVALUE", 1))
    f.write("\n" + "".join(f"VALUE({name}, {number})\n" for name, number in statuses))

with open("lib/kvpage.map", "w") as f:
    f.write("/* What the shared library exports. The nodes of released versions never change; "
            "abi-check\n * compares this with include/kvpage.h and with the library. */\n"
            "KVPAGE_0 {\n    global:\n")
    f.write("".join(f"        {name};\n" for name in functions))
    f.write("    local:\n        *;\n};\n")
print(f"{len(structs)} structs, {len(constants) + len(statuses)} constants, "
      f"{len(functions)} functions")
