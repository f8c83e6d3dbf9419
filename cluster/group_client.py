"""GroupClient: a gateway's line to the leader of one worker group.

One poll is outstanding while any request is under way there. Its answer holds all new tokens of all requests; positions
make repeated tokens harmless, and the number in each poll tells the leader what it may forget.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from ..worker.messages import Request, TokenFrame
from ..worker.wire import WireError, pack, unpack
from .group_line import GroupLine
from .token_stream import GroupLost, TokenStream

POLL_S = 1.0
"""The leader answers a poll after so long, with or without tokens."""

SILENCE_S = 20.0
"""A leader that has not answered a poll for so long is taken for dead. A step may take seconds; its event loop not."""

CALL_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class GroupFull(Exception):
    """The worker group is well, and has no room for the request."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GroupClient(GroupLine):
    """``leader`` is the actor handle of generation ``generation``.

    Requests are submitted under a name of our own at this leader, a mailbox. A new one is taken when the leader has
    forgotten the old one, so that nothing meant for a lost stream can reach one that took its place.
    """

    def __init__(self, gateway_id: str, generation: int, leader: Any) -> None:
        super().__init__(generation)
        self.lost_since_s: float | None = None
        """On the event loop's clock; None while the group is well."""
        self._gateway_id = gateway_id
        self._mailbox = _new_mailbox(gateway_id)
        self._leader = leader
        self._poller: asyncio.Task[None] | None = None
        self._has_aborted = False
        """The leader will have put the ends of aborted requests into the mailbox."""

    @property
    def lost(self) -> bool:
        return self.lost_since_s is not None

    async def submit(self, request: Request) -> TokenStream:
        """Hand over a request. Raises GroupLost when the group cannot take it, GroupFull when it will not."""
        stream = self._open(request)
        packed = pack(replace(request, gateway_id=self._mailbox))
        try:
            # Before Python 3.12 wait_for returns the answer, and forgets that it was cancelled, when both come at once.
            async with asyncio.timeout(CALL_TIMEOUT_S):
                refusal = await self._leader.submit.remote(packed)
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise
        except (RayError, TimeoutError) as error:
            self._lose(error, is_dead=True)
            raise GroupLost(is_dead=True) from error
        if refusal is not None:
            self.forget(request.request_id)
            message, retry_after_s = refusal
            raise GroupFull(message, retry_after_s=retry_after_s)
        if request.request_id not in self._streams:
            raise GroupLost(is_dead=self.lost)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        return stream

    def _send_abort(self, request_id: str, branch: int | None) -> None:
        if not self.lost:
            self._leader.abort.remote((request_id,), branch)
            self._has_aborted = self._has_aborted or branch is None

    async def reset_prefix_cache(self) -> int | None:
        """Let the group forget cached blocks that no request uses: how many; None when it does not answer."""
        try:
            return int(await asyncio.wait_for(self._leader.reset_prefix_cache.remote(), CALL_TIMEOUT_S))
        except (RayError, TimeoutError):
            return None

    async def _poll(self) -> None:
        """Poll while requests are under way, and then until nothing comes any more: a leader that drains waits until
        everything is acknowledged, the ends of aborted requests too."""
        acknowledged, mailbox, is_empty = 0, self._mailbox, False
        while (self._streams or not is_empty) and not self.lost:
            wait_s = POLL_S if self._streams or self._has_aborted else 0.0
            try:
                call = self._leader.poll.remote(mailbox, acknowledged, wait_s)
                async with asyncio.timeout(SILENCE_S):
                    frame = unpack(await call, TokenFrame)
            except (RayError, TimeoutError, WireError) as error:
                if self._streams:
                    self._lose(error, is_dead=True)
                return
            if frame.last_number < acknowledged:
                self._lose(RuntimeError("the leader has forgotten this gateway"), is_dead=False)
                return
            acknowledged = frame.last_number
            is_empty = not frame.updates
            self._has_aborted = self._has_aborted and not is_empty
            for update in frame.updates:
                self._deliver(update)

    def _lose(self, error: BaseException, *, is_dead: bool) -> None:
        logger.warning("worker group generation %d lost: %s", self.generation, str(error).strip().split("\n")[-1])
        if is_dead and self.lost_since_s is None:
            self.lost_since_s = asyncio.get_running_loop().time()
        self._mailbox = _new_mailbox(self._gateway_id)
        if self._streams:  # a leader that was only slow must not go on with what others have taken over
            self._leader.abort.remote(tuple(self._streams))
        self._lose_streams(is_dead=is_dead)


def _new_mailbox(gateway_id: str) -> str:
    return f"{gateway_id}.{uuid.uuid4().hex[:8]}"
