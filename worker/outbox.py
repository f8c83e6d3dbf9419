"""Outbox: numbered updates for each gateway, kept until the gateway acknowledges them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .messages import SequenceUpdate, TokenFrame


@dataclass(slots=True)
class _Mailbox:
    last_number: int = 0
    last_poll_s: float = 0.0
    pending: deque[SequenceUpdate] = field(default_factory=deque)
    """The updates numbered last_number − len(pending) + 1 … last_number."""
    is_synced: bool = False
    """The gateway has polled it from number 0 on, so the numbers that it acknowledges are this mailbox's."""

    def knows(self, acknowledged: int) -> bool:
        """Whether this mailbox can have given ``acknowledged``, and not one before it that was forgotten."""
        return acknowledged == 0 or (self.is_synced and acknowledged <= self.last_number)


class Outbox:
    """Not safe for use by two threads at once: the owner holds a lock.

    A gateway that acknowledges a number of a mailbox that was forgotten meanwhile gets an empty frame with
    ``last_number`` 0, less than what it acknowledged: what it was waiting for is lost. Its next poll acknowledges 0 and
    gets all there is since.
    """

    def __init__(self, generation: int, *, now: Callable[[], float]) -> None:
        self._generation = generation
        self._now = now
        self._mailboxes: dict[str, _Mailbox] = {}

    def put(self, gateway_id: str, update: SequenceUpdate) -> None:
        mailbox = self._mailbox(gateway_id)
        mailbox.last_number += 1
        mailbox.pending.append(update)

    def has_news(self, gateway_id: str, acknowledged: int) -> bool:
        """There is something to take: updates, or that the mailbox was lost."""
        mailbox = self._mailbox(gateway_id)
        return mailbox.last_number > acknowledged or not mailbox.knows(acknowledged)

    def take(self, gateway_id: str, acknowledged: int) -> TokenFrame:
        """Forget what was acknowledged and give all that came since. A repeated call gives the same again."""
        if not self.acknowledge(gateway_id, acknowledged):
            return TokenFrame(self._generation, 0, ())
        mailbox = self._mailbox(gateway_id)
        return TokenFrame(self._generation, mailbox.last_number, tuple(mailbox.pending))

    def acknowledge(self, gateway_id: str, acknowledged: int) -> bool:
        """The gateway has polled: forget what it has. False when it speaks of a mailbox that was forgotten."""
        mailbox = self._mailbox(gateway_id)
        mailbox.last_poll_s = self._now()
        if not mailbox.knows(acknowledged):
            return False
        mailbox.is_synced = True
        first = mailbox.last_number - len(mailbox.pending) + 1
        for _ in range(min(acknowledged - first + 1, len(mailbox.pending))):
            mailbox.pending.popleft()
        return True

    def touch(self, gateway_id: str) -> None:
        """The gateway has been heard of."""
        self._mailbox(gateway_id).last_poll_s = self._now()

    def drop_silent(self, silence_s: float) -> list[str]:
        """Forget the gateways that have not polled for ``silence_s`` seconds; their ids."""
        limit = self._now() - silence_s
        silent = [name for name, mailbox in self._mailboxes.items() if mailbox.last_poll_s < limit]
        for name in silent:
            del self._mailboxes[name]
        return silent

    @property
    def is_empty(self) -> bool:
        """Every gateway has acknowledged everything."""
        return not any(mailbox.pending for mailbox in self._mailboxes.values())

    def _mailbox(self, gateway_id: str) -> _Mailbox:
        mailbox = self._mailboxes.get(gateway_id)
        if mailbox is None:
            mailbox = self._mailboxes[gateway_id] = _Mailbox(last_poll_s=self._now())
        return mailbox
