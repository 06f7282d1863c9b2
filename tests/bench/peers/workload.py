"""The cases of ../bench_engine.c for a peer that is driven from Python, one case per line of stdin.

A driver gives serve() an engine with three methods:

    add(key, tokens)    a greedy sequence without an end token; key is a number, never used twice
    step()              one step; a list of (key, how many tokens it gave)
    drop(keys)          ends these sequences; their KV may stay, for later prompts that begin so

Prompts, warm-up steps and what is timed are those of ../bench_engine.c: see its first comment.
"""
import json
import math
import sys
import time

WARM_STEPS, MULTI_STEPS, DECODE_TOKENS = 2, 24, 48
DEPTH, SHARED, MIXED_SEQS, MIXED_PROMPT = 7900, 2048, 8, 128

# Tokens of KV that a case has at most at one time, for a peer whose cache has a fixed size.
CACHE_TOKENS = {
    "prefill-512": 1024, "decode": 256, "start": 256, "16x128": 16 * 192, "32x512": 32 * 576,
    "32-shared": SHARED + 32 * 64, "decode-7900": 8192, "mixed": 8192 + MIXED_SEQS * 512,
    "mixed-short": 8192 + MIXED_SEQS * 512,
}


def token_at(i):
    return 1000 + i * 7919 % 40000


def prompt(n, which, number):
    return [token_at(i * 31 + which * 101 + number * 1009) for i in range(n)]


def p99(values):
    """The smallest that 99 of 100 do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


class Workload:
    def __init__(self, engine):
        self.engine = engine
        self.number = 0  # of the case that runs, so that no prompt is in the cache from before
        self.next_key = 0
        self.begin()

    def begin(self):
        self.given, self.last, self.gaps = {}, {}, None

    def add(self, tokens):
        self.given[self.next_key] = 0
        self.engine.add(self.next_key, tokens)
        self.next_key += 1

    def step_until(self, least):
        """Steps until every sequence has given so many; how many all gave together meanwhile."""
        total = 0
        while min(self.given.values()) < least:
            for key, count in self.engine.step():
                if count == 0:
                    continue
                t = time.perf_counter()
                if self.gaps is not None and self.given[key]:
                    self.gaps.append(t - self.last[key])
                self.given[key] += count
                self.last[key] = t
                total += count
        return total

    def finish(self):
        self.engine.drop(list(self.given))
        self.begin()
        self.number += 1

    def rate(self, warm, least):
        self.step_until(warm)
        target = max(self.given.values()) + least
        start = time.perf_counter()
        return self.step_until(target) / (time.perf_counter() - start)

    def first_token(self, n):
        tokens = prompt(n, 0, self.number)
        start = time.perf_counter()
        self.add(tokens)
        self.step_until(1)
        return n / (time.perf_counter() - start)

    def decode(self):
        self.add(prompt(16, 0, self.number))
        return self.rate(1, DECODE_TOKENS)

    def decode_deep(self):
        self.add(prompt(DEPTH, 0, 0))
        return self.rate(1, MULTI_STEPS)

    def many(self, n, length, number):
        for which in range(n):
            self.add(prompt(length, which, number))
        return self.rate(WARM_STEPS, MULTI_STEPS)

    def shared(self):
        """The prompt goes first alone: a peer may not find what is still being computed."""
        common = [token_at(i) for i in range(SHARED)]
        number = self.number
        self.add(common)
        self.step_until(1)
        self.finish()
        for i in range(32):
            self.add(common + [token_at(i * 50 + number * 13 + 1)])
        return self.rate(WARM_STEPS, MULTI_STEPS)

    def mixed(self, length):
        for which in range(1, MIXED_SEQS + 1):
            self.add(prompt(MIXED_PROMPT, which, self.number))
        long_prompt = prompt(length, 0, self.number)
        self.step_until(4)
        self.gaps = []
        start = time.perf_counter()
        self.add(long_prompt)
        generated = self.step_until(1)
        took = time.perf_counter() - start
        return (length + generated) / took, {"gap_ms": p99(self.gaps) * 1e3}

    def run(self, case):
        cases = {
            "prefill-512": lambda: self.first_token(512),
            "start": lambda: self.first_token(64),
            "decode": self.decode,
            "decode-7900": self.decode_deep,
            "16x128": lambda: self.many(16, 128, self.number),
            "32x512": lambda: self.many(32, 512, 0),
            "32-shared": self.shared,
            "mixed": lambda: self.mixed(8000),
            "mixed-short": lambda: self.mixed(1000),
        }
        if case not in cases:
            return {"case": case, "error": "not known"}
        result = cases[case]()
        self.finish()
        value, more = result if isinstance(result, tuple) else (result, {})
        return {"case": case, "value": round(value, 3), "unit": "tokens/s", **more}


def serve(engine):
    workload = Workload(engine)
    for line in sys.stdin:
        print(json.dumps(workload.run(line.strip())), flush=True)
