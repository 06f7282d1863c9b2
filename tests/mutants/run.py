"""Plants faults, one at a time, and sees that the tests catch each.

usage: run.py [name-part...]
The faults are in the files faults*.txt beside this one:

    == name: what it breaks
    file: lib/room/file.c
    tests: unit/room/test_x api/test_y        (what must catch it, under tests/)
    -the original text, one or more lines, found exactly once in the file
    +what stands there instead, if anything

Works in a copy of the tracked and new files under build/mutants, so that nothing here is touched.
A test that fails, crashes, or runs longer than its limit has caught the fault; one that does not
compile is a mistake in the list, as is an original text that is not there.
"""
import glob
import os
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TREE = os.path.join(ROOT, "build", "mutants", "tree")
LIMIT = int(os.environ.get("MUTANT_LIMIT", "120"))


class Fault:
    def __init__(self, head):
        self.name, _, self.what = head.partition(":")
        self.name, self.what = self.name.strip(), self.what.strip()
        self.file, self.tests, self.old, self.new = "", [], [], []

    def apply(self, text):
        old = "\n".join(self.old)
        new = "\n".join(self.new)
        if text.count(old) != 1:
            return None
        return text.replace(old, new)


def read_faults(path):
    faults = []
    for line in open(path):
        line = line.rstrip("\n")
        if line.startswith("== "):
            faults.append(Fault(line[3:]))
        elif line.startswith("file: "):
            faults[-1].file = line[6:].strip()
        elif line.startswith("tests: "):
            faults[-1].tests = line[7:].split()
        elif line.startswith("-"):
            faults[-1].old.append(line[1:])
        elif line.startswith("+"):
            faults[-1].new.append(line[1:])
    return faults


def make(*arguments):
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", "-s", "CUDA=0", *arguments], cwd=TREE, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def copy_tree():
    """Only what changed is written, so that what was built stays usable."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                            capture_output=True, check=True).stdout.split("\n")
    wanted = {f for f in listed if f and os.path.isfile(os.path.join(ROOT, f))}
    for f in wanted:
        source, target = os.path.join(ROOT, f), os.path.join(TREE, f)
        data = open(source, "rb").read()
        if os.path.exists(target) and open(target, "rb").read() == data:
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "wb").write(data)
        shutil.copymode(source, target)
    for folder, folders, files in os.walk(TREE):
        if folder == TREE and "build" in folders:
            folders.remove("build")
        for f in files:
            path = os.path.join(folder, f)
            if os.path.relpath(path, TREE) not in wanted:
                os.remove(path)


def run_test(program):
    try:
        done = subprocess.run([program], cwd=TREE, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=LIMIT)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False


def programs_of(tests, built):
    found = []
    for t in tests:
        matches = [p for p in built if p.endswith("/tests/" + t)]
        if not matches:
            sys.exit(f"mutants: no test program tests/{t}")
        found += matches
    return found


def main():
    faults = [f for path in sorted(glob.glob(os.path.join(HERE, "faults*.txt")))
              for f in read_faults(path)]
    if len(sys.argv) > 1:
        faults = [f for f in faults if any(part in f.name for part in sys.argv[1:])]
    copy_tree()
    os.environ.setdefault("KVPAGE_TESTS", os.path.join(TREE, "tests"))
    built = make("print-tests").stdout.split()
    used = sorted({p for f in faults for p in programs_of(f.tests, built)})
    print(f"building {len(used)} test programs", flush=True)
    done = make(*used)
    if done.returncode:
        sys.exit(done.stdout)
    for p in used:
        if not run_test(os.path.join(TREE, p)):
            sys.exit(f"mutants: {p} fails without any fault")

    missed, stale, start = [], [], time.time()
    for f in faults:
        path = os.path.join(TREE, f.file)
        original = open(path).read() if os.path.exists(path) else ""
        planted = f.apply(original)
        if planted is None:
            stale.append(f.name)
            print(f"  STALE   {f.name}: its original text is not in {f.file} once", flush=True)
            continue
        programs = programs_of(f.tests, built)
        open(path, "w").write(planted)
        try:
            done = make(*programs)
            if done.returncode:
                stale.append(f.name)
                print(f"  BROKEN  {f.name}: does not compile\n{done.stdout[-2000:]}", flush=True)
                continue
            by = next((p for p in programs if not run_test(os.path.join(TREE, p))), None)
        finally:
            open(path, "w").write(original)
        if by:
            print(f"  caught  {f.name}, by {by.split('/tests/')[1]}", flush=True)
        else:
            missed.append(f.name)
            print(f"  MISSED  {f.name}: {f.what}", flush=True)
    make(*used)
    caught = len(faults) - len(missed) - len(stale)
    print(f"{caught} caught, {len(missed)} missed, {len(stale)} stale, "
          f"{time.time() - start:.0f} s")
    return 1 if missed or stale else 0


if __name__ == "__main__":
    sys.exit(main())
