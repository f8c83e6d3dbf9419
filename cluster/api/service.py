"""What the HTTP layer asks of the cluster behind it: the seam between text and token ids.

``cluster/api`` knows nothing of Ray; a gateway gives it an object of this form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ...worker.messages import FinishReason, Pooling, SamplingParams, TokenLogprobs
from ...worker.pool_state import PoolState
from ...worker.spec import SchedulingPolicy
from .request.generation_defaults import GenerationDefaults


@dataclass(frozen=True, slots=True)
class RouteWishes:
    """What a client says of where its request shall go. Group names; empty: nothing was said."""

    session_id: str | None = None
    """Requests of one session go to one group, where that costs little."""
    allowed_groups: tuple[str, ...] = ()
    excluded_groups: tuple[str, ...] = ()
    preferred_groups: tuple[str, ...] = ()

    def allow(self, group: str) -> bool:
        """Whether the group may serve the request."""
        return group not in self.excluded_groups and (not self.allowed_groups or group in self.allowed_groups)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A judged request in token ids: one prompt, and ``num_branches`` outputs for it.

    The service adds routing hashes, gateway and attempt. With ``sampling.beam_width`` the branches are the best outputs
    of one search, best first; otherwise they are drawn apart.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None
    wishes: RouteWishes = RouteWishes()
    tenant: str | None = None
    num_branches: int = 1
    use_prefix_cache: bool = True
    """False: nothing of the prompt is taken from a prefix cache or kept in one."""
    queue_timeout_s: float | None = None
    """How long the request may wait until a group begins to compute it."""
    pooling: Pooling | None = None
    """Nothing is drawn; the one delta brings an ``embedding``."""
    trace: str | None = None
    """See ``worker.messages.Request``, as for the next one."""
    client_request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request went, for response headers."""

    group: str
    expected_cached_tokens: int
    reason: str
    expected_ttft_s: float = 0.0
    """Estimated seconds from the decision to the first token; 0.0 where nobody made an estimate."""
    queued_s: float = 0.0
    """Seconds that it waited in the router for a group with room."""
    attempt: int = 1
    """Above 1: so many groups have been given it, since the others were lost."""


class TokenDelta(NamedTuple):
    """New output tokens of one branch, in order and without gaps or repeats. One is made for each token, in a fifth of
    the time that a frozen dataclass would take."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    """Of the prompt; told once in a generation, whatever its branches."""
    error: str | None = None
    branch: int = 0
    retry_after_s: float | None = None
    """With ``FinishReason.OVERLOADED``: when it is worth trying again."""
    param: str | None = None
    """With ``FinishReason.ERROR``: the field for which the request can never be served; ``code`` is OpenAI's for it."""
    code: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids`` where the request wants them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens, beginning with its second one; all of them come before output tokens do."""
    embedding: bytes | None = None
    """The vector of a ``pooling`` request: float32, little endian."""
    phases: tuple[float, float] | None = None
    """See ``worker.messages.SequenceUpdate``."""


class Generation(Protocol):
    """One request under way, with all of its branches."""

    @property
    def route(self) -> Route: ...

    def listen(self, wake: Callable[[], None]) -> None:
        """``wake`` is called in the event loop whenever there may be something to take; at once if there is."""
        ...

    def take(self) -> Sequence[TokenDelta]:
        """What has come of all branches since the last call; never blocks.

        The last of each branch has a finish reason, unless it was ended by ``end``. An engine's failure is a delta with
        ``FinishReason.ERROR``. A function instead of an asynchronous iterator: with four of those one above the other,
        handing a token on took longer than all that is done with it.
        """
        ...

    def end(self, branch: int) -> None:
        """Stop one branch, of which no delta comes any more; the others go on. Harmless when it is over; never blocks.

        With its last branch the whole request is over.
        """
        ...

    def abort(self) -> None:
        """Stop and free what the request holds; harmless when it is over. Never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the API says of the model behind it."""

    name: str
    """What clients put into ``model``."""
    max_model_len: int
    """Tokens of prompt and output together, at the most; already cut to what the KV pool can hold."""
    created: int
    """Unix time in seconds, for ``/v1/models``."""
    max_num_seqs: int
    """Sequences that a worker group runs at once: a wider beam search would never fit."""
    max_output_tokens: int | None = None
    """The operator's limit on the output of one choice."""
    scheduling_policy: SchedulingPolicy = "priority"
    max_logprobs: int = 20
    """Alternatives that a request may ask for each token."""
    pooling: str = "last"
    """How hidden states become an embedding where a request does not say: last or mean."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """Of fields that a request leaves out."""


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str
    """For a person: what is missing, or how many groups serve."""


class GenerationService(Protocol):
    """The cluster, as seen by one gateway."""

    async def start(self, request: GenerationRequest) -> Generation:
        """Route and submit. Raises Overloaded, Unavailable or InvalidRequest before any token."""
        ...

    async def readiness(self) -> Readiness: ...

    async def metrics_text(self) -> str:
        """Prometheus text for the whole cluster."""
        ...

    async def explain(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The last decisions of the routers, newest first; each has a ``request_id``. Raises Unavailable."""
        ...

    async def pools(self, most: int) -> Mapping[str, PoolState | None]:
        """Group → what its block pool looks like; None for one that does not answer. Of the first ``most`` by name."""
        ...

    async def reset_prefix_cache(self) -> Mapping[str, int | None]:
        """Group → blocks that its prefix cache forgot; None for one that did not answer.

        Raises Unavailable when none answered.
        """
        ...

    async def profile(self, num_steps: int, group: str | None, patience_s: float) -> Mapping[str, Mapping[str, Any]]:
        """Group → where the traces are of its next steps, see ``worker.profile_desk``; of all groups, or of one.

        Raises InvalidRequest for a group that there is not.
        """
        ...
