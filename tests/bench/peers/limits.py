"""What the machine allows at most in each case: bytes over the read bandwidth, or multiply-adds
over their peak rate, whichever takes longer.

Weights count as they lie in the file, keys and values with 16 bits each, and nothing is read twice
in a step. Products with quantised weights run at the peak of bytes, the others and attention at
that of floats; what an engine computes beside them (norms, scales, activations) is not counted, so
no engine reaches the limit of a case with many rows.
"""


class Limits:
    def __init__(self, facts, machine):
        """facts: of bench_engine --facts. machine: read_gb_s, float_gop_s, byte_gop_s."""
        self.facts = facts
        self.bandwidth = machine["read_gb_s"] * 1e9
        self.floats = machine["float_gop_s"] * 1e9 / 2  # an operation is half a multiply-add
        self.bytes = (machine["byte_gop_s"] or machine["float_gop_s"]) * 1e9 / 2

    def weights(self, rows, outputs):
        """Bytes, and seconds of multiply-adds, of a step with so many rows, some with an output."""
        total, seconds = 0, 0.0
        for part, n in (("body", rows), ("head", outputs)):
            p = self.facts[part]
            total += p["bytes"] if n else 0
            if n and self.floats and self.bytes:
                seconds += n * (p["byte_products"] / self.bytes + p["float_products"] / self.floats)
        return total, seconds

    def kv_bytes(self, depth):
        return sum(g["layers"] * g["kv_heads"] * (g["key_dim"] + g["value_dim"]) * 2 *
                   min(depth, g["window"] or depth) for g in self.facts["groups"])

    def attention(self, pairs_of_window):
        """Seconds; pairs_of_window(w) says how many keys all queries see together."""
        if not self.floats:
            return 0.0
        return sum(g["layers"] * g["query_heads"] * (g["key_dim"] + g["value_dim"]) *
                   pairs_of_window(g["window"]) for g in self.facts["groups"]) / self.floats

    def slower(self, read, seconds):
        memory = read / self.bandwidth
        return (memory, "memory") if memory >= seconds else (seconds, "arithmetic")

    def prompt(self, n):
        """Seconds until the first token of a new prompt."""
        def pairs(window):
            w = min(n, window or n)
            return w * (w + 1) / 2 + (n - w) * w
        read, seconds = self.weights(n, 1)
        return self.slower(read, seconds + self.attention(pairs))

    def step(self, sequences, depth, shared=0):
        """Seconds of one step of decoding; the first `shared` tokens are common to all."""
        read, seconds = self.weights(sequences, sequences)
        own = self.kv_bytes(depth) - self.kv_bytes(shared)
        read += self.kv_bytes(shared) + sequences * own
        seconds += self.attention(lambda window: sequences * min(depth, window or depth))
        return self.slower(read, seconds)

    def of(self, case):
        """(value, what bounds it) in the case's own unit, or None."""
        steps = {  # sequences, depth in the middle of what is timed, shared
            "decode": (1, 16 + 24, 0), "decode-1": (1, 16 + 24, 0), "decode-7900": (1, 7912, 0),
            "16x128": (16, 128 + 14, 0), "32x512": (32, 512 + 14, 0),
            "32-shared": (32, 2048 + 15, 2048),
        }
        if case in steps:
            seconds, why = self.step(*steps[case])
            return steps[case][0] / seconds, why
        if case == "prefill-512":
            seconds, why = self.prompt(512)
            return 512 / seconds, why
        if case in ("mixed", "mixed-short"):  # a row of the others costs about one of the prompt
            n = 8000 if case == "mixed" else 1000
            seconds, why = self.prompt(n)
            return n / seconds, why
        if case.startswith("start"):  # the file is read once, then a prompt
            return self.facts["file_bytes"] / self.bandwidth + self.prompt(64)[0], "memory"
        return None
