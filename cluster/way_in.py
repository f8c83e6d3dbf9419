"""WayIn: whether whoever connects to this node's proxy is led to our application.

Serve makes a route known to HAProxy by starting it anew; the process before goes on taking connections until a signal
reaches it, up to a second or more on a busy machine, and answers 404 to what it does not know. A connection goes to
either, so that one that was answered says nothing of the next: only many in a row do.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Callable

from ray.serve.context import _get_global_client

NUM_CONNECTIONS = 24
"""With two processes that take every other connection, on average, all reach the new one by luck once in 16 million."""

ROUTES = "/-/routes"
"""Answered by each process of the proxy itself: the applications that it knows, by their routes."""

PATIENCE_S = 1.0
"""For one answer, and for a readiness probe that waits for all of them."""

Address = tuple[str, int]


def serve_address() -> Address | None:
    """Where Serve's proxies listen, as this node dials it. None where they speak TLS: those are not HAProxy, and each
    has one process only."""
    options = _get_global_client().http_config
    if options.ssl_keyfile is not None:
        return None
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return loopback.get(options.host, options.host), options.port


class WayIn:
    """Asked again and again until it is open; it stays so, as later processes of the proxy know the route too."""

    def __init__(self, app_name: str, address: Callable[[], Address | None] = serve_address) -> None:
        self._app_name = app_name
        self._address = address
        self._is_open = False
        self._look: asyncio.Task[None] | None = None

    async def is_open(self) -> bool:
        """False also where it takes longer than ``PATIENCE_S`` to find out."""
        if self._is_open:
            return True
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._find_out())
        await asyncio.wait([self._look], timeout=PATIENCE_S)
        return self._is_open

    async def _find_out(self) -> None:
        self._is_open = await asyncio.to_thread(self._leads_here)

    def _leads_here(self) -> bool:
        """Also where no proxy listens on this node: then no way leads through it."""
        address = self._address()
        if address is None:
            return True
        with contextlib.suppress(ConnectionRefusedError):
            return all(self._app_name in known_applications(address) for _ in range(NUM_CONNECTIONS))
        return True


def known_applications(address: Address) -> set[str]:
    """What a new connection is told. Empty while the proxy knows none or does not answer as it should; raises
    ConnectionRefusedError where nobody listens."""
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    try:
        connection.request("GET", ROUTES, headers={"connection": "close"})
        routes = json.loads(connection.getresponse().read())
        return set(routes.values()) if isinstance(routes, dict) else set()
    except ConnectionRefusedError:
        raise
    except (OSError, http.client.HTTPException, ValueError):
        return set()
    finally:
        connection.close()
