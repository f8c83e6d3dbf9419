"""The engine under random operations: whatever happens, every sequence sees its own K and V, and nothing is lost.

The rank below it keeps tokens (``fake_rank.py``): an output that is not the one of a run alone, or a position that does
not read back its own prefix, shows a block shared wrongly, reused too early or not copied.

A longer run: ``pytest tests/differential/test_engine_random.py --hypothesis-profile=long``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import ClassVar

import numpy as np
from fake_rank import VOCABULARY, FakeRank, digests, hidden, score
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from octavo.worker.engine import Engine
from octavo.worker.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Branch,
    FinishReason,
    Pooling,
    Request,
    SamplingParams,
    SequenceUpdate,
    TokenLogprobs,
)
from octavo.worker.policies import make_queue
from octavo.worker.routing_hash import HASH_BYTES, RoutingHasher, pack_hashes, unpack_hashes
from octavo.worker.scheduler import Scheduler, SchedulerLimits

KEY = bytes(range(16))
MAX_MODEL_LEN = 40
SALTS = (None, None, None, "salt")
GATEWAYS = ("one", "two")
MOST_STEPS = 20_000
"""Many more than all that can be under way takes, also one after the other and preempted a few times."""
ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass
class Received:
    """What a gateway has got of one branch."""

    base: int
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def take(self, update: SequenceUpdate) -> None:
        assert self.reason is None, "an update after the end"
        assert update.position == self.base + len(self.token_ids), "a gap or a repeat"
        assert update.token_ids or update.finish_reason or update.prompt_logprobs
        self.token_ids.extend(update.token_ids)
        self.reason = update.finish_reason


class Gateways:
    """All gateways in one: takes updates and knows which branches there are."""

    def __init__(self) -> None:
        self.branches: dict[tuple[str, int], Received] = {}
        self.gateway_of: dict[str, str] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.embeddings: dict[str, float] = {}

    def expect(self, request: Request) -> None:
        self.gateway_of[request.request_id] = request.gateway_id
        self.prompt_logprobs[request.request_id] = []
        for branch in request.branches:
            self.branches[request.request_id, branch.index] = Received(len(branch.output_token_ids))

    def emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        assert self.gateway_of[update.request_id] == gateway_id
        self.branches[update.request_id, update.branch].take(update)
        if update.prompt_logprobs:
            told = self.prompt_logprobs[update.request_id]
            assert update.prompt_position == 1 + len(told), "a gap or a repeat"
            assert not any(
                received.token_ids for (name, _), received in self.branches.items() if name == update.request_id
            ), "later than output"
            told += update.prompt_logprobs
        if update.embedding is not None:
            self.embeddings[update.request_id] = float(np.frombuffer(update.embedding, "<f4")[0])


def make_engine(
    limits: SchedulerLimits,
    gateways: Gateways,
    clock: list[float],
    rank: FakeRank | None = None,
    policy: str = "priority",
) -> Engine:
    rank = rank or FakeRank(limits)
    queue = make_queue(policy)
    scheduler = rank.scheduler = Scheduler(limits, RoutingHasher(KEY, limits.block_size), queue=queue)
    return Engine(scheduler, rank, clock=lambda: clock[0], emit=gateways.emit)


def output_alone(request: Request, branch: int) -> tuple[tuple[int, ...], FinishReason]:
    """The output of one branch from its beginning, alone, with all the memory there may be and nothing cached."""
    branches = request.branches if request.sampling.beam_width else (Branch(branch),)
    return _outputs_of(
        replace(request, request_id="alone", branches=branches, timeout_s=None, queue_timeout_s=None, priority=0)
    )[branch]


@lru_cache(maxsize=4_096)
def _outputs_of(request: Request) -> dict[int, tuple[tuple[int, ...], FinishReason]]:
    limits = SchedulerLimits(512, 4, 8, 256, 256, enable_prefix_caching=False)
    gateways = Gateways()
    gateways.expect(request)
    engine = make_engine(limits, gateways, [0.0])
    engine.submit(request)
    while engine.step():
        pass
    outputs = {}
    for (_, branch), received in gateways.branches.items():
        assert received.reason is not None
        outputs[branch] = tuple(received.token_ids), received.reason
    return outputs


class NaiveIndex:
    """What a router knows of the group from its events alone."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()

    def apply(self, events: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...]) -> None:
        for event in events:
            if isinstance(event, BlocksCleared):
                self.hashes.clear()
            elif isinstance(event, BlocksStored):
                assert event.parent_hash is None or event.parent_hash in self.hashes, "stored behind a hole"
                assert not self.hashes & set(unpack_hashes(event.hashes).tolist()), "stored twice"
                self.hashes |= set(unpack_hashes(event.hashes).tolist())
            else:
                assert set(unpack_hashes(event.hashes).tolist()) <= self.hashes, "removed, but not there"
                self.hashes -= set(unpack_hashes(event.hashes).tolist())


