#!/usr/bin/env python3
"""Makes golden_blocks.h: random blocks of every quantised type and what they stand for, according to
the Python package gguf, whose dequantisation is the format's reference. Run by hand:

    python3 golden_blocks.py > golden_blocks.h
"""
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

# type, bytes of a block, offsets of its f16 fields
TYPES = [
    (T.Q4_0, 18, [0]), (T.Q4_1, 20, [0, 2]), (T.Q5_0, 22, [0]), (T.Q5_1, 24, [0, 2]),
    (T.Q8_0, 34, [0]), (T.Q2_K, 84, [80, 82]), (T.Q3_K, 110, [108]), (T.Q4_K, 144, [0, 2]),
    (T.Q5_K, 176, [0, 2]), (T.Q6_K, 210, [208]),
]
random = np.random.default_rng(20)
print("/* Made by golden_blocks.py. */")
names = []
for kind, size, halves in TYPES:
    raw = random.integers(0, 256, size, dtype=np.uint8)
    for at in halves:
        raw[at:at + 2] = np.frombuffer(np.float16(random.uniform(-0.1, 0.1)).tobytes(), np.uint8)
    bits = dequantize(raw.reshape(1, -1), kind).astype(np.float32).view(np.uint32).ravel()
    name = kind.name.lower()
    names.append((kind, name, len(bits)))
    print(f"static const uint8_t {name}_block[] = {{")
    for i in range(0, size, 16):
        print("    " + " ".join(f"{v}," for v in raw[i:i + 16]))
    print(f"}};\nstatic const uint32_t {name}_bits[] = {{")
    for i in range(0, len(bits), 8):
        print("    " + " ".join(f"0x{v:08x}," for v in bits[i:i + 8]))
    print("};")
print("static const struct golden {\n    uint32_t type, n;\n    const uint8_t *block;\n"
      "    const uint32_t *bits;\n} goldens[] = {")
for kind, name, n in names:
    print(f"    {{{kind.value}, {n}, {name}_block, {name}_bits}},")
print("};")
