"""python convert_accuracy.py ORACLE.npz accuracy-NAME.bin

The oracle's output as the accuracy test reads it. The oracle is transformers in float32 on the same
GGUF file; for each position of each text it has the 32 most likely ids and their log-probabilities:
ids{i} int32 [n], top{i} int32 [n, 32], lp{i} float32 [n, 32].

The file: u32 texts, then of each text u32 n, i32 ids[n], i32 top[n][32], f32 lp[n][32].
"""
import sys

import numpy as np

oracle = np.load(sys.argv[1])
texts = sum(name.startswith("ids") for name in oracle.files)
with open(sys.argv[2], "wb") as f:
    f.write(np.uint32(texts).tobytes())
    for i in range(texts):
        ids, top, lp = (oracle[f"{k}{i}"] for k in ("ids", "top", "lp"))
        assert top.shape == lp.shape == (len(ids), 32)
        f.write(np.uint32(len(ids)).tobytes() + ids.astype(np.int32).tobytes() +
                top.astype(np.int32).tobytes() + lp.astype(np.float32).tobytes())