@dataclass(frozen=True)
class Shape:
    """A random request, apart from what it has in common with others."""

    tail: list[int]
    shares: int
    """Which of the latest prompts it begins like."""
    num_shared: int
    salt: int
    priority: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    timeout_s: float | None
    gateway: int
    outputs: tuple[int, ...]
    """For each branch: how many tokens it has already."""
    beam_width: int | None
    use_prefix_cache: bool
    queue_timeout_s: float | None
    num_prompt_logprobs: int | None
    pooling: Pooling | None


def random_shape(seed: int) -> Shape:
    """One number for hypothesis to draw and to shrink: a number for each field costs it more than all the rest."""
    rng = Random(seed)
    beam_width = rng.choice([None] * 7 + [1, 2, 4])
    few = (0,) if beam_width == 1 else rng.choice([(0,), (0, 0)])
    reads = rng.choice([None] * 6 + ["score", "score", "score alone", *Pooling])
    if isinstance(reads, Pooling):
        beam_width, few = None, (0,)
    return Shape(
        tail=rng.choices(range(VOCABULARY), k=rng.randint(*rng.choice([(1, 3), (1, 3), (1, 9), (16, 24)]))),
        shares=rng.randrange(100),
        num_shared=rng.randint(0, 20),
        salt=rng.randrange(len(SALTS)),
        priority=rng.randrange(3),
        max_tokens=0 if reads not in (None, "score") else 40 if rng.random() < 0.08 else rng.randint(1, 12),
        min_tokens=rng.randint(0, 4),
        stop_token_ids=rng.choice([(), (), (3,), (1, 4)]),
        seed=rng.randrange(3),
        timeout_s=rng.choice([None, None, None, None, 3.0, 12.0]),
        gateway=rng.randrange(len(GATEWAYS)),
        outputs=few
        if beam_width or isinstance(reads, Pooling)
        else rng.choice([(0,), (0,), (0,), (0, 0), (0, 0, 0, 0), (2,), (1, 5), (0, 3, 0), (12, 0), (12,)]),
        beam_width=beam_width,
        use_prefix_cache=rng.random() < 0.85,
        queue_timeout_s=rng.choice([None, None, None, None, 2.0]),
        num_prompt_logprobs=rng.randrange(2) if reads in ("score", "score alone") else None,
        pooling=reads if isinstance(reads, Pooling) else None,
    )


SHAPES = st.integers(0, 2**32 - 1).map(random_shape)


def small_limits(
    capacity: int, block_size: int, max_num_seqs: int, budget: int, caching: bool, plans_ahead: bool
) -> SchedulerLimits:
    num_blocks = -(-capacity // block_size)
    return SchedulerLimits(num_blocks, block_size, max_num_seqs, budget, MAX_MODEL_LEN, caching, plans_ahead)


INTERRUPTIONS = ["abort"] * 4 + ["abort a branch"] * 3 + ["submit again"] * 3 + ["reset cache"] * 2 + ["gateway gone"]

LIMITS = st.builds(
    small_limits,
    capacity=st.integers(24, 60),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 8),
    budget=st.sampled_from([2, 4, 6, 8, 16, 64]),
    caching=st.sampled_from([True, True, True, False]),
    plans_ahead=st.booleans(),
)


