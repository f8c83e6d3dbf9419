"""GroupClient: a gateway's requests at the leader of one worker group.

One poll is outstanding while any request is under way there. Its answer holds all new tokens of all requests; positions
make repeated tokens harmless, and the number in each poll tells the leader what it may forget. So nothing is lost or
told twice when the connection is: on the new one everything that was not answered is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError

from ..worker.messages import Abort, Poll, Request, SubmitAnswer, TokenFrame
from ..worker.pool_state import PoolState
from ..worker.wire import pack
from .group_line import GroupLine
from .leader_line import Answer, LeaderLine
from .token_stream import GroupLost, TokenStream

POLL_S = 1.0
"""The leader answers a poll after so long, with or without tokens."""

CALL_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 1.0
"""For a look at a pool: one that somebody waits for to see all groups."""
PROFILE_TIMEOUT_S = 90.0
"""For a trace to be written, after its steps."""

logger = logging.getLogger(__name__)


class GroupFull(Exception):
    """The worker group is well, and has no room for the request."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Submission:
    """A request that the leader has not answered. It takes one that comes twice for the same."""

    packed: bytes
    answer: asyncio.Future[SubmitAnswer]
    num_sent: int = 0


class GroupClient(GroupLine):
    """``leader`` is the actor handle of generation ``generation``; ``tls`` encrypts the line to it.

    Requests are submitted under a name of our own at this leader, a mailbox. A new one is taken when the leader has
    forgotten the old one, so that nothing meant for a lost stream can reach one that took its place.
    """

    def __init__(self, gateway_id: str, generation: int, leader: Any, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(generation)
        self.lost_since_s: float | None = None
        """On the event loop's clock; None while the group is well."""
        self._gateway_id = gateway_id
        self._mailbox = _new_mailbox(gateway_id)
        self._leader = leader
        self._line = LeaderLine(leader, self, tls)
        self._submissions: dict[str, _Submission] = {}
        self._unsent_aborts: list[Abort] = []
        """Meant for the leader while the connection is opened again."""
        self._acknowledged = 0
        self._is_polling = False
        self._is_empty = True
        """As far as is known, the mailbox."""
        self._has_aborted = False
        """The leader will have put the ends of aborted requests into the mailbox."""

    @property
    def lost(self) -> bool:
        return self.lost_since_s is not None

    def connect(self) -> None:
        """Open the line before there is a request for it: one that has lost its group then need not wait for that."""
        self._line.open()

    async def submit(self, request: Request) -> TokenStream:
        """Hand over a request. Raises GroupLost when the group cannot take it, GroupFull when it will not."""
        if self._line.is_over:
            raise GroupLost(is_dead=True)
        stream = self._open(request)
        packed = pack(replace(request, gateway_id=self._mailbox))
        submission = _Submission(packed, asyncio.get_running_loop().create_future())
        self._submissions[request.request_id] = submission
        if self._line.is_open:
            self._send_submission(submission)
            self._poll()
        else:
            self._line.open()
        try:
            answer = await submission.answer
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise
        finally:
            self._submissions.pop(request.request_id, None)
        if answer.refusal is not None:
            self._take_back(request.request_id, submission)
            raise GroupFull(answer.refusal, retry_after_s=answer.retry_after_s or 1.0)
        if request.request_id not in self._streams:
            raise GroupLost(is_dead=self.lost)
        return stream

    def _take_back(self, request_id: str, submission: _Submission) -> None:
        """It was refused; but the leader may have taken it when it came first."""
        if submission.num_sent > 1:
            self.abort(request_id)
        self.forget(request_id)

    def _send_submission(self, submission: _Submission) -> None:
        submission.num_sent += 1
        self._line.send(submission.packed)

    def _send_abort(self, request_id: str, branch: int | None) -> None:
        if self.lost:
            return
        abort = Abort((request_id,), branch)
        if self._line.is_open:
            self._line.send(pack(abort))
        else:
            self._unsent_aborts.append(abort)
        self._has_aborted = self._has_aborted or branch is None

    async def reset_prefix_cache(self) -> int | None:
        """Let the group forget cached blocks that no request uses: how many; None when it does not answer."""
        try:
            return int(await asyncio.wait_for(self._leader.reset_prefix_cache.remote(), CALL_TIMEOUT_S))
        except (RayError, TimeoutError):
            return None

    async def profile(self, num_steps: int, patience_s: float) -> dict[str, Any]:
        """See ``Worker.profile``."""
        try:
            call = self._leader.profile.remote(num_steps, patience_s)
            return dict(await asyncio.wait_for(call, patience_s + PROFILE_TIMEOUT_S))
        except (RayError, TimeoutError):
            return {"error": "the worker group did not answer"}

    async def pool_state(self) -> PoolState | None:
        """What the group's block pool looks like; None when it does not answer soon."""
        try:
            state: PoolState = await asyncio.wait_for(self._leader.pool_state.remote(), LOOK_TIMEOUT_S)
            return state
        except (RayError, TimeoutError):
            return None

    def close(self) -> None:
        """The group is of no interest any more; no request is under way here."""
        self._line.close()

    def _poll(self) -> None:
        """Have a poll outstanding while requests are under way, and then until nothing comes any more: a leader that
        drains waits until everything is acknowledged, the ends of aborted requests too."""
        if self._is_polling:
            return
        if self._streams or not self._is_empty:
            wait_s = POLL_S if self._streams or self._has_aborted else 0.0
            self._line.send(pack(Poll(self._mailbox, self._acknowledged, wait_s)))
            self._is_polling = True
        else:
            self._acknowledged = 0  # the mailbox is forgotten when it is not polled for long

    # ---- told by the line ----

    @property
    def awaits_answer(self) -> bool:
        return self._is_polling or bool(self._submissions)

    def line_opened(self) -> None:
        for abort in self._unsent_aborts:
            self._line.send(pack(abort))
        self._unsent_aborts.clear()
        for submission in self._submissions.values():
            self._send_submission(submission)
        self._is_polling, self._is_empty = False, False  # ask at any rate, so that the leader answers
        self._poll()

    def line_received(self, answer: Answer) -> None:
        if isinstance(answer, TokenFrame):
            self._take(answer)
        elif (submission := self._submissions.get(answer.request_id)) and not submission.answer.done():
            submission.answer.set_result(answer)

    def line_lost(self, error: BaseException) -> None:
        self._lose(error, is_dead=True)

    def _take(self, frame: TokenFrame) -> None:
        self._is_polling = False
        if frame.last_number < self._acknowledged:
            self._lose(RuntimeError("the leader has forgotten this gateway"), is_dead=False)
            return
        self._acknowledged = frame.last_number
        self._is_empty = not frame.updates
        self._has_aborted = self._has_aborted and not self._is_empty
        for update in frame.updates:
            self._deliver(update)
        self._poll()

    def _lose(self, error: BaseException, *, is_dead: bool) -> None:
        level = logging.WARNING if self._streams else logging.INFO
        logger.log(level, "worker group generation %d lost: %s", self.generation, str(error).strip().split("\n")[-1])
        if self._streams:  # a leader that was only slow must not go on with what others have taken over
            self._line.send(pack(Abort(tuple(self._streams))))
        if is_dead and self.lost_since_s is None:
            self.lost_since_s = asyncio.get_running_loop().time()
            self._line.close()
        self._mailbox, self._acknowledged = _new_mailbox(self._gateway_id), 0
        for submission in self._submissions.values():
            if not submission.answer.done():
                submission.answer.set_exception(GroupLost(is_dead=is_dead))
        self._lose_streams(is_dead=is_dead)


def _new_mailbox(gateway_id: str) -> str:
    return f"{gateway_id}.{uuid.uuid4().hex[:8]}"
