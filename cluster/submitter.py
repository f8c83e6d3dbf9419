"""Submitter: gives a request to a worker group, the one that the router chooses and that takes it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..router.decision import Reason
from ..router.verdicts import RefusalReason
from ..worker.errors import Overloaded, Unavailable
from ..worker.messages import Request, RouteDecision, RouteQuery
from ..worker.sequence import reads_whole_prompt
from .api.model_metrics import ModelsMetrics
from .api.service import RouteWishes
from .generation import Past, Placement
from .group_client import GroupClient, GroupFull
from .group_line import num_sequences
from .registry import GroupRegistry
from .router_client import RouterClient
from .router_lines import RouterAway
from .suspicion import Trials
from .token_stream import GroupLost

RETRY_PAUSE_S = 0.2

ROUTER_AWAY = "router_away"
GROUPS_FULL = "groups_full"
"""Words of the gateway itself, beside those of the router."""

ADMISSION_REFUSALS = frozenset(reason.value for reason in RefusalReason)
NOT_ALLOWED = Reason.NOT_ALLOWED.value
STOPPING = Reason.STOPPING.value
ERROR = "error"
"""The router's word for a query that it failed on."""


class Submitter:
    """One per gateway."""

    def __init__(self, router: RouterClient, groups: GroupRegistry, metrics: ModelsMetrics) -> None:
        self._router = router
        self._groups = groups
        self._metrics = metrics
        self.trials = Trials()

    async def submit(self, request: Request, wishes: RouteWishes, past: Past, patience_s: float) -> Placement:
        """Give ``request`` to the group that the router chooses, of those that its ``past`` leaves.

        A group whose queue is full is passed over. When all are full, or the router refuses it, a new request is
        refused at once; one that was under way goes on asking, up to ``patience_s``. The time in the router's queue
        does not count for that. Raises Unavailable or Overloaded.
        """
        loop = asyncio.get_running_loop()
        start, queued_s = loop.time(), 0.0
        avoid = past.dead
        refusals: list[GroupFull] = []
        while True:
            asked = loop.time()
            try:
                taken = self.trials.groups if past.is_suspect else ()
                decision = await self._decide(_aged(request, asked - start, queued_s), wishes, (*avoid, *taken))
                if decision.queued:
                    queued_s += loop.time() - asked
                if (client := await self._client(decision, past)) is not None:
                    if past.is_suspect:
                        self.trials.begin(request.request_id, decision.generation)
                    placed = _aged(request, loop.time() - start, queued_s)
                    placed = replace(placed, expected_cached_tokens=decision.expected_cached_tokens)
                    stream = await client.submit(placed)
                    weights = self._groups.weights(decision.generation)
                    return self._placed(Placement(decision, client, stream, queued_s, weights), request.model)
            except GroupFull as refusal:
                refusals.append(refusal)
            except GroupLost:
                pass
            except BaseException:
                self._take_back(request.request_id)
                raise
            self._take_back(request.request_id)
            if decision.group is not None:
                avoid = (*avoid, decision.generation)
                continue
            patience_is_over = loop.time() - start - queued_s > patience_s
            if patience_is_over and past.is_suspect:
                past = replace(past, is_suspect=False)  # rather beside another one than not at all
                continue
            is_hopeless = patience_is_over or decision.reason == STOPPING
            if is_hopeless or (request.attempt == 1 and await self._is_final(decision, wishes, refusals)):
                raise self._not_placed(decision, refusals, past)
            avoid = past.dead  # nobody else is left: one that did not answer a moment ago may do so now
            refusals = []
            await asyncio.sleep(RETRY_PAUSE_S)

    def _take_back(self, request_id: str) -> None:
        """The group that was chosen does not have it."""
        self._router.cancel(request_id)
        self.trials.end(request_id)

    def _placed(self, placement: Placement, model: str) -> Placement:
        if placement.queued_s > 0.0:
            self._metrics[model].router_queue_time.add(placement.queued_s)
        return placement

    async def _is_final(self, decision: RouteDecision, wishes: RouteWishes, refusals: list[GroupFull]) -> bool:
        """Whether there is nothing to wait for: no room, or no group by the names that the client gave.

        A group of such a name that is only draining, starting again or out of reach stays in the registry for a while.
        """
        if refusals or decision.reason in ADMISSION_REFUSALS or decision.reason == ERROR:
            return True
        if decision.reason != NOT_ALLOWED:
            return False
        await self._groups.try_refresh()
        return not any(wishes.allow(entry.group) for entry in self._groups.entries.values())

    async def _decide(self, request: Request, wishes: RouteWishes, avoid: tuple[int, ...]) -> RouteDecision:
        query = RouteQuery(
            request_id=request.request_id,
            model=request.model,
            routing_hashes=b"" if reads_whole_prompt(request) else request.routing_hashes,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
            timeout_s=request.timeout_s,
            session_id=wishes.session_id,
            tenant=request.tenant,
            excluded_generations=avoid,
            num_branches=num_sequences(request),
            queue_timeout_s=request.queue_timeout_s,
            allowed_groups=wishes.allowed_groups,
            excluded_groups=wishes.excluded_groups,
            preferred_groups=wishes.preferred_groups,
            attempt=request.attempt,
            trace=request.trace,
        )
        try:
            return await self._router.route(query)
        except RouterAway:
            self._metrics[query.model].fallback_routes.inc()
            return self._least_loaded(query, wishes)

    def _least_loaded(self, query: RouteQuery, wishes: RouteWishes) -> RouteDecision:
        """Without the router: the group of which this gateway has asked the fewest tokens."""
        able = [
            (client.outstanding_tokens, entry.group not in wishes.preferred_groups, entry)
            for entry, client in self._groups.serving()
            if entry.model == query.model and entry.generation not in query.excluded_generations
        ]
        allowed = [place for place in able if wishes.allow(place[2].group)]
        if not allowed:
            return RouteDecision(query.request_id, None, 0, 0, NOT_ALLOWED if able else ROUTER_AWAY)
        entry = min(allowed, key=lambda place: (*place[:2], place[2].generation))[2]
        return RouteDecision(query.request_id, entry.group, entry.generation, 0, ROUTER_AWAY)

    async def _client(self, decision: RouteDecision, past: Past) -> GroupClient | None:
        """None where no group was chosen, or one that is lost or does not suit: the router knows nothing of that."""
        if decision.group is None:
            return None
        client = await self._groups.client(decision.generation)
        suits = past.weights in ("", self._groups.weights(decision.generation))
        is_taken = past.is_suspect and decision.generation in self.trials.groups
        return client if suits and not is_taken else None

    def _not_placed(self, decision: RouteDecision, refusals: list[GroupFull], past: Past) -> Overloaded | Unavailable:
        """Why no group has taken a request: those that could have are full, the router refuses it, or there is none."""
        if refusals:
            soonest = min(refusals, key=lambda refusal: refusal.retry_after_s)
            return Overloaded(str(soonest), retry_after_s=soonest.retry_after_s, reason=GROUPS_FULL)
        kind = Overloaded if decision.reason in ADMISSION_REFUSALS else Unavailable
        message = decision.detail or f"no worker group can take the request: {decision.reason}"
        weights = {entry.weights for entry, _ in self._groups.serving()}
        if past.weights and weights and past.weights not in weights:
            message = "the model was updated, and no worker group is left that has the weights this answer began with"
        return kind(message, retry_after_s=decision.retry_after_s or 1.0, reason=decision.reason)


def _aged(request: Request, passed_s: float, queued_s: float) -> Request:
    """``request`` with what is left of its limits after ``passed_s``, of which it was queued for ``queued_s``."""
    timeout_s, queue_timeout_s = request.timeout_s, request.queue_timeout_s
    if timeout_s is None and queue_timeout_s is None:
        return request
    return replace(
        request,
        timeout_s=None if timeout_s is None else max(0.0, timeout_s - passed_s),
        queue_timeout_s=None if queue_timeout_s is None else max(0.0, queue_timeout_s - queued_s),
    )
