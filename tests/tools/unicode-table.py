#!/usr/bin/env python3
"""Writes lib/model/unicode_data.h from Python's unicodedata.

The table is that of Unicode 15.1, the version llama.cpp has: Python 3.13, or an older one with the
package unicodedata2 15.1.0. Usage: unicode-table.py > lib/model/unicode_data.h
"""
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

VERSION = "15.1.0"
CLASSES = {"Lu": 1, "Lt": 1, "Ll": 2, "Lm": 3, "Lo": 3, "M": 4, "N": 5, "P": 6, "S": 7}
SPACES = [*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029,
          0x202F, 0x205F, 0x3000]  # the property White_Space, which unicodedata does not have
SPACE = 8


def class_of(c):
    if c in SPACES:
        return SPACE
    category = unicodedata.category(chr(c))
    return CLASSES.get(category, CLASSES.get(category[0], 0))


def main():
    if unicodedata.unidata_version != VERSION:
        sys.exit(f"this is Unicode {unicodedata.unidata_version}; {VERSION} is wanted")
    runs = []
    for c in range(0x110000):
        k = class_of(c)
        if not runs or runs[-1][1] != k:
            runs.append((c, k))
    print(f"/* Made by tests/tools/unicode-table.py from Unicode {VERSION}. Runs of code points of one class:")
    print(" * first code point << 4 | class (kvp__unicode_class of unicode.h), in ascending order. */")
    print("static const uint32_t unicode_runs[] = {")
    for i in range(0, len(runs), 9):
        print("    " + " ".join(f"0x{c << 4 | k:x}," for c, k in runs[i:i + 9]))
    print("};")


main()
