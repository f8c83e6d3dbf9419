"""The processes of a served application: starting it, what CPU time each spends, and where it goes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from octavo.cluster.load.processes import processes_of, spent_s

READY = re.compile(r"ready after .*: (?P<model>\S+) at http://[^:]+:(?P<port>\d+)/v1")
START_TIMEOUT_S = 180.0
_LINE = re.compile(r":\d+$")
_INSTALLED = re.compile(r".*/site-packages/(?P<library>ray/serve|\w+)")
_STANDARD = re.compile(r".*/lib/python3\.\d+/(?P<module>\w+)")


class PacedServer:
    """``paced_serve.py``; up when the constructor returns."""

    def __init__(self, num_streams: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("paced_serve.py")), "--max-num-seqs", str(num_streams)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self._ready, self._lines = threading.Event(), list[str]()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(START_TIMEOUT_S) or not self.port:
            self.stop()
            raise RuntimeError("the application did not come up:\n" + "".join(self._lines))

    model = ""
    port = 0

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if match := READY.search(line):
                self.model, self.port = match["model"], int(match["port"])
                self._ready.set()
        self._ready.set()

    def cpu_s(self) -> Counter[str]:
        """CPU seconds so far, of all processes of each kind."""
        return Counter(spent_s(self._process.pid))

    @property
    def gateway(self) -> int:
        return next(each.pid for kind, each in processes_of(self._process.pid) if kind == "gateway")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def thread_cpu_s(pid: int) -> Counter[str]:
    """CPU seconds so far of a process's threads, by their names, user and system apart."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    seconds: Counter[str] = Counter()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            head, _, fields = (thread / "stat").read_text().rpartition(") ")
            name = "main thread" if int(thread.name) == pid else f"threads {head.partition('(')[2]}"
            user, system = fields.split()[11:13]
            seconds[f"{name}, user"] += int(user) * tick_s
            seconds[f"{name}, system"] += int(system) * tick_s
    return seconds


class Profile:
    """py-spy's samples of one process: of each sample, the part that its innermost function belongs to."""

    def __init__(self, stacks: str) -> None:
        self.parts: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()
        for line in stacks.splitlines():
            frames, _, count = line.rpartition(" ")
            innermost = frames.split(";")[-1]
            self.parts[_part(innermost)] += int(count)
            self.functions[_short(innermost)] += int(count)

    def lines(self, num_functions: int = 40) -> Iterator[str]:
        total = sum(self.parts.values())
        for part, count in self.parts.most_common():
            yield f"{100 * count / total:5.1f} %  {part}"
        yield f"of {total} samples; by function:"
        for function, count in self.functions.most_common(num_functions):
            yield f"{100 * count / total:5.1f} %  {function}"


@contextlib.contextmanager
def profiled(pid: int, seconds: int) -> Iterator[list[Profile]]:
    """Records for so long while the block runs; the list holds the profile after it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stacks"
        options = ["--format", "raw", "--full-filenames", "--rate", "250", "--duration", str(seconds), "--gil"]
        command = [str(Path(sys.executable).with_name("py-spy")), "record", *options, "-o", str(path), "-p", str(pid)]
        found: list[Profile] = []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            yield found
        found.append(Profile(path.read_text()))


def _part(frame: str) -> str:
    """The library, or the module of ours, that a frame ``function (file:line)`` is in."""
    file = _LINE.sub("", frame.rpartition("(")[2].rstrip(")"))
    if match := _INSTALLED.match(file):
        return match["library"]
    if match := _STANDARD.match(file):
        return match["module"]
    return file.removeprefix(str(Path(__file__).parents[2]))


def _short(frame: str) -> str:
    function, _, file = frame.rpartition("(")
    return f"{function}({'/'.join(Path(_LINE.sub('', file.rstrip(')'))).parts[-2:])})"
