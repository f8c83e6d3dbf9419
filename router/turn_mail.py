"""TurnMail: the decisions that end the wait of queued queries, numbered for each gateway, kept until it has them."""

from __future__ import annotations

import asyncio
import random
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
    given_number: int = 0
    """Decisions up to this one have been given out; whether they arrived shows when they are acknowledged."""
    pending: dict[int, RouteDecision] = field(default_factory=dict)
    """By number, oldest first."""
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
        """No gateway has anything to fetch."""
        return not any(mailbox.pending for mailbox in self._mailboxes.values())

    def expect(self, gateway_id: str, now: float) -> None:
        """The gateway has queued requests; from now on it must not be silent."""
        self._heard(gateway_id, now)

    def forget(self, gateway_id: str, request_ids: Iterable[str]) -> None:
        """The gateway has given these up, or asks anew: what was decided before is void."""
        mailbox = self._mailboxes.get(gateway_id)
        if mailbox is not None and mailbox.pending:
            void = set(request_ids)
            kept = {number: each for number, each in mailbox.pending.items() if each.request_id not in void}
            mailbox.pending = kept

    def put(self, gateway_id: str, decisions: Iterable[RouteDecision], now: float) -> None:
        """What has become of queued requests."""
        mailbox = self._mailboxes.get(gateway_id) or self._heard(gateway_id, now)
        for decision in decisions:
            mailbox.last_number += 1
            mailbox.pending[mailbox.last_number] = decision
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
        mailbox.pending = {number: each for number, each in mailbox.pending.items() if number > acknowledged}
        mailbox.given_number = mailbox.last_number
        return RouteDecisions(tuple(mailbox.pending.values()), mailbox.last_number)

    def drop_silent(self, now: float, silence_s: float) -> dict[str, tuple[str, ...]]:
        """Forget the gateways that have not been heard of for so long. Gateway → its requests that were decided and
        never given out; those that were may be running."""
        silent = [name for name, mailbox in self._mailboxes.items() if now - mailbox.heard_at_s > silence_s]
        return {name: _never_given(self._mailboxes.pop(name)) for name in silent}

    def _heard(self, gateway_id: str, now: float) -> _Mailbox:
        mailbox = self._mailboxes.get(gateway_id)
        if mailbox is None:
            number = self._rng.randrange(1, _NUMBERS)
            mailbox = self._mailboxes[gateway_id] = _Mailbox(number, number, now)
        mailbox.heard_at_s = now
        return mailbox


def _never_given(mailbox: _Mailbox) -> tuple[str, ...]:
    pending = mailbox.pending.items()
    return tuple([decision.request_id for number, decision in pending if number > mailbox.given_number])