class RandomOperations(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines, gateways that go, and steps, in any order."""

    totals: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = [0.0]
        self.prompts: list[tuple[int, ...]] = [()]
        self.requests: list[Request] = []
        self.gateways = Gateways()
        self.index = NaiveIndex()
        self.beam_hashes: set[int] = set()

    @initialize(limits=LIMITS, eager=st.booleans(), policy=st.sampled_from(["fcfs", "priority", "shortest", "fair"]))
    def start(self, limits: SchedulerLimits, eager: bool, policy: str) -> None:
        self.limits = limits
        self.hasher = RoutingHasher(KEY, limits.block_size)
        self.rank = FakeRank(limits, eager=eager)
        self.engine = make_engine(limits, self.gateways, self.clock, self.rank, policy)

    # ---- operations ----

    @rule(shapes=st.lists(SHAPES, min_size=1, max_size=4))
    def submit(self, shapes: list[Shape]) -> None:
        for shape in shapes:
            request = self._request(shape)
            self.requests.append(request)
            self.gateways.expect(request)
            self.engine.submit(request)
            self._check_refusal(request)
            self._done("submit")

    @rule(which=st.integers(0, 99), what=st.sampled_from(INTERRUPTIONS))
    @precondition(lambda self: self.requests)
    def interrupt(self, which: int, what: str) -> None:
        request = self.requests[-1 - which % min(12, len(self.requests))]
        if what == "abort":
            self._abort(request)
        elif what == "abort a branch":
            self._abort_branch(request, request.branches[which % len(request.branches)].index)
        elif what == "reset cache":
            self.engine.reset_prefix_cache()
            self.engine.check()
        elif what == "gateway gone":
            self._gateway_goes(request.gateway_id)
        elif self._is_under_way(request):
            self.engine.submit(request)  # a second time: changes nothing
        self._done(what)

    @rule(num_steps=st.integers(1, 3))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.has_work:
                self._step()

    @rule(num_steps=st.integers(4, 9))
    def step_for_a_while(self, num_steps: int) -> None:
        self.step(num_steps)

    @rule(which=st.integers(0, 1))
    def router_listens(self, which: int) -> None:
        """Events replayed from the start, or at any time a snapshot, tell the same."""
        self._listen()
        if which:
            self._check_snapshot()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        num_steps = 0
        while self.engine.has_work:
            self._step()
            num_steps += 1
            assert num_steps < MOST_STEPS, "nothing gets to its end"
        assert not self.engine.step()
        for request in self.requests:
            for branch in request.branches:
                self._check_output(request, branch)
            self._check_what_was_read(request)
        assert self.engine.num_requests == 0
        assert self.engine.scheduler.pool.num_free_blocks == self.limits.num_blocks
        assert self.engine.scheduler.num_queued_requests == self.engine.scheduler.num_queued_tokens == 0
        self._listen()
        self._check_snapshot()
        self._check_hashes()
        self._count()

    # ---- parts ----

    def _request(self, shape: Shape) -> Request:
        shared = self.prompts[-1 - shape.shares % min(6, len(self.prompts))][: shape.num_shared]
        prompt = (*shared, *shape.tail)
        self.prompts.append(prompt)
        salt = SALTS[shape.salt]
        request = Request(
            request_id=str(len(self.requests)),
            gateway_id=GATEWAYS[shape.gateway],
            model="model",
            prompt_token_ids=prompt,
            routing_hashes=pack_hashes(self.hasher.hash_blocks(prompt, salt)),
            sampling=SamplingParams(
                max_tokens=shape.max_tokens,
                seed=shape.seed,
                min_tokens=min(shape.min_tokens, shape.max_tokens),
                stop_token_ids=shape.stop_token_ids,
                beam_width=shape.beam_width,
                num_prompt_logprobs=shape.num_prompt_logprobs,
            ),
            priority=shape.priority,
            timeout_s=shape.timeout_s,
            cache_salt=salt,
            tenant=GATEWAYS[shape.salt % 2],
            use_prefix_cache=shape.use_prefix_cache,
            queue_timeout_s=shape.queue_timeout_s,
            pooling=shape.pooling,
            branches=tuple(Branch(index) for index in range(len(shape.outputs))),
        )
        branches = [self._branch(request, index, length) for index, length in enumerate(shape.outputs)]
        return replace(request, branches=tuple(branches))

    def _branch(self, request: Request, index: int, length: int) -> Branch:
        """A branch that had its first ``length`` tokens elsewhere, perhaps all of them."""
        return Branch(index, output_alone(request, index)[0][:length])

    def _abort(self, request: Request) -> None:
        """Of any request, ended or not: it holds nothing from then on."""
        self.engine.abort(request.request_id)
        self.engine.check()
        assert not self._is_under_way(request)

    def _abort_branch(self, request: Request, branch: int) -> None:
        """The others go on. A beam search has no branches before its end."""
        before = {b.index for b in request.branches if self._branch_is_under_way(request, b.index)}
        self.engine.abort(request.request_id, branch=branch)
        self.engine.check()
        after = {b.index for b in request.branches if self._branch_is_under_way(request, b.index)}
        assert after == (before if request.sampling.beam_width else before - {branch})

    def _branch_is_under_way(self, request: Request, branch: int) -> bool:
        return self.gateways.branches[request.request_id, branch].reason is None

    def _gateway_goes(self, gateway_id: str) -> None:
        self.engine.abort_gateway(gateway_id)
        gone = [request for request in self.requests if request.gateway_id == gateway_id]
        assert not any(self._is_under_way(request) for request in gone)

    def _step(self) -> None:
        self.clock[0] += 0.25
        self._note_beams()
        assert self.engine.step() or not self.engine.has_work, "work waits, and nothing was computed"
        self.engine.check()
        self._done("step")

    def _is_under_way(self, request: Request) -> bool:
        return any(self._branch_is_under_way(request, branch.index) for branch in request.branches)

    def _check_refusal(self, request: Request) -> None:
        """What can never fit, and only that, is refused at once."""
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        width, size = request.sampling.beam_width or 1, self.limits.block_size
        shared = len(request.prompt_token_ids) // size if width > 1 else 0
        fits = shared + width * (-(-total // size) - shared) <= self.limits.num_blocks
        fits = fits and total <= self.limits.max_model_len and width <= self.limits.max_num_seqs
        reasons = {self.gateways.branches[request.request_id, branch.index].reason for branch in request.branches}
        assert (reasons == {FinishReason.ERROR}) == (not fits)
        self.totals["refused"] += not fits

    def _check_output(self, request: Request, branch: Branch) -> None:
        received = self.gateways.branches[request.request_id, branch.index]
        output, reason = output_alone(request, branch.index)
        tokens = branch.output_token_ids + tuple(received.token_ids)
        if request.sampling.beam_width and received.reason is FinishReason.TIMEOUT:
            return  # the best of what there was need not be the beginning of the best of all
        assert tokens == output[: len(tokens)], (request, branch, received, output)
        assert received.reason is not None, "never ended"
        if received.reason in ENDED_BY_ITSELF:
            assert (tokens, received.reason) == (output, reason)
            self.totals["beam search"] += request.sampling.beam_width is not None

    def _check_what_was_read(self, request: Request) -> None:
        """Of the prompt: all of it, if anything of the request ended by itself."""
        branches = [self.gateways.branches[request.request_id, branch.index] for branch in request.branches]
        is_whole = any(branch.reason in ENDED_BY_ITSELF for branch in branches)
        prompt = request.prompt_token_ids
        written = list(digests(request.cache_salt, prompt))
        told = self.gateways.prompt_logprobs[request.request_id]
        begun_here = not any(branch.output_token_ids for branch in request.branches)
        wanted = request.sampling.num_prompt_logprobs is not None and begun_here
        expected = [score(digest, token) for digest, token in zip(written, prompt[1:], strict=False)] if wanted else []
        assert told == (expected if is_whole else expected[: len(told)]), request
        pooled = written[-1:] if request.pooling is Pooling.LAST else written
        mean = np.float32(sum(map(hidden, pooled)) / len(pooled))
        assert self.gateways.embeddings.get(request.request_id) == (mean if request.pooling and is_whole else None)
        self.totals["scored"] += bool(told)
        self.totals["pooled"] += request.pooling is not None and is_whole

    def _listen(self) -> None:
        events = self.engine.scheduler.drain_events()
        self.index.apply(events)
        self.totals["evicted"] += sum(
            len(event.hashes) // HASH_BYTES for event in events if isinstance(event, BlocksRemoved)
        )

    def _check_snapshot(self) -> None:
        snapshot = self.engine.scheduler.cache.snapshot()
        hashes = [value for event in snapshot for value in unpack_hashes(event.hashes).tolist()]
        assert len(hashes) == len(set(hashes))
        assert set(hashes) == self.index.hashes
        copy = NaiveIndex()
        copy.apply(snapshot)  # parents before children, without a hole
        self.totals["snapshots"] += 1

    def _note_beams(self) -> None:
        """Beams that will not be among the outputs are in the cache too; those that wait may be dropped at once."""
        for sequence in (sequence for live in self.engine._live.values() for sequence in live.sequences):
            if sequence.request.sampling.beam_width:
                tokens, salt = sequence.token_ids, sequence.request.cache_salt
                self.beam_hashes |= set(self.hasher.hash_blocks(tokens, salt).tolist())

    def _check_hashes(self) -> None:
        """What is told is the gateways' hash of the very tokens."""
        known = set[int]()
        for request in self.requests:
            for branch in request.branches:
                tokens = request.prompt_token_ids + output_alone(request, branch.index)[0]
                known |= set(self.hasher.hash_blocks(tokens, request.cache_salt).tolist())
        assert self.index.hashes <= known | self.beam_hashes, self.limits

    def _done(self, operation: str) -> None:
        self.totals["operations"] += 1
        self.totals[operation] += 1

    def _count(self) -> None:
        scheduler = self.engine.scheduler
        self.totals["preempted"] += scheduler.counters.num_preemptions
        self.totals["forked"] += scheduler.counters.num_forks
        self.totals["copied blocks"] += scheduler.counters.num_copied_blocks
        self.totals["waited for a prefix"] += scheduler.counters.num_prefix_waits
        self.totals["launched ahead"] += self.rank.num_launched_ahead
        self.totals["shared within a step"] += self.rank.num_shared_within_a_step
        self.totals["cached prompt tokens"] += scheduler.counters.num_cached_prompt_tokens
        for reason, count in self.engine.counters.finished.items():
            self.totals[reason.value] += count


def test_random_operations_neither_change_nor_lose_an_output() -> None:
    totals = RandomOperations.totals = Counter()
    run_state_machine_as_test(
        RandomOperations,
        settings=settings(max_examples=2 * settings().max_examples, stateful_step_count=120),
    )
    print(dict(totals))
    # What was not reached was not tested.
    reached = (
        *("preempted", "evicted", "cached prompt tokens", "shared within a step", "refused", "abort", "timeout"),
        *("forked", "copied blocks", "launched ahead", "abort a branch", "overloaded"),
        *("beam search", "reset cache", "submit again", "gateway gone", "scored", "pooled"),
    )
    assert all(totals[name] >= 10 for name in reached), totals
    assert totals["waited for a prefix"] >= 1  # rare among prompts this short; see test_prefix_wait.py
    assert all(totals[reason.value] >= 10 for reason in ENDED_BY_ITSELF), totals
    assert totals["operations"] >= 20_000  # usually 35,000 to 60,000
