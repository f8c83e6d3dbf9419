"""What the HTTP layer asks of the cluster behind it: the seam between text and token ids.

``cluster/api`` knows nothing of Ray; a gateway gives it an object of this form.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from ...worker.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A judged request in token ids. The service adds routing hashes, gateway and attempt."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request went, for response headers."""

    group: str
    expected_cached_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New output tokens of branch 0, in order and without gaps or repeats."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    error: str | None = None


class Generation(Protocol):
    """One request under way."""

    @property
    def route(self) -> Route: ...

    def tokens(self) -> AsyncIterator[TokenDelta]:
        """Deltas until one has a finish reason. An engine's failure is a delta with ``FinishReason.ERROR``."""
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
