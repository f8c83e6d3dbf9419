"""GroupRegistry: what a gateway knows of the worker groups, and its line to the leader of each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from typing import Any

from ..worker.messages import GroupEntry
from .group_client import GroupClient
from .router_client import REGISTRY_PERIOD_S, RouterClient
from .router_lines import RouterAway

EMPTY_REGISTRY_S = 8.0
"""For so long after it had an entry, an empty registry is taken for that of a router that has just started."""

REVIVAL_S = 10.0
"""A group that seemed dead is tried again after this; a dead one has left the registry by then."""

logger = logging.getLogger(__name__)


class GroupRegistry:
    """One per gateway. ``run`` keeps it fresh; it must be running."""

    def __init__(self, gateway_id: str, router: RouterClient, tls: ssl.SSLContext | None = None) -> None:
        self.entries: dict[int, GroupEntry] = {}
        """By generation."""
        self.clients: dict[int, GroupClient] = {}
        """Of all groups in the registry, and of those that have left it while requests were under way there."""
        self._gateway_id = gateway_id
        self._router = router
        self._tls = tls
        self._registered_at_s = 0.0
        """When there last was an entry, on the event loop's clock."""

    async def run(self) -> None:
        """Refresh the registry for ever."""
        while True:
            try:
                await self.refresh()
            except RouterAway:
                pass
            except Exception:  # nothing else would refresh the registry any more
                logger.exception("the registry could not be refreshed")
            await asyncio.sleep(REGISTRY_PERIOD_S)

    async def refresh(self) -> None:
        """Fetch the registry now. Raises RouterAway; what is known then stays.

        A registry that has just become empty is not believed: a new router is empty until the groups have reported.
        """
        registry = await self._router.registry()
        now = asyncio.get_running_loop().time()
        if registry:
            self._registered_at_s = now
        elif now - self._registered_at_s < EMPTY_REGISTRY_S:
            return
        self.entries = {entry.generation: entry for entry, _ in registry}
        fresh = {entry.generation: self._client_of(entry.generation, leader) for entry, leader in registry}
        busy = {generation: client for generation, client in self.clients.items() if not client.is_idle}
        before, self.clients = self.clients, busy | fresh
        for generation, client in before.items():
            if self.clients.get(generation) is not client:
                client.close()

    def _client_of(self, generation: int, leader: Any) -> GroupClient:
        """The one there is, or a new one; also for a group that seemed dead and is still in the registry later on."""
        known = self.clients.get(generation)
        if known is not None:
            lost_since_s = known.lost_since_s
            if lost_since_s is None or asyncio.get_running_loop().time() - lost_since_s < REVIVAL_S:
                return known
        client = GroupClient(self._gateway_id, generation, leader, self._tls)
        client.connect()
        return client

    def serving(self) -> list[tuple[GroupEntry, GroupClient]]:
        """Groups that take new requests, as far as is known here."""
        pairs = [(entry, self.clients[generation]) for generation, entry in self.entries.items()]
        return [(entry, client) for entry, client in pairs if not entry.draining and not client.lost]

    def weights(self, generation: int) -> str:
        """Of a group; empty for one that is not in the registry."""
        entry = self.entries.get(generation)
        return "" if entry is None else entry.weights

    async def client(self, generation: int) -> GroupClient | None:
        """None for a group that is lost, or unknown to the router too."""
        if generation not in self.clients:
            await self.try_refresh()
        client = self.clients.get(generation)
        return None if client is None or client.lost else client

    async def try_refresh(self) -> None:
        """Refresh if the router answers."""
        with contextlib.suppress(RouterAway):
            await self.refresh()
