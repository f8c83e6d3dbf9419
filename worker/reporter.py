"""Reporter: a leader's reports to one router, soon after what changed, and every second that it lives."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError

from .engine_loop import EngineLoop
from .wire import pack

PERIOD_S = 1.0
"""The leader reports at least so often."""
PAUSE_S = 0.01
"""And not more often than this."""
BLOCKS_PAUSE_S = 0.1
"""News that is only of blocks which running requests have filled waits so long: with many streams there is some in
every step, a report costs either side 2 ms of CPU, and who sends a conversation's next turn does so after its end."""
TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Reporter:
    """``handle`` is what gateways will call the leader by. It looks for news every ``pause_s``."""

    def __init__(
        self, loop: EngineLoop, router_name: str, namespace: str, handle: Any, *, pause_s: float = PAUSE_S
    ) -> None:
        self._loop = loop
        self._router_name = router_name
        self._namespace = namespace
        self._handle = handle
        self._pause_s = pause_s
        self._router: Any = None
        self._due_s = self._blocks_due_s = 0.0

    async def run(self) -> None:
        """Report for ever; the router is found again when it is replaced."""
        while True:
            if self._is_due():
                try:
                    await self._report()
                except (RayError, ValueError, TimeoutError) as error:
                    self._router = None
                    logger.warning("%s does not answer: %s", self._router_name, type(error).__name__)
                    await asyncio.sleep(PERIOD_S / 4)
                except Exception:  # a group that does not report leaves the registry for good
                    logger.exception("the report to %s failed", self._router_name)
                    await asyncio.sleep(PERIOD_S)
            await asyncio.sleep(self._pause_s)

    def _is_due(self) -> bool:
        now, loop, name = time.monotonic(), self._loop, self._router_name
        has_news = loop.has_urgent_news(name) or (now >= self._blocks_due_s and loop.has_news(name))
        return has_news or now >= self._due_s

    async def _report(self) -> None:
        report = self._loop.take_report(self._router_name)
        if self._router is None:
            self._router = await asyncio.to_thread(ray.get_actor, self._router_name, self._namespace)
        wants = await asyncio.wait_for(self._router.report.remote(pack(report), self._handle), TIMEOUT_S)
        self._loop.report_arrived(self._router_name, report, wants_snapshot=bool(wants))
        now = time.monotonic()
        self._due_s, self._blocks_due_s = now + PERIOD_S, now + BLOCKS_PAUSE_S
