"""Case BUG-104: worker groups that find no place are waited for, with what is asked and what is there, and not for
ever."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from api_calls import complete
from ray_probe import RayProbe
from raylets import Raylets, raylets
from serve_process import ServeProcess, wait_until

from octavo.cluster.local_ray import free_ports

SPREAD = ("--tensor-parallel-size", "2", "--placement", "spread", "--replicas", "1", "--num-gpu-blocks-override", "64")
"""Two ranks, each on a node of its own; there is one node."""
HEAD = "127.0.0.2"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Raylets]:
    """A head."""
    with raylets() as nodes:
        yield nodes


def serve(nodes: Raylets, address: str, *args: str) -> tuple[int, str]:
    """Exit code and output of a start that fails."""
    command = [sys.executable, "-m", "octavo.cluster", "serve", "--port", "0", "--address", address, *args]
    done = subprocess.run(command, env=nodes.environment, capture_output=True, text=True, timeout=170)
    return done.returncode, done.stderr


def test_a_node_that_never_comes_is_waited_for_as_long_as_was_said(nodes: Raylets) -> None:
    code, said = serve(nodes, nodes.address, *SPREAD, "--startup-timeout-s", "15")
    assert code != 0
    assert "waiting for the cluster to grow" in said
    last = said.strip().splitlines()[-1]
    assert all(word in last for word in ("--startup-timeout-s", "1 of 1 worker groups wait for a place", HEAD)), said
    wait_until_nothing_is_held(nodes)


def test_a_node_that_comes_later_is_used(nodes: Raylets) -> None:
    """Not ready until then; the service is up afterwards."""
    port = free_ports(1)[0]
    seen: list[int] = []
    comes = threading.Thread(target=join_when_asked, args=(nodes, port, seen), daemon=True)
    comes.start()
    server = ServeProcess(
        *("--port", str(port), "--address", nodes.address, *SPREAD), environment=nodes.environment, timeout_s=170
    )
    try:
        comes.join(60)
        assert 200 not in seen, "ready without a place for its ranks"
        assert any("wait for a place" in line for line in server.lines), "".join(server.lines)
        assert complete(server, "Hello", max_tokens=2).status == 200
    finally:
        assert server.stop() == 0
    wait_until_nothing_is_held(nodes)


def join_when_asked(nodes: Raylets, port: int, seen: list[int]) -> None:
    """Another node, when Serve has answered for a while that nothing is ready."""
    while len(seen) < 20:
        with contextlib.suppress(httpx.TransportError):
            seen.append(httpx.get(f"http://127.0.0.1:{port}/ready", timeout=30).status_code)
        time.sleep(0.5)  # a pace, not a wait
    nodes.start("127.0.0.3")


def wait_until_nothing_is_held(nodes: Raylets) -> None:
    """No placement group, no CPU."""
    probe = RayProbe(nodes.address, nodes.environment)
    try:
        nothing = {"placement_groups": 0, "cpus": 0.0}
        wait_until(lambda: probe.ask("held") == nothing, timeout_s=20, what="all places and CPUs given back")
    finally:
        probe.close()


def test_a_wrong_address_is_named(nodes: Raylets) -> None:
    wrong = f"{HEAD}:{free_ports(1)[0]}"
    code, said = serve(nodes, wrong, "--replicas", "1")
    assert code == 2
    assert said.strip().splitlines()[-1].startswith(f"octavo serve: error: --address: nothing answers at {wrong}")
