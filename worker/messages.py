"""The messages that travel between gateway, router and worker groups: plain data, no behaviour.

Each is a frozen dataclass (but one, for speed), encoded by ``wire.pack`` as msgpack. They are shaped for continuation:
whoever holds a ``Request`` together with the output that it has received can hand it to another worker group, which
goes on where the first one stopped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeAlias

from .routing_hash import whole_hashes

PackedHashes: TypeAlias = Annotated[bytes, whole_hashes]
"""See ``routing_hash.pack_hashes``. Checked when a message is unpacked; those of cache events when they are applied,
so that the rest of the report is not lost."""


class Pooling(enum.Enum):
    """How the last hidden states of a prompt become one vector."""

    LAST = "last"
    """That of the last token."""
    MEAN = "mean"


class FinishReason(enum.Enum):
    """Why a sequence ended. Every sequence ends exactly once, with one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    """Not admitted within its ``queue_timeout_s``; nothing was computed for it."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen. Stop *strings* are text and stay with the gateway."""

    max_tokens: int
    """Output tokens of a branch at the most, those of ``Branch.output_token_ids`` included. 0 only with
    ``num_prompt_logprobs``: the prompt is judged, and nothing drawn."""
    seed: int
    """64 bits, unsigned. The gateway draws one for a request that has none."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int | None = None
    min_tokens: int = 0
    """Until a branch has this many output tokens, ``stop_token_ids`` cannot be drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """End a branch when drawn: the model's end-of-sequence ids, unless the request ignores them, and its own."""
    beam_width: int | None = None
    """Search with so many beams instead of drawing; the request's branches are then the best outputs, best first.
    Seed, temperature, top_p and top_k do not matter."""
    length_penalty: float = 1.0
    """Beam search: an output's score is its log-probability / length ** length_penalty."""
    early_stopping: bool = False
    """Beam search: end as soon as there are ``beam_width`` complete outputs, not when none can become better."""
    min_p: float = 0.0
    """Tokens with less than so many times the likeliest one's probability are left out."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """See ``kernels.sampling.Penalties``."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); no id twice."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these can be drawn; not empty."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which the last cannot be drawn after the ones before it."""
    grammar: str | None = None
    """What the output must follow, in llguidance's serialised form; see ``grammar.py``."""
    num_logprobs: int | None = None
    """So many of the likeliest tokens are given with each output token, beside its own log-probability. None: neither
    is. Log-probabilities are those of the model: log-softmax of its logits, before anything bends them."""
    num_prompt_logprobs: int | None = None
    """The same for each token of the prompt after the first. Nothing is then taken from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One output of a request, with what has been generated for it already (elsewhere, before a fail-over)."""

    index: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a gateway submits to the leader of a worker group."""

    KIND: ClassVar[str] = "request"

    request_id: str
    gateway_id: str
    """Whose poll gets the tokens."""
    model: str
    prompt_token_ids: tuple[int, ...]
    routing_hashes: PackedHashes
    """One 64-bit hash for each full block of the prompt; see ``routing_hash.py``."""
    sampling: SamplingParams
    branches: tuple[Branch, ...] = (Branch(0),)
    priority: int = 0
    """Lower is served first."""
    timeout_s: float | None = None
    """Seconds that the engine may take from the moment it receives the request."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""
    tenant: str | None = None
    expected_cached_tokens: int = 0
    """What the router expects this group to hold of the prompt."""
    attempt: int = 1
    """Counts the groups that have been given this request."""
    use_prefix_cache: bool = True
    """False: nothing is taken from the prefix cache for it, and nothing of it is kept there."""
    queue_timeout_s: float | None = None
    """Seconds that it may wait until its first token is being computed; then it ends with ``OVERLOADED``."""
    pooling: Pooling | None = None
    """Nothing is drawn: the answer is one vector, made of the prompt's last hidden states."""
    trace: str | None = None
    """The W3C ``traceparent`` of the span that it belongs to, for logs."""
    client_request_id: str | None = None
    """The client's own x-request-id, for logs; others may have the same."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, and which ones were the likeliest in its place."""

    logprob: float
    """Natural logarithm; -inf for a token without probability."""
    rank: int
    """1: no token was likelier."""
    top_token_ids: tuple[int, ...] = ()
    """Likeliest first; of equals the lowest id."""
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class SequenceUpdate:
    """New tokens of one branch. ``position`` counts output tokens from 0, so a repeat is harmless.

    Nobody changes one. It is not frozen since that would take three times as long to make, on both sides for each
    token; a named tuple would take half as long again, and the wire has no other use for one.
    """

    request_id: str
    branch: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that were taken from the prefix cache when the request was first admitted; None before that."""
    error: str | None = None
    """With ``FinishReason.ERROR``, ``ABORT`` or ``OVERLOADED``: what happened, for the user."""
    retry_after_s: float | None = None
    """With ``OVERLOADED``: when it is worth trying again."""
    param: str | None = None
    """With ``ERROR``: the field of the request for which it can never be served here."""
    code: str | None = None
    """OpenAI's code for that, where there is one."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids`` where the request wants them."""
    prompt_position: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from ``prompt_position`` (at least 1) on, in order and of each once; told for branch 0,
    ahead of the first output token. A repeat is harmless."""
    embedding: bytes | None = None
    """The vector of a ``pooling`` request: float32, little endian."""
    phases: tuple[float, float] | None = field(default=None, compare=False)
    """Told once, when the request's prompt is computed: seconds from its receipt until the first step that computed a
    part of it, and from then to its first token."""


@dataclass(frozen=True, slots=True)
class SubmitAnswer:
    """Leader → gateway: a Request was taken, its tokens come by polls; or it was refused, and why, for the user."""

    KIND: ClassVar[str] = "submit_answer"

    request_id: str
    refusal: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Gateway → leader: end these requests, or only one branch of each. Not answered."""

    KIND: ClassVar[str] = "abort"

    request_ids: tuple[str, ...]
    branch: int | None = None


