"""All that the router knows of groups' blocks, against sets: whatever happens to messages, groups and memory.

The oracle applies the messages that arrive to a set of hashes for each group, and remembers what each group really held
after each of its messages.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.router.counters import Counters
from octavo.router.index import PrefixIndex
from octavo.router.knowledge import GroupKnowledge, KnowledgeState
from octavo.router.predictions import Predictions
from octavo.worker.messages import BlocksCleared, BlocksRemoved, BlocksStored, KVEvents
from octavo.worker.routing_hash import pack_hashes, unpack_hashes

NUM_GROUPS = 3
PART_BLOCKS = 60
TOO_SMALL_BYTES, LARGE_BYTES = 16_384, 1 << 22
PROMPTS = [tuple(np.random.default_rng(seed).integers(0, 2**64, 120, dtype=np.uint64).tolist()) for seed in range(5)]
# The last ones share their first blocks with the first: hashes are of prefixes, so what follows differs.
PROMPTS[3:] = [PROMPTS[0][:40] + PROMPTS[3][40:], PROMPTS[0][:90] + PROMPTS[4][90:]]
UP_TO = {value: frozenset(prompt[: place + 1]) for prompt in PROMPTS for place, value in enumerate(prompt)}
"""Hash → those of the prefixes that end there or before."""
groups = st.integers(0, NUM_GROUPS - 1)
prompts = st.sampled_from(PROMPTS)
depths = st.integers(0, 120)


class Source:
    """One generation of a group: its prefix-closed cache, its messages, and what it held after each of them."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.held: dict[int, int | None] = {}
        """Hash → that of the block before it; parents come before children."""
        self.history: list[frozenset[int]] = []
        self.on_the_way: list[KVEvents] = []

    def store(self, prompt: tuple[int, ...], depth: int) -> None:
        start = next((i for i, value in enumerate(prompt) if value not in self.held), len(prompt))
        new = prompt[start:depth]
        for place, value in enumerate(new, start=start):
            self.held[value] = prompt[place - 1] if place else None
        if new:
            self._tell(BlocksStored(self.held[new[0]], pack_hashes(new)))

    def evict(self, prompt: tuple[int, ...], depth: int) -> None:
        """The prompt's tail, and all that continues it."""
        tail = set(prompt[depth:])
        gone = [value for value in self.held if tail & UP_TO[value]]
        for value in gone:
            del self.held[value]
        if gone:
            self._tell(BlocksRemoved(pack_hashes(gone)))

    def clear(self) -> None:
        self.held.clear()
        self._tell(BlocksCleared())

    def tell_snapshot(self) -> None:
        blocks = list(self.held.items())
        parts = [blocks[first : first + PART_BLOCKS] for first in range(0, len(blocks), PART_BLOCKS)] or [[]]
        if not self.history:
            self._tell()
        for number, part in enumerate(parts):
            events = tuple(BlocksStored(parent, pack_hashes([value])) for value, parent in part)
            last = len(self.history) - 1
            self.on_the_way.append(KVEvents(self.generation, last, events, True, number, len(parts)))

    def _tell(self, *events: BlocksStored | BlocksRemoved | BlocksCleared) -> None:
        self.on_the_way.append(KVEvents(self.generation, len(self.history), events))
        self.history.append(frozenset(self.held))


