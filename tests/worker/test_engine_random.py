"""The engine under random operations: whatever happens, every sequence sees its own K and V, and nothing is lost.

The fake rank keeps for every slot of every block what a model would have written there: a digest of the whole prefix,
made from the digest *that it reads* for the position before and the token. So a block that is shared wrongly, reused
too early, never written or written over changes what is read, and with it the next token.

A longer run: ``pytest tests/worker/test_engine_random.py --hypothesis-profile=long``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from octavo.worker.engine import Engine
from octavo.worker.messages import (
    BlocksRemoved,
    BlocksStored,
    Branch,
    FinishReason,
    Request,
    SamplingParams,
    SequenceUpdate,
)
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.sequence import Sequence
from octavo.worker.step_plan import StepPlan, pack_plan, unpack_plan

KEY = bytes(range(16))
VOCABULARY = 5
MAX_MODEL_LEN = 40
SALTS = (None, None, "salt")
GATEWAYS = ("one", "two")
ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


def digests(salt: str | None, token_ids: Iterator[int] | list[int]) -> Iterator[int]:
    """What a model writes for each token: it depends on all tokens before, and (here) on the salt."""
    digest = 0 if salt is None else 1 + len(salt)
    for token in token_ids:
        digest = hash((digest, token))
        yield digest


def draw(digest: int, row: SamplingRow) -> int:
    """The next token: a function of the visible prefix and of what the row says, as sampling is."""
    allowed = [token for token in range(VOCABULARY) if token not in row.banned_token_ids]
    return allowed[hash((digest, row.seed, row.branch, row.position)) % len(allowed)]


class FakeRank:
    """Carries out plans as a rank does: it knows nothing but what the plans say, and keeps its block tables."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.scheduler: Scheduler
        self._size = limits.block_size
        self._memory: list[list[int | None]] = [[None] * limits.block_size for _ in range(limits.num_blocks)]
        self._tables: list[dict[int, int]] = [{} for _ in range(limits.max_num_seqs)]
        self._last_step = 0
        self.num_shared_within_a_step = 0

    def execute(self, plan: StepPlan, rows: list[SamplingRow]) -> list[int]:
        plan = unpack_plan(pack_plan(plan))
        assert plan.step == self._last_step + 1
        self._last_step = plan.step
        self._update_tables(plan)
        last_digests = self._write(plan)
        self._check_what_is_read(plan)
        ends = [last_digests[index] for index in plan.logit_indices.tolist()]
        return [draw(digest, row) for digest, row in zip(ends, rows, strict=True)]

    def _update_tables(self, plan: StepPlan) -> None:
        blocks = iter(plan.table_blocks.tolist())
        for slot, first, count in plan.table_updates.tolist():
            for logical in range(first, first + count):
                self._tables[slot][logical] = next(blocks)
        assert next(blocks, None) is None

    def _write(self, plan: StepPlan) -> list[int]:
        """The digest of each of the step's tokens, in the plan's order."""
        tokens, written, result = iter(plan.token_ids.tolist()), set(), []
        for slot, start, count in zip(
            plan.slots.tolist(), plan.num_computed_tokens.tolist(), plan.num_new_tokens.tolist(), strict=True
        ):
            self.num_shared_within_a_step += start > 0 and self._place(slot, start - 1) in written
            for position in range(start, start + count):
                place = self._place(slot, position)
                assert place not in written, "two tokens of a step are written to one place"
                written.add(place)
                before = self._root(slot) if position == 0 else self._read(slot, position - 1)
                self._memory[place[0]][place[1]] = digest = hash((before, next(tokens)))
                result.append(digest)
        return result

    def _check_what_is_read(self, plan: StepPlan) -> None:
        """After all writes of the step: every position of every sequence reads back that sequence's own K and V."""
        ends = (plan.num_computed_tokens + plan.num_new_tokens).tolist()
        for slot, end in zip(plan.slots.tolist(), ends, strict=True):
            sequence = self._sequence(slot)
            expected = digests(sequence.request.cache_salt, sequence.token_ids[:end].tolist())
            assert [self._read(slot, position) for position in range(end)] == list(expected)

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        return self._tables[slot][position // self._size], position % self._size

    def _read(self, slot: int, position: int) -> int:
        block, offset = self._place(slot, position)
        digest = self._memory[block][offset]
        assert digest is not None, "read before anything was written"
        return digest

    def _root(self, slot: int) -> int:
        salt = self._sequence(slot).request.cache_salt
        return 0 if salt is None else 1 + len(salt)

    def _sequence(self, slot: int) -> Sequence:
        return next(sequence for sequence in self.scheduler.running if sequence.slot == slot)


@dataclass
class Received:
    """What a gateway has got of one branch."""

    base: int
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def take(self, update: SequenceUpdate) -> None:
        assert self.reason is None, "an update after the end"
        assert update.position == self.base + len(self.token_ids), "a gap or a repeat"
        assert update.token_ids or update.finish_reason
        self.token_ids.extend(update.token_ids)
        self.reason = update.finish_reason


class Gateways:
    """All gateways in one: takes updates and knows which branches there are."""

    def __init__(self) -> None:
        self.branches: dict[tuple[str, int], Received] = {}
        self.gateway_of: dict[str, str] = {}

    def expect(self, request: Request) -> None:
        self.gateway_of[request.request_id] = request.gateway_id
        for branch in request.branches:
            self.branches[request.request_id, branch.index] = Received(len(branch.output_token_ids))

    def emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        assert self.gateway_of[update.request_id] == gateway_id
        self.branches[update.request_id, update.branch].take(update)


def make_engine(
    limits: SchedulerLimits, gateways: Gateways, clock: list[float], rank: FakeRank | None = None
) -> Engine:
    rank = rank or FakeRank(limits)
    scheduler = rank.scheduler = Scheduler(limits, RoutingHasher(KEY, limits.block_size))
    return Engine(scheduler, rank, clock=lambda: clock[0], emit=gateways.emit)


def output_alone(request: Request, branch: int) -> tuple[tuple[int, ...], FinishReason]:
    """The output of one branch from its beginning, alone, with all the memory there may be and nothing cached."""
    return _output_of(replace(request, request_id="alone", branches=(Branch(branch),), timeout_s=None, priority=0))


@lru_cache(maxsize=4_096)
def _output_of(request: Request) -> tuple[tuple[int, ...], FinishReason]:
    limits = SchedulerLimits(64, 4, 1, 256, 256, enable_prefix_caching=False)
    gateways = Gateways()
    gateways.expect(request)
    engine = make_engine(limits, gateways, [0.0])
    engine.submit(request)
    while engine.step():
        pass
    (received,) = gateways.branches.values()
    assert received.reason is not None
    return tuple(received.token_ids), received.reason


class NaiveIndex:
    """What a router knows of the group from its events alone."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()

    def apply(self, events: tuple[BlocksStored | BlocksRemoved, ...]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                assert event.parent_hash is None or event.parent_hash in self.hashes, "stored behind a hole"
                assert not self.hashes & set(event.hashes), "stored twice"
                self.hashes |= set(event.hashes)
            else:
                assert set(event.hashes) <= self.hashes, "removed, but not there"
                self.hashes -= set(event.hashes)


@dataclass(frozen=True)
class Shape:
    """A random request, apart from what it has in common with others."""

    tail: list[int]
    shares: int
    """Which earlier prompt it begins like."""
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


def random_shape(seed: int) -> Shape:
    """One number for hypothesis to draw and to shrink: a number for each field costs it more than all the rest."""
    rng = Random(seed)
    return Shape(
        tail=rng.choices(range(VOCABULARY), k=rng.randint(1, 9)),
        shares=rng.randrange(100),
        num_shared=rng.randint(0, 20),
        salt=rng.randrange(len(SALTS)),
        priority=rng.randrange(3),
        max_tokens=40 if rng.random() < 0.08 else rng.randint(1, 12),
        min_tokens=rng.randint(0, 4),
        stop_token_ids=rng.choice([(), (), (3,), (1, 4)]),
        seed=rng.randrange(3),
        timeout_s=rng.choice([None, None, None, None, 3.0, 12.0]),
        gateway=rng.randrange(len(GATEWAYS)),
        outputs=rng.choice([(0,), (0,), (0,), (0, 0), (2,), (1, 5), (12, 0), (12,)]),
    )


SHAPES = st.integers(0, 2**32 - 1).map(random_shape)


def small_limits(capacity: int, block_size: int, max_num_seqs: int, budget: int, caching: bool) -> SchedulerLimits:
    return SchedulerLimits(-(-capacity // block_size), block_size, max_num_seqs, budget, MAX_MODEL_LEN, caching)


LIMITS = st.builds(
    small_limits,
    capacity=st.integers(20, 48),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 8),
    budget=st.sampled_from([2, 6, 16, 64]),
    caching=st.sampled_from([True, True, True, False]),
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

    @initialize(limits=LIMITS)
    def start(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.hasher = RoutingHasher(KEY, limits.block_size)
        self.rank = FakeRank(limits)
        self.engine = make_engine(limits, self.gateways, self.clock, self.rank)

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

    @rule(which=st.integers(0, 99), what=st.sampled_from(["abort"] * 5 + ["submit again"] * 3 + ["gateway gone"]))
    @precondition(lambda self: self.requests)
    def interrupt(self, which: int, what: str) -> None:
        request = self.requests[-1 - which % min(12, len(self.requests))]
        if what == "abort":
            self._abort(request)
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
        while self.engine.has_work:
            self._step()
        assert not self.engine.step()
        for request in self.requests:
            for branch in request.branches:
                self._check_output(request, branch)
        assert self.engine.num_requests == 0
        assert self.engine.scheduler.pool.num_free_blocks == self.limits.num_blocks
        self._listen()
        self._check_snapshot()
        self._check_hashes()
        self._count()

    # ---- parts ----

    def _request(self, shape: Shape) -> Request:
        shared = self.prompts[shape.shares % len(self.prompts)][: shape.num_shared]
        prompt = (*shared, *shape.tail)
        self.prompts.append(prompt)
        salt = SALTS[shape.salt]
        request = Request(
            request_id=str(len(self.requests)),
            gateway_id=GATEWAYS[shape.gateway],
            model="model",
            prompt_token_ids=prompt,
            routing_hashes=tuple(self.hasher.hash_blocks(prompt, salt).tolist()),
            sampling=SamplingParams(
                max_tokens=shape.max_tokens,
                seed=shape.seed,
                min_tokens=min(shape.min_tokens, shape.max_tokens),
                stop_token_ids=shape.stop_token_ids,
            ),
            priority=shape.priority,
            timeout_s=shape.timeout_s,
            cache_salt=salt,
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

    def _gateway_goes(self, gateway_id: str) -> None:
        self.engine.abort_gateway(gateway_id)
        gone = [request for request in self.requests if request.gateway_id == gateway_id]
        assert not any(self._is_under_way(request) for request in gone)

    def _step(self) -> None:
        self.clock[0] += 0.25
        assert self.engine.step() or not self.engine.has_work, "work waits, and nothing was computed"
        self.engine.check()
        self._done("step")

    def _is_under_way(self, request: Request) -> bool:
        return any(
            self.gateways.branches[request.request_id, branch.index].reason is None for branch in request.branches
        )

    def _check_refusal(self, request: Request) -> None:
        """What can never fit, and only that, is refused at once."""
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        capacity = min(self.limits.max_model_len, self.limits.num_blocks * self.limits.block_size)
        reasons = {self.gateways.branches[request.request_id, branch.index].reason for branch in request.branches}
        assert (reasons == {FinishReason.ERROR}) == (total > capacity)
        self.totals["refused"] += total > capacity

    def _check_output(self, request: Request, branch: Branch) -> None:
        received = self.gateways.branches[request.request_id, branch.index]
        output, reason = output_alone(request, branch.index)
        tokens = branch.output_token_ids + tuple(received.token_ids)
        assert tokens == output[: len(tokens)]
        assert received.reason is not None, "never ended"
        if received.reason in ENDED_BY_ITSELF:
            assert (tokens, received.reason) == (output, reason)

    def _listen(self) -> None:
        events = self.engine.scheduler.drain_events()
        self.index.apply(events)
        self.totals["evicted"] += sum(len(event.hashes) for event in events if isinstance(event, BlocksRemoved))

    def _check_snapshot(self) -> None:
        snapshot = self.engine.scheduler.cache.snapshot()
        hashes = [value for event in snapshot for value in event.hashes]
        assert len(hashes) == len(set(hashes))
        assert set(hashes) == self.index.hashes
        copy = NaiveIndex()
        copy.apply(snapshot)  # parents before children, without a hole
        self.totals["snapshots"] += 1

    def _check_hashes(self) -> None:
        """What is told is the gateways' hash of the very tokens."""
        known = set[int]()
        for request in self.requests:
            for branch in request.branches:
                tokens = request.prompt_token_ids + output_alone(request, branch.index)[0]
                known |= set(self.hasher.hash_blocks(tokens, request.cache_salt).tolist())
        assert self.index.hashes <= known

    def _done(self, operation: str) -> None:
        self.totals["operations"] += 1
        self.totals[operation] += 1

    def _count(self) -> None:
        scheduler = self.engine.scheduler
        self.totals["preempted"] += scheduler.counters.num_preemptions
        self.totals["shared within a step"] += self.rank.num_shared_within_a_step
        self.totals["cached prompt tokens"] += scheduler.counters.num_cached_prompt_tokens
        for reason, count in self.engine.counters.finished.items():
            self.totals[reason.value] += count


def test_random_operations_neither_change_nor_lose_an_output() -> None:
    totals = RandomOperations.totals = Counter()
    run_state_machine_as_test(
        RandomOperations,
        settings=settings(max_examples=3 * settings().max_examples // 2, stateful_step_count=120),
    )
    print(dict(totals))
    # What was not reached was not tested.
    reached = ("preempted", "evicted", "cached prompt tokens", "shared within a step", "refused", "abort", "timeout")
    assert all(totals[name] >= 10 for name in reached), totals
    assert all(totals[reason.value] >= 10 for reason in ENDED_BY_ITSELF), totals
    assert totals["operations"] >= 15_000  # usually 25,000 to 45,000
