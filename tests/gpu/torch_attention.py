"""PyTorch's own attention on the shapes of gates.cc, in the same lines: what, measured, unit, wanted, verdict.

Keys and values lie in one piece a sequence here, which is easier than through block tables. Exit 1 with a
line on stderr where there is no PyTorch or no card for it.
"""
import sys

try:
    import torch
except ImportError:
    sys.exit("PyTorch is not installed")
if not torch.cuda.is_available():
    sys.exit("PyTorch sees no card")

HEADS, KV_HEADS, DIM = 32, 8, 128
attend = torch.nn.functional.scaled_dot_product_attention


def halves(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def microseconds(work):
    """The median of seven replays of a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times[2:])[3]


def decode(seqs, keys):
    layer = seqs * keys * KV_HEADS * DIM * 4
    layers = max(1, min(64, -(-(256 << 20) // layer)))
    kv = [(halves(seqs, KV_HEADS, keys, DIM), halves(seqs, KV_HEADS, keys, DIM)) for _ in range(layers)]
    q = halves(seqs, HEADS, 1, DIM)

    def work():
        for k, v in kv:
            attend(q, k, v, enable_gqa=True)

    return microseconds(work) / layers


def prefill(rows):
    q, k, v = halves(1, HEADS, rows, DIM), halves(1, KV_HEADS, rows, DIM), halves(1, KV_HEADS, rows, DIM)
    us = microseconds(lambda: attend(q, k, v, is_causal=True, enable_gqa=True))
    return rows * (rows + 1) / 2 * HEADS * DIM * 4 / us / 1e6


def line(what, measured, unit):
    print(f"PyTorch {torch.__version__}: {what}\t{measured:.4g}\t{unit}\t\t", flush=True)


with torch.inference_mode():
    for seqs, keys in ((1, 8192), (8, 4096), (8, 32768), (32, 4096), (64, 8192), (256, 8192)):
        line(f"decode {seqs} x {keys}", decode(seqs, keys), "us")
    line("prefill 8,192 rows, causal", prefill(8192), "TFLOP/s")
