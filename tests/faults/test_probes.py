"""What probes and scrapers are told while groups are dead, one and all, and while Serve's controller is."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest
from api_calls import complete
from serve_client import wait_until_idle
from serve_process import ServeProcess, wait_until

RECOVERY_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    process = ServeProcess("--replicas", "2")
    yield process
    process.stop()


def ready(server: ServeProcess) -> tuple[int, str]:
    """The gateway is alive and gives metrics, whatever it says of being ready."""
    for path in ("/health", "/metrics"):
        assert httpx.get(f"{server.url}{path}", timeout=30).status_code == 200, path
    answer = httpx.get(f"{server.url}/ready", timeout=30)
    assert answer.json()["ready"] == (answer.status_code == 200)
    return answer.status_code, answer.json()["reason"]


def wait_for_groups(server: ServeProcess) -> None:
    wait_until(lambda: ready(server) == (200, "2 worker groups ready"), timeout_s=RECOVERY_S, what="two groups")


def test_with_one_group_dead_it_is_ready(server: ServeProcess) -> None:
    wait_for_groups(server)
    server.workers()[0].kill()
    wait_until(lambda: ready(server)[1] == "1 worker group ready", timeout_s=10, what="the loss is seen")
    assert ready(server)[0] == 200
    assert complete(server, "Hello", max_tokens=2).status == 200
    wait_for_groups(server)


def test_with_all_groups_dead_it_is_alive_and_not_ready(server: ServeProcess) -> None:
    """Who asks meanwhile waits for the next group, or is told to come again; nobody hears of an error."""
    wait_for_groups(server)
    for worker in server.workers():
        worker.kill()
    wait_until(lambda: ready(server) == (503, "no worker group is ready"), timeout_s=10, what="the loss is seen")
    answer = complete(server, "Hello", max_tokens=2)
    assert answer.status == 200 or (answer.status == 503 and int(answer.headers["retry-after"]) >= 1), answer
    wait_for_groups(server)
    assert complete(server, "Hello", max_tokens=2).status == 200
    wait_until_idle(server)


def test_case_bug_105_it_is_ready_without_serves_controller(server: ServeProcess) -> None:
    """The controller is killed; requests are answered before, while and after another one comes up."""
    wait_for_groups(server)
    (controller,) = server.processes("ray::ServeController")
    controller.kill()

    def has_another() -> bool:
        assert ready(server)[0] == 200
        assert complete(server, "Hello", max_tokens=1).status == 200
        found = server.processes("ray::ServeController")
        return len(found) == 1 and found != [controller]

    wait_until(has_another, timeout_s=RECOVERY_S, what="another controller")
    wait_for_groups(server)
