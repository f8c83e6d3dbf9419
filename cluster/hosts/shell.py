"""Programs run on other hosts, by the ``ssh`` program: the user's keys, agent, jump hosts and aliases all apply."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from ...worker.errors import ConfigurationError
from .host import Host

T = TypeVar("T")
R = TypeVar("R")

CONNECT_S = 10
GIVE_UP_S = 0.1
_SSH_FAILED = 255
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_TIMED_OUT = 124
"""The exit code that ``timeout`` has for it."""

_OPTIONS = (
    *("-o", "BatchMode=yes"),  # asks nobody for a password
    *("-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6"),  # a host that goes away is noticed in 30 s
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: its exit code and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line of stderr that says something."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


class Shell:
    """Runs programs on hosts. ``command`` is a program with ssh's command line; or, with ``{host}`` in it, a template
    such as ``kubectl exec -i {host} -- sh -c``, behind which the remote command is put as one word."""

    def __init__(self, command: str = "ssh") -> None:
        """Raises ConfigurationError for a command that cannot be split into words."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigurationError(f"--ssh-command: {error}, got {command!r}") from error
        if not self._words:
            raise ConfigurationError("--ssh-command: must not be empty")
        self._running: set[subprocess.Popen[str]] = set()

    def give_up(self) -> None:
        """End all programs that run: ``run`` returns in the threads that wait for them."""
        for process in tuple(self._running):
            _kill(process)

    def run(
        self,
        host: Host,
        program: Sequence[str],
        *,
        stdin: str,
        timeout_s: float,
        on_line: Callable[[str], None] = lambda _: None,
    ) -> Outcome:
        """Run ``program`` on ``host``; ``on_line`` gets each line of its stderr at once, in another thread.

        Secrets belong into ``stdin``: command lines can be read by everybody on both machines. Never raises for what
        fails there.
        """
        try:
            process = subprocess.Popen(
                self.words(host, program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for us, who then take down what was started
            )
        except OSError as error:
            return Outcome(_NOT_FOUND if host.is_here else _SSH_FAILED, "", f"{error.filename}: {error.strerror}")
        self._running.add(process)
        try:
            return _communicate(process, stdin, timeout_s, on_line)
        finally:
            self._running.discard(process)

    def on_all(self, call: Callable[[T], R], each: Sequence[T]) -> list[R]:
        """``call`` for each at once, in threads; what they run ends when this is left early, as by Ctrl-C."""
        with ThreadPoolExecutor(max(1, len(each))) as pool:
            calls = [pool.submit(call, one) for one in each]
            try:
                return [done.result() for done in calls]
            except BaseException:
                while wait(calls, GIVE_UP_S).not_done:  # also those that are just about to run something
                    self.give_up()
                raise

    def words(self, host: Host, program: Sequence[str]) -> list[str]:
        """The local command line."""
        if host.is_here:
            return list(program)
        remote = shlex.join(program)
        if any("{host}" in word for word in self._words):
            return [*(word.replace("{host}", host.name) for word in self._words), remote]
        port = () if host.port is None else ("-p", str(host.port))
        name = host.name if host.user is None else f"{host.user}@{host.name}"
        return [*self._words, *_OPTIONS, *port, "--", name, remote]


def _communicate(
    process: subprocess.Popen[str], stdin: str, timeout_s: float, on_line: Callable[[str], None]
) -> Outcome:
    said: list[str] = []
    written: list[str] = []
    readers = (
        threading.Thread(target=_read_lines, args=(process.stderr, said, on_line), daemon=True),
        threading.Thread(target=_read_lines, args=(process.stdout, written, lambda _: None), daemon=True),
    )
    for reader in readers:
        reader.start()
    try:
        _give(process, stdin)
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        code = _TIMED_OUT
        said.append(f"no answer within {timeout_s:g} s")
    except BaseException:
        _kill(process)
        raise
    for reader in readers:
        reader.join(1.0)  # a process left behind there may hold the other end
    return Outcome(code, "\n".join(written), "\n".join(said))


def _kill(process: subprocess.Popen[str]) -> None:
    """With what it has started, such as a ProxyCommand: it leads a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _give(process: subprocess.Popen[str], stdin: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it has ended; its exit code says why
        pipe.write(stdin)


def _read_lines(pipe: object, into: list[str], on_line: Callable[[str], None]) -> None:
    for line in pipe:  # type: ignore[attr-defined]
        into.append(line.rstrip("\n"))
        on_line(line.rstrip("\n"))


_CAUSES = (
    ("Permission denied", "the SSH key was refused; try `ssh {host}`, and ssh-copy-id or ssh-add"),
    ("Host key verification failed", "its host key is unknown or has changed; run `ssh {host}` once and look at it"),
    ("Could not resolve", "no such host; correct the name, or add it to ~/.ssh/config"),
    ("Connection refused", "nothing listens there; is sshd running, and is the port right (user@host:port)?"),
    ("timed out", "it does not answer; is it up, and do firewalls let SSH through?"),
    ("No route to host", "it cannot be reached from here; is it up?"),
    ("no answer within", "it does not answer in time; is it up, and not overloaded?"),
)


def explain(host: Host, python: str, outcome: Outcome) -> str:
    """One line: why a program did not run there, and what to do."""
    for sign, advice in _CAUSES:
        if sign in outcome.stderr:
            return f"{outcome.last_words}: {advice.format(host=host)}"
    if outcome.code in (_NOT_FOUND, _NOT_EXECUTABLE):
        return f"there is no Python at {python}; install Octavo there, or name its Python (python= or --python)"
    if outcome.code == _SSH_FAILED:
        return f"SSH failed: {outcome.last_words}"
    return f"{python} failed: {outcome.last_words}"
