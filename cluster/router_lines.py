"""A gateway's lines to the routers: which one it uses, and which ones do not answer."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

CALL_TIMEOUT_S = 2.0
HURRY_S = 0.5
"""A router is waited for only so long while another one can be asked."""

AWAY_S = 2.0
"""Nobody waits for a router that has not answered a moment ago, but for want of another one."""

RETURN_S = 10.0
"""A gateway goes back to its own router when that has not failed it for so long."""

UNDO_S = 15.0
"""After this a router has given up by itself what nobody has come for."""

logger = logging.getLogger(__name__)


class RouterAway(Exception):
    """No router answered in time."""


class RouterLine:
    """To one router. ``find()`` gives its actor or raises ValueError; it may block. ``on_away`` is told of failures."""

    def __init__(self, name: str, find: Callable[[], Any], on_away: Callable[[RouterLine], None]) -> None:
        self.name = name
        self.away_until_s = 0.0
        """On the event loop's clock."""
        self.failed_at_s = float("-inf")
        self._find = find
        self._on_away = on_away
        self._actor: Any = None
        self._undo: dict[str, float] = {}
        """Request → how long it is of use to say so."""

    @property
    def is_away(self) -> bool:
        return _now() < self.away_until_s

    async def call(self, method: str, *args: Any, patience_s: float = CALL_TIMEOUT_S) -> Any:
        """Raises RouterAway."""
        try:
            async with asyncio.timeout(patience_s):
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._find)
                answer = await getattr(self._actor, method).remote(*args)
            self.away_until_s = 0.0
            return answer
        except (RayError, ValueError, TimeoutError) as error:
            self._actor, self.failed_at_s = None, _now()
            self.away_until_s = self.failed_at_s + AWAY_S
            self._on_away(self)
            raise RouterAway(f"{method}: router {self.name}: {type(error).__name__}") from error

    def undo_later(self, request_ids: Iterable[str]) -> None:
        """The router may have decided or queued these, and nobody wants them there."""
        self._undo.update(dict.fromkeys(request_ids, _now() + UNDO_S))

    def take_undo(self) -> dict[str, float]:
        """What is to be cancelled there with the next call; to be put back when that fails."""
        undo, self._undo = self._undo, {}
        now = _now()
        return {request_id: until_s for request_id, until_s in undo.items() if now < until_s}

    def put_back_undo(self, undo: Mapping[str, float]) -> None:
        self._undo = {**undo, **self._undo}

    @property
    def has_undo(self) -> bool:
        return bool(self._undo)


class RouterLines:
    """Lines to all routers; gateways are spread over them by ``gateway_id``."""

    def __init__(
        self, find_routers: Sequence[Callable[[], Any]], gateway_id: str, on_away: Callable[[RouterLine], None]
    ) -> None:
        self._lines = [RouterLine(str(index), find, on_away) for index, find in enumerate(find_routers)]
        self._home = self._lines[zlib.crc32(gateway_id.encode()) % len(self._lines)]
        self._current = self._home

    def __iter__(self) -> Iterator[RouterLine]:
        return iter(self._lines)

    @property
    def is_alone(self) -> bool:
        return len(self._lines) == 1

    def raise_if_all_away(self) -> None:
        """Raises RouterAway at once when no router has answered a moment ago."""
        if all(line.is_away for line in self._lines):
            raise RouterAway("no router has answered a moment ago")

    def in_order(self) -> Iterator[tuple[RouterLine, float]]:
        """The lines to try one after the other, the one in use first, and how long to wait for each."""
        start = self._lines.index(self._current)
        others = [*self._lines[start + 1 :], *self._lines[:start]]
        order = sorted([self._current, *others], key=lambda line: line.is_away)
        yield from [(line, HURRY_S) for line in order[:-1]]
        yield order[-1], CALL_TIMEOUT_S

    def use(self, line: RouterLine) -> None:
        """It has answered."""
        if line is not self._current:
            logger.warning("router %s answers for router %s", line.name, self._current.name)
            self._current = line

    async def call(self, method: str, *args: Any) -> Any:
        """The answer of the first that gives one. Raises RouterAway."""
        failure = RouterAway(method)
        for line, patience_s in self.in_order():
            try:
                answer = await line.call(method, *args, patience_s=patience_s)
            except RouterAway as error:
                failure = error
                continue
            self.use(line)
            return answer
        raise failure

    async def call_all(self, method: str, *args: Any) -> dict[RouterLine, Any]:
        """The answers of all that give one. Raises RouterAway when none does."""
        lines = [line for line in self._lines if not line.is_away] or self._lines
        answers = await asyncio.gather(*[line.call(method, *args) for line in lines], return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, RouterAway):
                raise answer
        given = {
            line: answer for line, answer in zip(lines, answers, strict=True) if not isinstance(answer, RouterAway)
        }
        if not given:
            raise RouterAway(f"{method}: no router answered")
        return given

    @property
    def way_home(self) -> RouterLine | None:
        """The gateway's own router, when another one is used for it and it may be there again."""
        is_due = self._current is not self._home and _now() - self._home.failed_at_s > RETURN_S
        return self._home if is_due else None


def _now() -> float:
    return asyncio.get_running_loop().time()
