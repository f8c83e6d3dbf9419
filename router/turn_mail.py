"""TurnMail: the decisions that end the wait of queued queries, numbered for each gateway, kept until it has them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..worker.messages import RouteDecision, RouteDecisions

_NUMBERS = 1 << 48


@dataclass(slots=True)
class _Mailbox:
    first_number: int
    """Where its numbers begin, at random: a gateway cannot take it for one that was forgotten."""
    last_number: int
    heard_at_s: float
    pending: deque[RouteDecision] = field(default_factory=deque)
    """The decisions numbered last_number − len(pending) + 1 … last_number."""
    queued: dict[str, None] = field(default_factory=dict)
    """Requests that wait."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def knows(self, acknowledged: int) -> bool:
        """0 is known: a gateway's first poll."""
        return acknowledged == 0 or self.first_number <= acknowledged <= self.last_number


class TurnMail:
    """A gateway's first poll acknowledges 0 and is answered at once, with the number to begin from. One that
    acknowledges a number of a mailbox that was forgotten gets ``last_number`` 0: its queued queries are lost."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._mailboxes: dict[str, _Mailbox] = {}

    @property
    def is_empty(self) -> bool:
        """No gateway waits or has anything to fetch."""
        return not any(mailbox.queued or mailbox.pending for mailbox in self._mailboxes.values())

    def wait_for(self, gateway_id: str, request_ids: Iterable[str], now: float) -> None:
        """These requests of the gateway are queued."""
        self._heard(gateway_id, now).queued.update(dict.fromkeys(request_ids))

    def forget(self, gateway_id: str, request_ids: Iterable[str]) -> None:
        """The gateway does not wait for these any more."""
        if mailbox := self._mailboxes.get(gateway_id):
            for request_id in request_ids:
                mailbox.queued.pop(request_id, None)

    def put(self, gateway_id: str, decisions: Iterable[RouteDecision], now: float) -> None:
        """What has become of queued requests."""
        mailbox = self._mailboxes.get(gateway_id) or self._heard(gateway_id, now)
        for decision in decisions:
            mailbox.queued.pop(decision.request_id, None)
            mailbox.pending.append(decision)
            mailbox.last_number += 1
        mailbox.news.set()

    def news(self, gateway_id: str, acknowledged: int, now: float) -> asyncio.Event:
        """Is set when there is something to take."""
        mailbox = self._heard(gateway_id, now)
        if mailbox.last_number > acknowledged or not mailbox.knows(acknowledged):
            mailbox.news.set()
        else:
            mailbox.news.clear()
        return mailbox.news

    def take(self, gateway_id: str, acknowledged: int, now: float) -> RouteDecisions:
        """Forget what was acknowledged and give all that came since. A repeated call gives the same again."""
        mailbox = self._heard(gateway_id, now)
        if not mailbox.knows(acknowledged):
            return RouteDecisions((), last_number=0)
        while mailbox.pending and mailbox.last_number - len(mailbox.pending) < acknowledged:
            mailbox.pending.popleft()
        return RouteDecisions(tuple(mailbox.pending), mailbox.last_number)

    def drop_silent(self, now: float, silence_s: float) -> tuple[str, ...]:
        """Forget the gateways that have not been heard of for so long; their requests, waiting or decided and not
        fetched."""
        silent = [name for name, mailbox in self._mailboxes.items() if now - mailbox.heard_at_s > silence_s]
        gone = [self._mailboxes.pop(name) for name in silent]
        return tuple(
            request_id
            for mailbox in gone
            for request_id in (*mailbox.queued, *[decision.request_id for decision in mailbox.pending])
        )

    def _heard(self, gateway_id: str, now: float) -> _Mailbox:
        mailbox = self._mailboxes.get(gateway_id)
        if mailbox is None:
            number = self._rng.randrange(1, _NUMBERS)
            mailbox = self._mailboxes[gateway_id] = _Mailbox(number, number, now)
        mailbox.heard_at_s = now
        return mailbox
