"""A rank's process does not outlive its parent, and gives its stacks when asked: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from octavo.worker.lifeline import STACKS_SIGNAL, process_start_s

CHILD = """
import signal, threading, time
from octavo.worker.lifeline import die_with_parent, write_stacks_on_signal
die_with_parent()
write_stacks_on_signal()
def waits_for_the_others(): time.sleep(600)
thread = threading.Thread(target=waits_for_the_others, daemon=True)
thread.start()
print("ready", flush=True)
thread.join()
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_dies_with_its_node_s_ray(is_stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if is_stopped:
            child.suspend()
        parent.kill()
        try:
            child.wait(10.0)
        finally:
            if child.is_running():
                child.kill()


def test_it_writes_the_stacks_of_all_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=-1, stderr=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.send_signal(STACKS_SIGNAL)
        lines = iter(child.stderr.readline, "")
        assert any("waits_for_the_others" in line for line in lines)
        child.send_signal(signal.SIGKILL)


def test_a_process_has_a_start_besides_its_number() -> None:
    assert process_start_s() == psutil.Process(os.getpid()).create_time()
