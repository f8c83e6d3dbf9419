"""RouterClient: a gateway's line to the routers.

It uses one of them, and another one as soon as that does not answer. What is asked while a call is under way travels as
the next one.
The registry of worker groups is fetched every second and kept, so that a gateway goes on when all routers are away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..worker.messages import (
    GroupEntry,
    Registry,
    RouteDecision,
    RouteDecisions,
    RouteQueries,
    RouteQuery,
)
from ..worker.wire import WireError, pack, unpack
from .router_lines import CALL_TIMEOUT_S, RouterAway, RouterLine, RouterLines

MOST_BUNDLE_BYTES = 90_000
"""Of hashes in one call: Ray hands larger arguments over through its object store, which takes milliseconds more."""
CANCEL_PAUSE_S = 0.05
"""What is cancelled waits so long for a query to travel with."""
REGISTRY_PERIOD_S = 1.0

TURNS_TIMEOUT_S = 1.0
"""A poll for the decisions of queued queries is answered by then."""

Groups: TypeAlias = list[tuple[GroupEntry, Any]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Question:
    """A query that has not been decided."""

    query: RouteQuery
    answer: asyncio.Future[RouteDecision]
    line: RouterLine | None = None
    """To the router that it was given to."""
    is_queued: bool = False


class _LostTurn(Exception):
    """The router that a query was queued at does not answer, or does not know it any more."""


class RouterClient:
    """``find_routers`` give the routers' actors or raise ValueError; each is asked again when it may be another one."""

    def __init__(self, gateway_id: str, find_routers: Sequence[Callable[[], Any]]) -> None:
        self._gateway_id = gateway_id
        self._lines = RouterLines(find_routers, gateway_id, on_away=self._lose_turns)
        self._questions: dict[str, _Question] = {}
        self._unsent: list[_Question] = []
        self._cancelled: list[str] = []
        self._flusher: asyncio.Task[None] | None = None
        self._pollers: dict[RouterLine, asyncio.Task[None]] = {}
        self._num_groups = 0
        """In the last registry."""

    async def route(self, query: RouteQuery) -> RouteDecision:
        """The group for one request, reserved for it; waits for its turn where the router queues it, and is marked as
        ``queued`` then. Raises RouterAway."""
        start, has_waited = _now(), False
        while True:
            self._lines.raise_if_all_away()
            question = _Question(_aged(query, _now() - start), asyncio.get_running_loop().create_future())
            self._questions[query.request_id] = question
            self._unsent.append(question)
            self._flush_soon()
            try:
                decision = await question.answer
                return replace(decision, queued=has_waited or question.is_queued)
            except _LostTurn:
                has_waited = True
            finally:
                self._questions.pop(query.request_id, None)

    def cancel(self, request_id: str) -> None:
        """A reserved request did not reach its group, or a queued one is given up: say so with the next call."""
        self._cancelled.append(request_id)
        if len(self._cancelled) == 1:
            asyncio.get_running_loop().call_later(CANCEL_PAUSE_S, self._flush_soon)

    async def registry(self) -> Groups:
        """All worker groups with their leaders' handles. Raises RouterAway."""
        groups = await self._registry_at_home()
        if groups is None:
            groups = _groups(await self._lines.call("registry"))
        self._num_groups = len(groups)
        await self._undo()
        return groups

    async def report_metrics(self, text: str) -> None:
        """Give this gateway's metrics to the routers, which keep them for all gateways. Raises RouterAway."""
        await self._lines.call_all("report_gateway", self._gateway_id, text)

    async def cluster_metrics(self) -> dict[str, str]:
        """Prometheus texts by source: ``router``, or ``router:…`` of each that answers. Raises RouterAway."""
        answers = await self._lines.call_all("cluster_metrics")
        texts = {source: text for answer in answers.values() for source, text in answer.items() if source != "router"}
        own = {"router" if self._lines.is_alone else f"router:{line.name}": line for line in answers}
        return texts | {source: answers[line]["router"] for source, line in own.items()}

    async def explain(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions of all routers that answer, newest first. Raises RouterAway."""
        answers = await self._lines.call_all("explain", limit)
        decisions = [entry | {"router": line.name} for line, answer in answers.items() for entry in answer]
        return sorted(decisions, key=lambda entry: float(entry["age_s"]))[:limit]

    # ---- asking ----

    def _flush_soon(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        await asyncio.sleep(0)  # whoever else asks at this moment
        while self._unsent or self._cancelled:
            questions = self._take_bundle()
            cancelled, self._cancelled = self._cancelled, []
            try:
                await self._ask(questions, cancelled)
            except (RouterAway, WireError) as error:
                for question in questions:
                    _fail(question, RouterAway(str(error)))

    def _take_bundle(self) -> list[_Question]:
        """The next ones that fit into a call, one at least if there is one."""
        num_bytes = count = 0
        for count, question in enumerate(self._unsent, start=1):
            num_bytes += len(question.query.routing_hashes)
            if num_bytes > MOST_BUNDLE_BYTES:
                count = max(1, count - 1)
                break
        taken, self._unsent = self._unsent[:count], self._unsent[count:]
        return taken

    async def _ask(self, questions: Sequence[_Question], cancelled: Sequence[str]) -> None:
        """One router after the other until one answers. What the others may have decided is undone there later."""
        failure = RouterAway("route")
        request_ids = [question.query.request_id for question in questions]
        for line, patience_s in self._lines.in_order():
            for question in questions:
                question.line = line
            undo = (*line.take_undo(), *cancelled)
            try:
                answer = await line.call("route", self._packed(questions, undo), patience_s=patience_s)
            except RouterAway as error:
                line.undo_later((*undo, *request_ids))
                failure = error
                continue
            self._lines.use(line)
            for question, decision in zip(questions, unpack(answer, RouteDecisions).decisions, strict=True):
                self._take(question, decision, line)
            return
        raise failure

    def _packed(self, questions: Sequence[_Question], cancelled: Iterable[str]) -> bytes:
        return pack(RouteQueries(self._gateway_id, tuple(each.query for each in questions), tuple(cancelled)))

    def _take(self, question: _Question, decision: RouteDecision, line: RouterLine) -> None:
        if question.answer.done():
            return
        if not decision.queued:
            question.answer.set_result(decision)
            return
        question.is_queued = True
        if line not in self._pollers:
            self._pollers[line] = asyncio.create_task(self._poll_turns(line))

    async def _undo(self) -> None:
        """Tell routers that answer again what they may have decided for nobody."""
        for line in self._lines:
            if line.has_undo and not line.is_away:
                undo = line.take_undo()
                with contextlib.suppress(RouterAway):
                    await line.call("route", self._packed((), undo))

    async def _registry_at_home(self) -> Groups | None:
        """From the gateway's own router, if another one is used for it and it is there again, knowing all groups."""
        home = self._lines.way_home
        if home is None or any(question.is_queued for question in self._questions.values()):
            return None
        with contextlib.suppress(RouterAway):
            groups = _groups(await home.call("registry"))
            if len(groups) >= self._num_groups:
                self._lines.use(home)
                return groups
        return None

    # ---- waiting for turns ----

    async def _poll_turns(self, line: RouterLine) -> None:
        """As long as anything is queued at that router."""
        acknowledged = 0
        try:
            while self._queued_at(line):
                timeout_s = TURNS_TIMEOUT_S
                turns = unpack(
                    await line.call(
                        "turns", self._gateway_id, acknowledged, timeout_s, patience_s=timeout_s + CALL_TIMEOUT_S
                    ),
                    RouteDecisions,
                )
                if turns.last_number == 0:
                    self._lose_turns(line)
                acknowledged = turns.last_number
                for decision in turns.decisions:
                    self._take_turn(decision, line)
        except (RouterAway, WireError) as error:
            logger.warning("%s, where requests are queued: %s", line.name, error)
            self._lose_turns(line)
        finally:
            del self._pollers[line]

    def _take_turn(self, decision: RouteDecision, line: RouterLine) -> None:
        question = self._questions.get(decision.request_id)
        if question is None or question.line is not line:
            line.undo_later([decision.request_id])  # given up, or asked elsewhere
        elif not question.answer.done():
            question.is_queued = True
            question.answer.set_result(decision)

    def _queued_at(self, line: RouterLine) -> list[_Question]:
        waiting = [each for each in self._questions.values() if each.is_queued and each.line is line]
        return [question for question in waiting if not question.answer.done()]

    def _lose_turns(self, line: RouterLine) -> None:
        """Whatever is queued there is asked again, elsewhere if it does not answer."""
        for question in self._queued_at(line):
            _fail(question, _LostTurn())


def _groups(answer: tuple[bytes, list[Any]]) -> Groups:
    data, leaders = answer
    return list(zip(unpack(data, Registry).entries, leaders, strict=True))


def _fail(question: _Question, error: Exception) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)


def _aged(query: RouteQuery, seconds: float) -> RouteQuery:
    """``query`` with what is left of its limits."""
    left = {
        name: max(0.0, limit - seconds)
        for name in ("timeout_s", "queue_timeout_s")
        if (limit := getattr(query, name)) is not None
    }
    return replace(query, **left) if left and seconds > 0.0 else query


def _now() -> float:
    return asyncio.get_running_loop().time()
