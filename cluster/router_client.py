"""RouterClient: a gateway's line to the routers.

It uses one of them, and another one as soon as that does not answer. What is asked while a call is under way travels as
the next one. What is given up is said to the router that has decided or queued it, whichever is in use now.
The registry of worker groups is fetched every second and kept, so that a gateway goes on when all routers are away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from .router_questions import LostTurn, Question, Questions, wanted

MOST_BUNDLE_BYTES = 90_000
"""Of hashes in one call: Ray hands larger arguments over through its object store, which takes milliseconds more."""
CANCEL_PAUSE_S = 0.05
"""What is cancelled waits so long for a query to travel with."""
REGISTRY_PERIOD_S = 1.0

TURNS_TIMEOUT_S = 1.0
"""A poll for the decisions of queued queries is answered by then."""

Groups: TypeAlias = list[tuple[GroupEntry, Any]]

logger = logging.getLogger(__name__)


class RouterClient:
    """``find_routers`` give the routers' actors or raise ValueError; each is asked again when it may be another one."""

    def __init__(self, gateway_id: str, find_routers: Sequence[Callable[[], Any]]) -> None:
        self._gateway_id = gateway_id
        self._lines = RouterLines(find_routers, gateway_id, on_away=self._lose_turns)
        self._questions = Questions()
        self._unsent: list[Question] = []
        self._flusher: asyncio.Task[None] | None = None
        self._undoer: asyncio.Task[None] | None = None
        self._pollers: dict[RouterLine, asyncio.Task[None]] = {}
        self._num_groups = 0
        """In the last registry."""

    async def route(self, query: RouteQuery) -> RouteDecision:
        """The group for one request, reserved for it; waits for its turn where the router queues it, and is marked as
        ``queued`` then. Raises RouterAway."""
        start, has_waited = _now(), False
        while True:
            self._lines.raise_if_all_away()
            question = self._questions.open(_aged(query, _now() - start))
            self._unsent.append(question)
            self._flush_soon()
            try:
                decision = await question.answer
                return replace(decision, queued=has_waited or question.is_queued)
            except LostTurn:
                has_waited = True
            finally:
                self._questions.close(question)

    def cancel(self, request_id: str) -> None:
        """A reserved request did not reach its group, or a queued one is given up: say so to its router, with the next
        call."""
        if (line := self._questions.take_line(request_id)) is not None:
            line.undo_later([request_id])
            if self._undoer is None or self._undoer.done():
                self._undoer = asyncio.create_task(self._undo_soon())

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
        while questions := self._take_bundle():
            try:
                await self._ask(questions)
            except Exception as error:  # whatever it is, somebody waits for the answers
                if not isinstance(error, RouterAway):
                    logger.exception("%d queries could not be asked", len(questions))
                for question in questions:
                    question.fail(RouterAway(str(error)))

    def _take_bundle(self) -> list[Question]:
        """The next ones that fit into a call, one at least if there is one."""
        num_bytes = count = 0
        for count, question in enumerate(self._unsent, start=1):
            num_bytes += len(question.query.routing_hashes)
            if num_bytes > MOST_BUNDLE_BYTES:
                count = max(1, count - 1)
                break
        taken, self._unsent = self._unsent[:count], self._unsent[count:]
        return taken

    async def _ask(self, questions: Sequence[Question]) -> None:
        """One router after the other until one answers. What the others may have decided is undone there later."""
        failure = RouterAway("route")
        for line, patience_s in self._lines.in_order():
            if not (questions := wanted(questions)):
                return
            try:
                decisions = await self._ask_at(line, questions, patience_s)
            except RouterAway as error:
                line.undo_later([question.query.request_id for question in wanted(questions)])
                failure = error
                continue
            self._lines.use(line)
            for question, decision in zip(questions, decisions, strict=True):
                self._take(question, decision, line)
            return
        raise failure

    async def _ask_at(
        self, line: RouterLine, questions: Sequence[Question], patience_s: float
    ) -> tuple[RouteDecision, ...]:
        """One decision for each. Raises RouterAway."""
        for question in questions:
            question.line = line
        undo = line.take_undo()
        try:
            packed = await line.call("route", self._packed(questions, undo), patience_s=patience_s)
        except RouterAway:
            line.put_back_undo(undo)
            raise
        return _read(packed, len(questions), line)

    def _packed(self, questions: Sequence[Question], cancelled: Iterable[str]) -> bytes:
        return pack(RouteQueries(self._gateway_id, tuple(each.query for each in questions), tuple(cancelled)))

    def _take(self, question: Question, decision: RouteDecision, line: RouterLine) -> None:
        if not decision.queued:
            question.end(decision)
            return
        question.is_queued = True
        if not question.answer.done() and line not in self._pollers:
            self._pollers[line] = asyncio.create_task(self._poll_turns(line))

    async def _undo_soon(self) -> None:
        await asyncio.sleep(CANCEL_PAUSE_S)
        self._undoer = None  # what is given up from now on waits for its own
        await self._undo()

    async def _undo(self) -> None:
        """Tell the routers that answer what they have decided for nobody."""
        lines = [line for line in self._lines if line.has_undo and not line.is_away]
        await asyncio.gather(*[self._undo_at(line) for line in lines])

    async def _undo_at(self, line: RouterLine) -> None:
        undo = line.take_undo()
        try:
            if undo:
                await line.call("route", self._packed((), undo))
        except RouterAway:
            asked_again = {request_id for request_id in undo if self._questions.is_at(request_id, line)}
            line.put_back_undo({name: until_s for name, until_s in undo.items() if name not in asked_again})

    async def _registry_at_home(self) -> Groups | None:
        """From the gateway's own router, if another one is used for it and it is there again, knowing all groups."""
        home = self._lines.way_home
        if home is None or self._questions.is_any_queued:
            return None
        with contextlib.suppress(RouterAway):
            groups = _groups(await home.call("registry"))
            if len(groups) >= self._num_groups:
                self._lines.use(home)
                return groups
        return None

    # ---- waiting for turns ----

    async def _poll_turns(self, line: RouterLine) -> None:
        """As long as anything is queued at that router; the last poll acknowledges what came with the one before."""
        number, has_come = 0, False
        try:
            while (is_queued := bool(self._questions.queued_at(line))) or has_come:
                turns = await self._turns(line, number, TURNS_TIMEOUT_S if is_queued else 0.0)
                if turns.last_number == 0:
                    self._lose_turns(line)
                number, has_come = turns.last_number, bool(turns.decisions)
                for decision in turns.decisions:
                    self._take_turn(decision, line)
        except RouterAway:
            self._lose_turns(line)
        except Exception:  # whatever it is, somebody waits for the turns
            logger.exception("router %s, where requests are queued", line.name)
            self._lose_turns(line)
        finally:
            if self._pollers.get(line) is asyncio.current_task():
                del self._pollers[line]

    async def _turns(self, line: RouterLine, acknowledged: int, timeout_s: float) -> RouteDecisions:
        patience_s = timeout_s + CALL_TIMEOUT_S
        answer = await line.call("turns", self._gateway_id, acknowledged, timeout_s, patience_s=patience_s)
        return unpack(answer, RouteDecisions)

    def _take_turn(self, decision: RouteDecision, line: RouterLine) -> None:
        """One that nobody waits for came before, or was given up, which its router is told or knows."""
        if (question := self._questions.at(decision.request_id, line)) is not None:
            question.is_queued = True
            question.end(decision)

    def _lose_turns(self, line: RouterLine) -> None:
        """Whatever is queued there is given up, and asked again, elsewhere if it does not answer. What a poll under way
        may still bring is of the past."""
        poller = self._pollers.pop(line, None)
        if poller is not None and poller is not asyncio.current_task():
            poller.cancel()
        questions = self._questions.queued_at(line)
        line.undo_later([question.query.request_id for question in questions])
        for question in questions:
            question.fail(LostTurn())


def _read(packed: bytes, num_queries: int, line: RouterLine) -> tuple[RouteDecision, ...]:
    """A router whose answer makes no sense is as good as away. Raises RouterAway."""
    try:
        decisions = unpack(packed, RouteDecisions).decisions
    except WireError as error:
        raise RouterAway(f"route: router {line.name}: {error}") from error
    if len(decisions) != num_queries:
        raise RouterAway(f"route: router {line.name}: {len(decisions)} answers to {num_queries} queries")
    return decisions


def _groups(answer: tuple[bytes, list[Any]]) -> Groups:
    data, leaders = answer
    return list(zip(unpack(data, Registry).entries, leaders, strict=True))


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
