"""A program that answers a line of stdin with a line of JSON, and what memory it took."""
import json
import os
import signal
import subprocess
import threading

ANSWER_SECONDS = 1200  # a prompt of 8,000 tokens on a slow machine takes minutes


class Failed(Exception):
    pass


class Process:
    def __init__(self, command, log):
        """stderr goes to the file `log`: its last line says why a program ended."""
        self.log = log
        with open(log, "w") as errors:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    text=True, start_new_session=True)
            except OSError as e:
                raise Failed(str(e)) from e

    def ask(self, question):
        timer = threading.Timer(ANSWER_SECONDS, self.kill)
        timer.start()
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(question + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
            self.signal(signal.SIGSTOP)  # some engines spin while they wait for the next question
        try:
            answer = json.loads(line)
        except ValueError:
            raise Failed(f"{question}: {line.strip() or self.last_words()}") from None
        if "error" in answer:
            raise Failed(f"{question}: {answer['error']}")
        return answer

    def last_words(self):
        with open(self.log, errors="replace") as f:
            lines = [line.strip() for line in f if line.strip()]
        return lines[-1] if lines else "no answer"

    def peak_mib(self):
        """The most that was resident, children added (they may have peaked at other times)."""
        total = 0
        for pid in family(self.process.pid):
            try:
                with open(f"/proc/{pid}/status") as f:
                    total += sum(int(line.split()[1]) for line in f if line.startswith("VmHWM:"))
            except OSError:
                pass  # it has ended
        return total / 1024

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # it has ended

    def kill(self):
        self.signal(signal.SIGKILL)

    def end(self):
        try:
            self.process.stdin.close()
        except OSError:
            pass  # it has ended before
        self.signal(signal.SIGCONT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        self.kill()  # and whatever it left behind
        self.process.wait()
        self.process.stdout.close()


def family(root):
    """The process and all below it."""
    children = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as f:
                parent = int(f.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
