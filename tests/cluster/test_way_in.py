"""A gateway is ready when every new connection to the proxy, whichever of its processes takes it, finds the route."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from octavo.cluster import way_in
from octavo.cluster.local_ray import free_ports
from octavo.cluster.way_in import NUM_CONNECTIONS, Address, WayIn


@contextmanager
def proxy(answer: Callable[[int], tuple[int, str]]) -> Iterator[Address]:
    """``answer`` gets the number of the connection, and gives a status and a body."""
    numbers = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(next(numbers))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield ("127.0.0.1", server.server_port)
    server.shutdown()
    server.server_close()


KNOWN = 200, json.dumps({"/": "ours"})
OTHERS = 200, json.dumps({"/other": "theirs"})
NONE_YET = 503, "Route table is not populated yet."


async def looks(address: Address, count: int) -> list[bool]:
    way = WayIn("ours", lambda: address)
    return [await way.is_open() for _ in range(count)]


@pytest.mark.parametrize("stale", [OTHERS, NONE_YET, (200, "{}"), (404, "[]")])
def test_not_while_an_old_process_takes_connections(stale: tuple[int, str]) -> None:
    """It takes some of them, until it is gone."""
    gone_after = 3 * NUM_CONNECTIONS // 2

    def answer(number: int) -> tuple[int, str]:
        return stale if number < gone_after and number % 5 == 4 else KNOWN

    with proxy(answer) as address:
        found = asyncio.run(looks(address, 20))
    assert found[0] is False
    assert found[-1] is True
    assert found == sorted(found)


def test_open_it_stays_so_without_being_asked() -> None:
    asked: list[int] = []

    def answer(number: int) -> tuple[int, str]:
        asked.append(number)
        return KNOWN

    with proxy(answer) as address:
        assert asyncio.run(looks(address, 5)) == [True] * 5
    assert len(asked) == NUM_CONNECTIONS


def test_a_node_without_a_proxy_has_no_way_to_wait_for() -> None:
    assert asyncio.run(looks(("127.0.0.1", free_ports(1)[0]), 1)) == [True]


def test_a_proxy_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is answered in time, with no."""
    monkeypatch.setattr(way_in, "PATIENCE_S", 0.05)
    held = threading.Event()

    def answer(_: int) -> tuple[int, str]:
        held.wait(5)
        return KNOWN

    with proxy(answer) as address:
        found = asyncio.run(looks(address, 2))
        held.set()
    assert found == [False, False]


def test_many_may_ask_at_once_and_one_look_answers_them() -> None:
    """Some of them while it is not open yet; another look begins when the one before has ended."""
    asked: list[int] = []

    def answer(number: int) -> tuple[int, str]:
        asked.append(number)
        return NONE_YET if number == 0 else KNOWN

    async def ask_at_once(address: Address) -> list[list[bool]]:
        way = WayIn("ours", lambda: address)
        return [await asyncio.gather(*(way.is_open() for _ in range(10))) for _ in range(2)]

    with proxy(answer) as address:
        assert asyncio.run(ask_at_once(address)) == [[False] * 10, [True] * 10]
    assert len(asked) == 1 + NUM_CONNECTIONS
