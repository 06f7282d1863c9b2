"""The cases that engines are compared in, and how much better than the best peer kvpage must be."""
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str = "tokens/s"
    field: str = "value"  # of the answer
    more_is_better: bool = True


@dataclass(frozen=True)
class Case:
    name: str
    ask: str = ""           # what the engines are asked for; empty: the name
    threads: int = 0        # 0: as many as the run has
    warm_up: str = ""       # asked once before the rounds; empty: the same as `ask`
    most_rounds: int = 99
    context: int = 0        # tokens of one sequence
    metrics: tuple = field(default=())

    @property
    def question(self):
        return self.ask or self.name

    @property
    def rows(self):
        return self.metrics or (Metric(self.name),)


def mixed(name, prompt):
    """A step of several seconds is long enough to be measured in few rounds."""
    return Case(name, warm_up="mixed-short", most_rounds=3, context=prompt + 1, metrics=(
        Metric(f"{name} rate"), Metric(f"{name} gap", "ms, P99", "gap_ms", False)))


CASES = {c.name: c for c in (
    Case("prefill-512", context=513),
    Case("decode", context=80),
    Case("decode-1", ask="decode", threads=1, context=80),
    Case("decode-7900", context=7930),
    Case("16x128", context=180),
    Case("32x512", context=560),
    Case("32-shared", context=2100),
    mixed("mixed", 8000),
    mixed("mixed-short", 1000),
    # With our packed file there, as it is from the second start on; and without one.
    Case("start", context=65, metrics=(Metric("start", "s", "seconds", False),)),
    Case("start-packing", ask="start", context=65,
         metrics=(Metric("start-packing", "s", "seconds", False),)),
    Case("busy", context=80, metrics=(Metric("busy"),)),
)}

USUAL = ["prefill-512", "decode", "decode-7900", "16x128", "32x512", "32-shared", "mixed", "start",
         "start-packing", "busy"]
RANDOM_MODEL = ["prefill-512", "decode", "decode-1", "decode-7900", "16x128"]

# How many times better than the best peer (busy: than its own with a thread less, undisturbed).
WANTED = {
    "S": {"prefill-512": 1.1, "decode": 2.2, "decode-7900": 1.6, "16x128": 2, "32x512": 2,
          "32-shared": 1.8, "mixed rate": 1.2, "mixed gap": 2, "start": 1.5, "busy": 0.95},
    "G": {"prefill-512": 2, "decode": 1.3},
    "T q8_0": {"prefill-512": 1.05, "decode": 0.95, "decode-1": 0.95, "16x128": 1.5},
    "T q4_0": {"prefill-512": 1.05, "decode": 1.1, "decode-1": 1.1, "decode-7900": 2.5,
               "16x128": 1.5},
    "T f16": {"decode": 0.95, "decode-1": 0.95},
}
# Share of the limit.
WANTED_SHARE = {
    "T q8_0": {"decode": 0.92, "decode-1": 0.92},
    "T q4_0": {"decode": 0.85, "decode-1": 0.85},
    "T f16": {"decode": 0.92, "decode-1": 0.92},
}


def which_model(facts, random_kind):
    """The name that the tables above know it by, or None."""
    if random_kind:
        return f"T {random_kind}"
    known = {("llama", 576): "S", ("gemma3", 640): "G"}
    return known.get((facts["architecture"], facts["width"]))
