"""The process that keeps a launched Ray node: ``python -m octavo.cluster.hosts.keeper ID``, one on each host.

It starts ``ray start --block`` and adopts all that comes of it, so that one SIGTERM ends the node with everything on it
and nothing is left. It reads its orders, the token among them, from stdin; says on the descriptor it is given when the
node is there; and outlives the connection that started it. When the node ends by itself, so does the keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any, TextIO

from ..local_ray import adopt_orphans, no_process_left
from ..supervisor import end_with_parent
from .answers import answer_line

STOP_S = 20.0
"""``ray start --block`` may take so long to end its processes when it is told to."""

_STARTED = "Ray runtime started"


def main() -> None:
    orders: dict[str, Any] = json.load(sys.stdin)
    os.environ.update(orders["environment"])
    adopt_orphans()
    with no_process_left():
        raise SystemExit(_keep(orders["command"], os.fdopen(orders["ready_fd"], "w")))


def _keep(command: list[str], ready: TextIO) -> int:
    node = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _end(node))
    threading.Thread(target=_follow, args=(node.stdout, ready), daemon=True).start()
    return _reap_until(node.pid)


def _end(node: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(node.pid, signal.SIGTERM)
    killer = threading.Timer(STOP_S, node.kill)
    killer.daemon = True
    killer.start()


def _follow(output: TextIO, ready: TextIO) -> None:
    """What the node says goes to our log. Whoever waits is told when it is up; the end of file tells that it is not."""
    with ready:
        for line in output:
            print(line, end="", flush=True)
            if _STARTED in line and not ready.closed:
                print(answer_line({"ready": True}), file=ready, flush=True)
                ready.close()


def _reap_until(pid: int) -> int:
    """Wait for children, adopted ones too, until ``pid`` has ended; its exit code."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return abs(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