@dataclass(frozen=True, slots=True)
class Poll:
    """Gateway → leader: give all that came after number ``acknowledged`` of this mailbox; a TokenFrame."""

    KIND: ClassVar[str] = "poll"

    mailbox: str
    """The ``gateway_id`` of its requests."""
    acknowledged: int
    wait_s: float
    """With nothing new it is answered after so long."""


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """The answer to a poll: everything new for one gateway since the number that it acknowledged."""

    KIND: ClassVar[str] = "tokens"

    generation: int
    last_number: int
    """Acknowledge this number in the next poll; updates up to it are then forgotten."""
    updates: tuple[SequenceUpdate, ...]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one prefix that can now be reused. ``parent_hash`` is None at the start of a prompt."""

    TAG: ClassVar[str] = "stored"

    parent_hash: int | None
    hashes: bytes
    """See ``routing_hash.pack_hashes``."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks whose last copy was evicted."""

    TAG: ClassVar[str] = "removed"

    hashes: bytes
    """See ``routing_hash.pack_hashes``."""


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The group holds nothing any more."""

    TAG: ClassVar[str] = "cleared"


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Changes of what a group's prefix cache holds, in order.

    ``sequence_number`` counts the messages of a generation from 0 without gaps; a reader that misses one asks for a
    snapshot. A snapshot replaces everything known of the group and carries the number of the last message it includes.
    A large one comes in several messages, in order: the first replaces, the last completes it.
    """

    KIND: ClassVar[str] = "kv_events"

    generation: int
    sequence_number: int
    events: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...]
    is_snapshot: bool = False
    part: int = 0
    """Of a snapshot: which of its ``num_parts``."""
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """What became of a request since the group's last report, for the router's books."""

    request_id: str
    prefilled: bool
    """Its prompt is computed; ``num_cached_tokens`` of it came from the cache."""
    finished: bool
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Output tokens of all its branches, once it is finished; the router learns from them how long outputs are."""
    ttft_s: float = 0.0
    """Seconds from the group's receipt of it to its first token; 0.0 before that."""
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Leader → router, at least once a second: registration, load and cache changes of one worker group."""

    KIND: ClassVar[str] = "group_report"

    model: str
    group: str
    """The group's name; stays the same over its generations only if Serve reuses it."""
    generation: int
    """Start of this incarnation in ns since the epoch: a larger one voids the smaller."""
    block_size: int
    num_blocks: int
    num_free_blocks: int
    """Free or cached and unused: what new sequences can have."""
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_uncomputed_prompt_tokens: int
    """Prefill work that the group has accepted and not yet done, the step under way included, and without what is
    expected to be cached."""
    prefill_tokens_per_s: float
    """Measured; 0.0 until something was measured."""
    decode_step_s: float
    """Measured mean time of a step that decodes the sequences running now; 0.0 until measured."""
    draining: bool
    progress: tuple[RequestProgress, ...]
    """Requests received, prefilled or finished since the last report that the router acknowledged."""
    events: tuple[KVEvents, ...] = ()
    metrics: str = ""
    """The group's metrics in Prometheus text format, or empty when unchanged."""
    oldest_news_age_s: float = 0.0
    """How long the oldest of ``progress`` and ``events`` has waited to be reported, by the leader's clock."""
    prefill_context: float = 0.0
    """Mean number of tokens before a token of prefill where ``prefill_tokens_per_s`` was measured."""
    prefill_context_s: float = 0.0
    """Time that a token of prefill takes longer for each token before it; 0.0 until measured."""
    weights: str = ""
    """Names what the group computes with: a request that has output of one goes on at groups with the same alone."""


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """Gateway → router: which group for this request?"""

    request_id: str
    model: str
    routing_hashes: PackedHashes
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    timeout_s: float | None = None
    session_id: str | None = None
    tenant: str | None = None
    excluded_generations: tuple[int, ...] = ()
    """Generations that this request has just failed on."""
    num_branches: int = 1
    """Sequences that it will run, all on one prompt: its ``n``, or the width of its beam search."""
    queue_timeout_s: float | None = None
    """Seconds that it may wait until a group begins to compute it."""
    allowed_groups: tuple[str, ...] = ()
    """Names of the only groups that may be chosen; empty: all."""
    excluded_groups: tuple[str, ...] = ()
    """Names of groups that must not be chosen."""
    preferred_groups: tuple[str, ...] = ()
    """Names of groups that are chosen where that costs little."""
    attempt: int = 1
    """Above 1 for a request that another group had taken: it has had its turn, and is never refused for others."""
    trace: str | None = None
    """See ``Request.trace``."""


