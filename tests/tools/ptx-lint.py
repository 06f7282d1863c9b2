#!/usr/bin/env python3
"""Proves what no test without a GPU can: that each wrapper of cuda/kernels/ptx.h hands its parameters to
the instruction in the right order.

Each asm statement is read, and %0, %1... in its text are replaced by the expressions they stand for. The
result must be, letter for letter, what the table below says: the instruction with its operands in the
order of the PTX manual, in the names of the parameters. Besides, for every statement: constraint letters
fit the C types, outputs are written and inputs are not, every operand is used and none is missing, and
what touches memory or synchronises is volatile and clobbers memory. Wrappers of an intrinsic must be that
one call. The emulator's functions must have the same names and parameters.

    ptx-lint.py [folder of the repository]     the check, and then the same with planted mistakes
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

# name: (parameters, resolved text). A text beginning with "return" is a wrapper without asm.
MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 {{c[0], c[1], c[2], c[3]}}, "
    "{{a[0], a[1], a[2], a[3]}}, {{b0, b1}}, {{c[0], c[1], c[2], c[3]}};"
)
MMA_PARAMETERS = "float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1"
LDSM = "ldmatrix.sync.aligned.m8n8.x4{0}.shared.b16 {{r[0], r[1], r[2], r[3]}}, [shared_address(s)];"
TABLE = {
    "shared_address": ("const void *s", "return (uint32_t)__cvta_generic_to_shared(s);"),
    # destination, source, bytes of the piece, bytes that are read: fewer are filled up with zeros
    "cp_async16": (
        "void *s, const void *g, bool on",
        "cp.async.cg.shared.global.L2::128B [shared_address(s)], [g], 16, on ? 16u : 0u;",
    ),
    "cp_commit": ("", "cp.async.commit_group;"),
    "cp_wait": ("", "cp.async.wait_group N;"),
    "ldsm4": ("uint32_t (&r)[4], const void *s", LDSM.format("")),
    "ldsm4t": ("uint32_t (&r)[4], const void *s", LDSM.format(".trans")),
    "load16": (
        "const void *g",
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {v.x, v.y, v.z, v.w}, [g];",
    ),
    "mma_f16": (MMA_PARAMETERS, MMA.format("f16")),
    "mma_bf16": (MMA_PARAMETERS, MMA.format("bf16")),
    "ex2": ("float x", "ex2.approx.ftz.f32 y, x;"),
    "lg2": ("float x", "lg2.approx.ftz.f32 y, x;"),
    "rcp": ("float x", "rcp.approx.ftz.f32 y, x;"),
    "tanh_fast": ("float x", "tanh.approx.f32 y, x;"),
    # cvt.f16x2 d, a, b: a becomes the upper half, b the lower
    "pack_f16": ("float lo, float hi", "cvt.rn.f16x2.f32 u, hi, lo;"),
    "pack_bf16": ("float lo, float hi", "cvt.rn.bf16x2.f32 u, hi, lo;"),
    "f16_float": ("uint16_t h", "cvt.f32.f16 f, h;"),
    "float_f16": ("float f", "cvt.rn.f16.f32 h, f;"),
    "bf16_float": ("uint16_t h", "return __uint_as_float((uint32_t)h << 16);"),
    "float_bf16": ("float f", "cvt.rn.bf16.f32 h, f;"),
    "unpack_f16": (
        "uint32_t u",
        "return make_float2(f16_float((uint16_t)(u & 0xffffu)), f16_float((uint16_t)(u >> 16)));",
    ),
    "unpack_bf16": (
        "uint32_t u",
        "return make_float2(bf16_float((uint16_t)(u & 0xffffu)), bf16_float((uint16_t)(u >> 16)));",
    ),
    "shfl": ("T v, int lane", "return __shfl_sync(0xffffffffu, v, lane);"),
    "shfl_xor": ("T v, int mask", "return __shfl_xor_sync(0xffffffffu, v, mask);"),
    "shfl_up": ("T v, unsigned n", "return __shfl_up_sync(0xffffffffu, v, n);"),
    "shfl_down": ("T v, unsigned n", "return __shfl_down_sync(0xffffffffu, v, n);"),
    "ballot": ("bool p", "return __ballot_sync(0xffffffffu, p);"),
    "any": ("bool p", "return __any_sync(0xffffffffu, p) != 0;"),
    "all": ("bool p", "return __all_sync(0xffffffffu, p) != 0;"),
    "bar_sync": ("int id, int threads", "bar.sync id, threads;"),
    "atomic_add": ("uint32_t *p, uint32_t v", "return atomicAdd(p, v);"),
    "atomic_add ": ("float *p, float v", "return atomicAdd(p, v);"),
    "dp4a": ("int a, int b, int c", "return __dp4a(a, b, c);"),
}
for kind, letter, f in (("float", "f", "__fmaf_rn"), ("double", "d", "__fma_rn")):
    space = "" if kind == "float" else " "  # overloads: the same name in order of appearance
    for op in ("add", "mul", "div"):
        TABLE[f"{op}_rn{space}"] = (f"{kind} a, {kind} b", f"return __{letter}{op}_rn(a, b);")
    TABLE[f"fma_rn{space}"] = (f"{kind} a, {kind} b, {kind} c", f"return {f}(a, b, c);")

# Instructions that read or write memory, or make lanes or warps wait for each other.
ORDERED = re.compile(r"^(cp|ldmatrix|stmatrix|ld|st|atom|red|bar|barrier|mbarrier|fence|membar)\b")
# ... but for loads of what nobody writes, which may go anywhere.
FREE = re.compile(r"^ld\.global\.nc\b")
LETTERS = {"uint32_t": "r", "int": "r", "unsigned": "r", "bool": "r", "float": "f", "double": "d",
           "uint16_t": "h", "uint64_t": "l", "pointer": "l", "constant": "n"}


def squeeze(text):
    return " ".join(text.split())


def split(text, separator=","):
    """At separators outside of brackets and strings."""
    parts, depth, quoted, last = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if quoted:
            continue
        depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0 and text[max(0, i - 1):i + 2].count(":") < 2:
            parts.append(text[last:i])
            last = i + 1
    parts.append(text[last:])
    return [p.strip() for p in parts]


def wrappers(text):
    """(name, parameters, body) of each function, in order."""
    text = re.sub(r"/\*.*?\*/|^#define .*?[^\\\\]$", "", text, flags=re.S | re.M)
    found = []
    start = r"(?:template <[^>]*>\s*)?KVP_DEV\s+[\w ]+?\b(\w+)\("
    for m in re.finditer(start, text):
        depth, i = 1, m.end()
        while depth:
            depth += (text[i] == "(") - (text[i] == ")")
            i += 1
        parameters = squeeze(text[m.end():i - 1])
        open_brace = text.index("{", i)
        depth, j = 1, open_brace + 1
        while depth:
            depth += (text[j] == "{") - (text[j] == "}")
            j += 1
        # Braces inside of asm strings are balanced.
        found.append((m.group(1), parameters, squeeze(text[open_brace + 1:j - 1])))
    return found


def types_of(parameters, body):
    types = {"N": "constant"}
    declarations = [p for p in split(parameters) if p]
    declarations += re.findall(r"\b((?:float|uint32_t|uint16_t|uint4) \w+);", body)
    for d in declarations:
        name = re.search(r"(\w+)\)?(?:\[\d+\])?$", d).group(1)
        kind = re.sub(r"\bconst\b", "", d).split()[0]
        types[name] = "pointer" if "*" in d else kind
    return types


def type_of(expression, types):
    if expression.startswith("shared_address("):
        return "uint32_t"
    if "?" in expression:
        return "uint32_t"
    name = re.match(r"\w+", expression).group(0)
    kind = types.get(name)
    return "uint32_t" if kind == "uint4" else kind


def operands(text):
    result = []
    for part in split(text):
        if not part:
            continue
        m = re.fullmatch(r'"([=+]?)(\w)"\((.*)\)', part)
        if not m:
            raise ValueError(f"cannot read operand {part}")
        result.append((m.group(1), m.group(2), m.group(3)))
    return result


def check_asm(name, parameters, body, say):
    m = re.search(r"\basm( volatile)?\((.*)\);", body)
    volatile, inside = bool(m.group(1)), m.group(2)
    if body.count("asm") != 1:
        say("more than one asm statement")
    rest = body[:m.start()] + body[m.end():]
    rest = re.sub(r"\b(?:float|uint32_t|uint16_t|uint4) (\w+);|return \w+;", "", rest)
    if rest.strip():
        say(f"does something besides its asm statement: {rest.strip()}")
    parts = split(inside, ":") + ["", "", ""]
    template = "".join(re.findall(r'"([^"]*)"', parts[0]))
    outputs, inputs = operands(parts[1]), operands(parts[2])
    clobbers = re.findall(r'"(\w+)"', parts[3])
    all_operands, types = outputs + inputs, types_of(parameters, body)

    for prefix, letter, expression in all_operands:
        kind = type_of(expression, types)
        if kind is None:
            say(f"operand {expression} is neither parameter nor local")
        elif LETTERS[kind] != letter:
            say(f'operand {expression} is {kind}, but its constraint is "{letter}"')
    for prefix, _, expression in outputs:
        if not prefix:
            say(f"output {expression} has neither = nor +")
    for prefix, _, expression in inputs:
        if prefix:
            say(f"input {expression} is written")
    for parameter in split(parameters):
        named = re.search(r"(\w+)\)?(?:\[\d+\])?$", parameter)
        if named and not any(re.search(rf"\b{named.group(1)}\b", e) for _, _, e in all_operands):
            say(f"parameter {named.group(1)} is not used")

    used = {int(n) for n in re.findall(r"%(\d+)", template)}
    if used != set(range(len(all_operands))):
        say(f"{len(all_operands)} operands, but the text uses {sorted(used)}")
        return None
    instruction = template.split()[0]
    ordered = bool(ORDERED.match(instruction)) and not FREE.match(instruction)
    if ordered and "memory" not in clobbers:
        say("touches memory or waits, but does not clobber memory")
    if (ordered or ".sync" in instruction) and not volatile:
        say("must stay where it is, but is not volatile")
    if not volatile and not outputs:
        say("has no output and is not volatile: the compiler may drop it")
    # What is both read and written: the instruction reads it, so + is wanted, and the other way round.
    for i, (prefix, _, expression) in enumerate(outputs):
        times = len(re.findall(rf"%{i}\b", template))
        if (times > 1) != (prefix == "+"):
            say(f"output {expression} is named {times} times, but its constraint has {prefix}")
    return re.sub(r"%(\d+)", lambda n: all_operands[int(n.group(1))][2], template)


def lint(ptx, emulator, device):
    complaints, seen = [], {}
    for name, parameters, body in wrappers(ptx):
        key = name if name not in seen else name + " "
        seen[key] = parameters

        def say(what, name=name):
            complaints.append(f"{name}: {what}")

        if key not in TABLE:
            say("is not in the table of this script")
            continue
        wanted_parameters, wanted = TABLE[key]
        if parameters != wanted_parameters:
            say(f"has parameters ({parameters}), not ({wanted_parameters})")
        resolved = check_asm(name, parameters, body, say) if "asm" in body else body
        if resolved is not None and resolved != wanted:
            say(f"is\n    {resolved}\n  and not\n    {wanted}")
    for key in TABLE:
        if key not in seen:
            complaints.append(f"{key.strip()}: is in the table, but not in ptx.h")

    # The other implementation, and the list in device.h.
    theirs = {}
    for name, parameters, _ in wrappers(emulator):
        key = name if name not in theirs else name + " "
        theirs[key] = re.sub(r",? ?EMU_PLACE", "", parameters)
    for key, parameters in seen.items():
        if key == "shared_address":
            continue
        if key not in theirs:
            complaints.append(f"{key.strip()}: the emulator does not have it")
        elif theirs[key] != parameters:
            complaints.append(f"{key.strip()}: ({parameters}), but the emulator's ({theirs[key]})")
        if not re.search(rf"\b{key.strip()}\b", device):
            complaints.append(f"{key.strip()}: device.h does not speak of it")
    for key in theirs:
        if key not in seen:
            complaints.append(f"{key.strip()}: the emulator has it, ptx.h has not")
    return complaints


# (old, new, part of the complaint)
MISTAKES = [
    ('"f"(hi), "f"(lo)', '"f"(lo), "f"(hi)', "pack_f16"),
    ('"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)', "mma_f16"),
    ("{%4, %5, %6, %7}", "{%4, %6, %5, %7}", "mma_f16"),
    ("{%8, %9}", "{%9, %8}", "mma_f16"),
    ('"+f"(c[0])', '"=f"(c[0])', "constraint has ="),
    ("row.col.f32.bf16.bf16.f32", "row.col.f32.f16.f16.f32", "mma_bf16"),
    (".x4.trans.shared", ".x4.shared", "ldsm4t"),
    ('"=r"(r[1]), "=r"(r[2])', '"=r"(r[2]), "=r"(r[1])', "ldsm4"),
    ("[%0], [%1], 16, %2", "[%1], [%0], 16, %2", "cp_async16"),
    ("on ? 16u : 0u", "on ? 0u : 16u", "cp_async16"),
    ("[%0], [%1], 16, %2", "[%0], [%1], 16, 16", "the text uses"),
    ('"l"(g), "r"(on', '"r"(g), "r"(on', "pointer"),
    ('"r"(shared_address(s)), "l"', '"l"(s), "l"', "cp_async16"),
    ('"n"(N) : "memory"', '"n"(N)', "does not clobber memory"),
    ("asm volatile(\"mma", "asm(\"mma", "not volatile"),
    ('asm volatile("bar.sync', 'asm("bar.sync', "not volatile"),
    ('"r"(id), "r"(threads)', '"r"(threads), "r"(id)', "bar_sync"),
    ('"=h"(h) : "f"(f)', '"=r"(h) : "f"(f)', "uint16_t"),
    ("cvt.rn.f16.f32", "cvt.rz.f16.f32", "float_f16"),
    ("ex2.approx.ftz.f32", "ex2.approx.f32", "ex2"),
    ("lg2.approx.ftz.f32 %0, %1", "lg2.approx.ftz.f32 %1, %0", "lg2"),
    ('"=r"(v.x), "=r"(v.y)', '"=r"(v.y), "=r"(v.x)', "load16"),
    ("__fmaf_rn(a, b, c)", "__fmaf_rn(a, c, b)", "fma_rn"),
    ("__dmul_rn", "__dadd_rn", "mul_rn"),
    ("__shfl_up_sync(0xffffffffu, v, n)", "__shfl_down_sync(0xffffffffu, v, n)", "shfl_up"),
    ("(uint16_t)(u & 0xffffu)", "(uint16_t)(u >> 16)", "unpack_f16"),
    ("__any_sync", "__all_sync", "any"),
    ("__dp4a(a, b, c)", "__dp4a(b, c, a)", "dp4a"),
    ("float lo, float hi", "float hi, float lo", "parameters"),
    ("return __ballot_sync(0xffffffffu, p);", "return __ballot_sync(0xffffu, p);", "ballot"),
    ("KVP_DEV float rcp(", "KVP_DEV float rcp_fast(", "rcp_fast"),
]


PROGRAM = """
#include "cuda/kernels/device.h"
struct args { float *x; };
KVP_KERNEL(lint, args, 32)
{
    %s
    x[threadIdx.x] = 1.0f;
    __syncthreads();
    a.x[threadIdx.x] = x[31 - threadIdx.x];
}
"""


def static_shared(root):
    """Whether the emulator's compiler refuses static shared memory, and takes the same program without."""
    compiler = os.environ.get("CXX", "c++").split()
    if not shutil.which(compiler[0]):
        return "no C++ compiler: not asked whether static shared memory is refused"
    command = compiler + ["-std=c++17", f"-I{root}", "-fsyntax-only", "-x", "c++", "-"]

    def compiles(declaration):
        return subprocess.run(command, input=PROGRAM % declaration, text=True,
                              stderr=subprocess.DEVNULL).returncode == 0

    if not compiles("KVP_SMEM(s); float *x = (float *)(void *)s;"):
        return None
    return None if compiles("__shared__ float x[32];") else "static shared memory is refused"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    ptx = (root / "cuda/kernels/ptx.h").read_text()
    emulator = (root / "tests/emu/intrinsics.h").read_text()
    device = (root / "cuda/kernels/device.h").read_text()
    complaints = lint(ptx, emulator, device)
    if complaints:
        print("\n".join("cuda/kernels/ptx.h: " + c for c in complaints))
        return 1
    for old, new, part in MISTAKES:
        if old not in ptx:
            print(f"ptx-lint: the mistake cannot be planted, ptx.h has no: {old}")
            return 1
        found = lint(ptx.replace(old, new, 1), emulator, device)
        if not any(part in c for c in found):
            print(f"ptx-lint: does not see the mistake: {old} -> {new}; it says: {found}")
            return 1
    shared = static_shared(root)
    if not shared:
        print("ptx-lint: a kernel with static shared memory compiles, or one without does not")
        return 1
    print(f"ptx-lint: {len(wrappers(ptx))} wrappers are as the table says; "
          f"{len(MISTAKES)} of {len(MISTAKES)} planted mistakes were seen; {shared}")
    return 0


sys.exit(main())