class KnowledgeModel(RuleBasedStateMachine):
    @initialize(max_bytes=st.sampled_from([TOO_SMALL_BYTES, LARGE_BYTES]), seed=st.integers(0, 1 << 32))
    def start(self, max_bytes: int, seed: int) -> None:
        self.max_bytes = max_bytes
        self.rng = random.Random(seed)
        self.index, self.predictions = PrefixIndex(max_bytes), Predictions(timeout_s=50.0)
        self.counters = Counters()
        self.now = 0.0
        self.num_generations = self.num_requests = 0
        self.assumed: dict[str, tuple[int, set[int]]] = {}
        """Request → the group, and blocks."""
        self.made_at_s: dict[str, float] = {}
        self.sources: list[Source] = []
        self.known: list[set[int]] = []
        self.knowledge: list[GroupKnowledge] = []
        self.last_seen: list[int | None] = []
        for _ in range(NUM_GROUPS):
            self._new_generation()
        self.go_on(seed, 100)

    # What groups do

    @rule(group=groups, prompt=prompts, depth=depths)
    def store(self, group: int, prompt: tuple[int, ...], depth: int) -> None:
        self.sources[group].store(prompt, depth)

    @rule(group=groups, prompt=prompts, depth=depths)
    def evict(self, group: int, prompt: tuple[int, ...], depth: int) -> None:
        self.sources[group].evict(prompt, depth)

    @rule(group=groups)
    def clear(self, group: int) -> None:
        self.sources[group].clear()

    @rule(group=groups)
    def start_anew(self, group: int) -> None:
        """What the old generation still says comes after it is gone."""
        late = self.sources[group].on_the_way
        self._new_generation(group)
        self.sources[group].on_the_way += late

    # What becomes of messages

    @rule(group=groups, count=st.integers(1, 4))
    def deliver(self, group: int, count: int) -> None:
        waiting = self.sources[group].on_the_way
        for message in waiting[:count]:
            self._apply(group, message)
        del waiting[:count]

    @rule(group=groups)
    def deliver_twice(self, group: int) -> None:
        for message in self.sources[group].on_the_way[:1]:
            self._apply(group, message)

    @rule(group=groups, count=st.integers(1, 3))
    def lose(self, group: int, count: int) -> None:
        del self.sources[group].on_the_way[:count]

    @rule(group=groups)
    def reorder(self, group: int) -> None:
        self.rng.shuffle(self.sources[group].on_the_way)

    @rule(group=groups, fault=st.sampled_from(["length", "type", "parent", "number", "part"]))
    def deliver_damaged(self, group: int, fault: str) -> None:
        number = len(self.sources[group].history)
        message = KVEvents(self.sources[group].generation, number, (BlocksStored(None, pack_hashes([1, 2])),))
        damaged = {
            "length": {"events": (*message.events, BlocksRemoved(bytes(13)))},
            "type": {"events": (*message.events, BlocksRemoved((1, 2)))},  # type: ignore[arg-type]
            "parent": {"events": (*message.events, BlocksStored(1 << 64, bytes(8)))},
            "number": {"sequence_number": "1"},
            "part": {"is_snapshot": True, "part": 3, "num_parts": 3},
        }[fault]
        before = self.counters.event_messages_malformed
        self.knowledge[group].apply(dataclasses.replace(message, **damaged))  # type: ignore[arg-type]
        assert self.counters.event_messages_malformed == before + 1
        assert self.knowledge[group].state is not KnowledgeState.EXACT

    @rule(group=groups)
    def ask_for_a_snapshot(self, group: int) -> None:
        self.now += 1.0
        if self.knowledge[group].wants_snapshot(self.now):
            self.sources[group].tell_snapshot()

    # What the router does

    @rule(group=groups, prompt=prompts, depth=depths)
    def assume(self, group: int, prompt: tuple[int, ...], depth: int) -> None:
        self.num_requests += 1
        name, slot = str(self.num_requests), self.knowledge[group].slot
        hashes = np.array(prompt[:depth], np.uint64)
        confirmed = int(self.index.depths(hashes, 1 << slot)[slot])
        self.predictions.assume(name, slot, hashes[confirmed:], self.now)
        self.assumed[name] = (group, set(prompt[confirmed:depth]))
        self.made_at_s[name] = self.now

    @rule(place=st.integers(0, 99))
    def drop(self, place: int) -> None:
        names = [*self.assumed, "unknown"]
        name = names[place % len(names)]
        self.predictions.drop(name)
        self.assumed.pop(name, None)

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.predictions.expire(self.now)
        self.assumed = {name: it for name, it in self.assumed.items() if self.now - self.made_at_s[name] < 50.0}

    @rule(num_rows=st.integers(1, 600))
    def sweep(self, num_rows: int) -> None:
        self.index.sweep(num_rows)

    @rule(seed=st.integers(0, 1 << 32), count=st.integers(20, 80))
    def go_on(self, seed: int, count: int) -> None:
        """Much of all that, so that the groups fill and caches do not fit."""
        rng = random.Random(seed)
        for _ in range(count):
            group, prompt, depth = rng.randrange(NUM_GROUPS), rng.choice(PROMPTS), rng.randrange(121)
            actions = {
                functools.partial(self.store, group, prompt, depth): 8,
                functools.partial(self.evict, group, prompt, depth): 2,
                functools.partial(self.deliver, group, 3): 8,
                functools.partial(self.lose, group, 1): 2,
                functools.partial(self.ask_for_a_snapshot, group): 1,
                functools.partial(self.assume, group, prompt, depth): 3,
                functools.partial(self.drop, depth): 2,
                functools.partial(self.sweep, 200): 2,
                functools.partial(self.reorder, group): 0.3,
                functools.partial(self.start_anew, group): 0.2,
                functools.partial(self.clear, group): 0.1,
            }
            rng.choices(list(actions), list(actions.values()))[0]()

    # What must hold

    @invariant()
    def tables_are_sound(self) -> None:
        self.index.check()
        self.predictions.check()
        assert self.index.num_bytes <= self.max_bytes

    @invariant()
    def exact_means_exact(self) -> None:
        for source, known, knowledge, last in zip(
            self.sources, self.known, self.knowledge, self.last_seen, strict=True
        ):
            if knowledge.state is KnowledgeState.EXACT:
                assert last is not None
                assert known == source.history[last]

    @invariant()
    def depths_are_those_of_the_oracle(self) -> None:
        for prompt in PROMPTS:
            hashes = np.array(prompt, np.uint64)
            confirmed, both = self.index.depths(hashes), self.index.depths(hashes, None, self.predictions)
            for group, knowledge in enumerate(self.knowledge):
                known, slot = self.known[group], knowledge.slot
                assumed = set().union(*[held for owner, held in self.assumed.values() if owner == group])
                self._compare(prompt, int(confirmed[slot]), known)
                self._compare(prompt, int(both[slot]), known | assumed)

    def _compare(self, prompt: tuple[int, ...], depth: int, held: set[int]) -> None:
        kept = [place for place, value in enumerate(prompt) if value % self.index.stride == 0]
        is_held = [prompt[place] in held for place in kept]
        count = next((i for i, value in enumerate(is_held) if not value), len(kept))
        if any(is_held[count:]) and count:  # a hole
            assert prompt[depth - 1] in held
            assert depth - 1 in kept
        else:
            assert depth == (kept[count - 1] + 1 if count else 0)

    # The oracle

    def _new_generation(self, group: int | None = None) -> None:
        self.num_generations += 1
        source = Source(self.num_generations)
        knowledge = GroupKnowledge(source.generation, self.index, self.predictions, self.counters, 0.5)
        if group is None:
            group = len(self.sources)
        else:
            self.knowledge[group].dispose()
            self.assumed = {name: it for name, it in self.assumed.items() if it[0] != group}
        self.sources[group : group + 1] = [source]
        self.known[group : group + 1] = [set()]
        self.knowledge[group : group + 1] = [knowledge]
        self.last_seen[group : group + 1] = [None]

    def _apply(self, group: int, message: KVEvents) -> None:
        ignored = self.counters.event_messages_ignored
        self.knowledge[group].apply(message)
        last, number = self.last_seen[group], message.sequence_number
        is_late = last is not None and (number < last if message.is_snapshot else number <= last)
        is_void = message.generation != self.sources[group].generation
        assert self.counters.event_messages_ignored - ignored == (is_late or is_void)
        if is_late or is_void:
            return
        self.last_seen[group], known = number, self.known[group]
        if message.is_snapshot and message.part == 0:
            known.clear()
        for event in message.events:
            if isinstance(event, BlocksStored):
                known |= set(unpack_hashes(event.hashes).tolist())
            elif isinstance(event, BlocksRemoved):
                known -= set(unpack_hashes(event.hashes).tolist())
            else:
                known.clear()

    def teardown(self) -> None:
        """However it was: when messages arrive again, everything is known exactly."""
        for group in range(len(getattr(self, "sources", []))):
            source = self.sources[group]
            source.on_the_way.clear()
            source.store(PROMPTS[0], 5)
            source.clear()
            source.store(PROMPTS[1], 50)
            for _ in range(3):
                self.now += 1.0
                if self.knowledge[group].wants_snapshot(self.now):
                    source.tell_snapshot()
                self.deliver(group, 1000)
            assert self.knowledge[group].state is KnowledgeState.EXACT
            assert self.known[group] == set(source.held)
        if self.known:
            self.exact_means_exact()
            self.depths_are_those_of_the_oracle()


TestKnowledgeModel = KnowledgeModel.TestCase
TestKnowledgeModel.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
