"""The number of worker groups follows the load, both ways, and no request notices."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from load import steady_load
from serve_client import wait_until_idle
from serve_process import ServeProcess, wait_until

FOLLOWING_S = 150.0
FLAGS = ("--replicas", "1", "--max-replicas", "2", "--max-num-seqs", "2", "--num-gpu-blocks-override", "600")
TARGETS = ("--target-ttft-ms", "4000", "--downscale-delay-s", "5")
MANY, FEW = 24, 1


@pytest.fixture
def server() -> Iterator[ServeProcess]:
    process = ServeProcess(*FLAGS, *TARGETS)
    yield process
    process.stop()


def wait_for_groups(server: ServeProcess, count: int) -> None:
    def are_there() -> bool:
        text = httpx.get(f"{server.url}/metrics", timeout=30).text
        return len(set(re.findall(r'octavo_num_requests_running\{group="([^"]+)"', text))) == count

    wait_until(are_there, timeout_s=FOLLOWING_S, what=f"{count} worker groups")


def test_a_group_comes_with_many_clients_and_goes_with_few(server: ServeProcess) -> None:
    with steady_load(server, FEW) as few:
        with steady_load(server, MANY) as many:
            wait_for_groups(server, 2)
        wait_for_groups(server, 1)
    assert len(set(few + many)) == 1
    wait_until_idle(server)
