"""kvpage beside llama.cpp, in turns on one machine: the ratio of the medians of each case.

usage: compare.py BENCH_ENGINE MODEL [--rounds N] [--threads N] [--json FILE] [case...]
Installs llama-cpp-python, which builds llama.cpp for this machine (minutes, a C++ compiler), into
a virtual environment in the cache, unless KVPAGE_PEER_SITE names a site-packages that has it.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import venv

HERE = os.path.dirname(os.path.abspath(__file__))
PEER = "llama-cpp-python==0.3.36"
CASES = {"prefill-512": 1.0, "decode": 1.0, "16x128": 1.0, "32-shared": 2.0}
# A case of ours may stand against the better of several ways of theirs.
PEER_CASES = {"32-shared": ["32-shared", "32-shared-streams"]}


def cache():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "kvpage")


def site_packages():
    given = os.environ.get("KVPAGE_PEER_SITE")
    if given:
        return given
    home = os.path.join(cache(), "peer-llama")
    site = sysconfig.get_path("platlib", vars={"base": home, "platbase": home})
    if not os.path.exists(os.path.join(site, "include", "llama.h")):
        print(f"installing {PEER} into {home}; this builds it and takes minutes", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([os.path.join(home, "bin", "pip"), "install", "-q", PEER], check=True)
    return site


def build_peer(site):
    out = os.path.join("build", "peer_llama")
    os.makedirs("build", exist_ok=True)
    lib = os.path.join(site, "lib")
    subprocess.run([os.environ.get("CC", "cc"), "-O2", f"-I{site}/include", "-o", out,
                    os.path.join(HERE, "peer_llama.c"), f"-L{lib}", "-lllama", "-lggml",
                    "-lggml-base", f"-Wl,-rpath,{lib}"], check=True)
    return out


class Side:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def run(self, case):
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args[0]} ended in case {case}")
        return json.loads(line)


def cpu_name():
    try:
        for line in open("/proc/cpuinfo"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json")
    parser.add_argument("cases", nargs="*")
    a = parser.parse_args()
    peer = build_peer(site_packages())
    ours = Side([a.bench, a.model, "--threads", str(a.threads), "--serve"])
    theirs = Side([peer, a.model, str(a.threads)])

    print(f"{cpu_name()}, {a.threads} threads, {a.rounds} rounds in turns, medians; {PEER}")
    print(f"{'case':14} {'kvpage':>10} {'llama.cpp':>10} {'ratio':>7} {'wanted':>7}")
    rows, missed = [], False
    for case in a.cases or CASES:
        ways = PEER_CASES.get(case, [case])
        ours.run(case)
        for way in ways:
            theirs.run(way)
        mine, other, last = [], {way: [] for way in ways}, None
        for _ in range(a.rounds):
            last = ours.run(case)
            mine.append(last["value"])
            for way in ways:
                other[way].append(theirs.run(way)["value"])
        m = statistics.median(mine)
        p = max(statistics.median(v) for v in other.values())
        want = CASES.get(case, 1.0)
        missed |= m / p < want
        rows.append({"case": case, "kvpage": m, "llama.cpp": p, "ratio": m / p, "wanted": want,
                     "rounds": mine, "rounds_peer": other})
        print(f"{case:14} {m:10.1f} {p:10.1f} {m / p:7.2f} {want:7.1f}", flush=True)
        if "blocks_over_ideal" in last:
            over, n = last["blocks_over_ideal"], last["sequences"]
            print(f"{'':14} KV memory: {over} blocks over the ideal, {n} sequences")
            missed |= over > n
    alone = subprocess.run([a.bench, a.model, "--threads", str(a.threads), "memory"],
                           capture_output=True, text=True, check=True)
    beyond = json.loads(alone.stdout)["value"] / 2**20
    print(f"memory beyond weights and KV: {beyond:.1f} MiB (wanted: below 64)")
    missed |= beyond >= 64
    if a.json:
        json.dump({"cpu": cpu_name(), "threads": a.threads, "peer": PEER, "cases": rows,
                   "memory_beyond_mib": beyond}, open(a.json, "w"), indent=1)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