@dataclass(frozen=True, slots=True)
class RouteQueries:
    """All queries of a gateway within a millisecond or so, and the requests that it gave up before a group had them."""

    KIND: ClassVar[str] = "route_queries"

    gateway_id: str
    queries: tuple[RouteQuery, ...]
    cancelled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The router's answer to one query; the group is reserved for it from this moment."""

    request_id: str
    group: str | None
    """None: no group can take it, ``reason`` says why."""
    generation: int
    expected_cached_tokens: int
    reason: str
    """One of a fixed set of words, for headers and metrics."""
    retry_after_s: float | None = None
    queued: bool = False
    """It waits in the router for a group with room; the decision that ends the wait comes by ``turns``."""
    expected_ttft_s: float = 0.0
    """Estimated seconds from now to its first token; of a queued one, to its turn."""
    detail: str = ""
    """Where no group was chosen: why, for the user, with limit and value."""


@dataclass(frozen=True, slots=True)
class RouteDecisions:
    """The answer to ``RouteQueries``, in their order; or to ``turns``, what has ended the wait of queued queries."""

    KIND: ClassVar[str] = "route_decisions"

    decisions: tuple[RouteDecision, ...]
    last_number: int = 0
    """Of an answer to ``turns``: acknowledge it with the next call. 0: what was acknowledged is not known here, and
    what was queued is lost."""


@dataclass(frozen=True, slots=True)
class SharedReservation:
    """What one router has decided, for the other ones."""

    query: RouteQuery
    group: str
    generation: int
    expected_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SharedReservations:
    """Router → the other routers: what was decided and given up since the last such message. A lost one does no harm
    beyond what the groups' next reports put right."""

    KIND: ClassVar[str] = "shared_reservations"

    reservations: tuple[SharedReservation, ...]
    cancelled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One group in the registry that gateways cache. The leader's handle travels beside it."""

    model: str
    group: str
    generation: int
    slot: int
    draining: bool
    weights: str = ""
    """See ``GroupReport``."""


@dataclass(frozen=True, slots=True)
class Registry:
    KIND: ClassVar[str] = "registry"

    entries: tuple[GroupEntry, ...]
