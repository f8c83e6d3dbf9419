"""The prefix index against a dictionary of sets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from octavo.router.block_table import BlockTable
from octavo.router.index import PrefixIndex
from octavo.worker.routing_hash import HashArray, RoutingHasher

PROMPTS = [tuple(np.random.default_rng(seed).integers(0, 2**64, 12, dtype=np.uint64).tolist()) for seed in range(7)]
# The last ones share their first blocks with the first: hashes are of prefixes, so what follows differs.
PROMPTS[5:] = [PROMPTS[0][:5] + PROMPTS[5][5:], PROMPTS[0][:9] + PROMPTS[6][9:]]
prompts = st.sampled_from(PROMPTS)
depths = st.integers(0, 12)


def array(values: Iterable[int]) -> HashArray:
    return np.array(list(values), np.uint64)


def random_hashes(seed: int, count: int) -> HashArray:
    """None of a prompt's: to remove some of its blocks and keep what continues them is nothing that groups do."""
    return np.random.default_rng(1_000 + seed).integers(0, 2**64, count, dtype=np.uint64)


class IndexModel(RuleBasedStateMachine):
    """Groups hold prefixes; the index must say exactly how deep each holds each prompt."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1 << 20)
        self.held: dict[int, set[int]] = {}

    @rule(target=slots)
    def add(self) -> int:
        slot = self.index.add_slot()
        assert slot not in self.held
        self.held[slot] = set()
        return slot

    @rule(slot=slots, prompt=prompts, depth=depths)
    def store(self, slot: int, prompt: tuple[int, ...], depth: int) -> None:
        self.index.stored(slot, array(prompt[:depth]))
        self.held[slot] |= set(prompt[:depth])

    @rule(slot=slots, seed=st.integers(0, 3), count=st.integers(1, 400))
    def store_so_much_that_it_grows(self, slot: int, seed: int, count: int) -> None:
        hashes = random_hashes(seed, count)
        self.index.stored(slot, hashes)
        self.held[slot] |= set(hashes.tolist())

    @rule(slot=slots, seed=st.integers(0, 3), first=st.integers(0, 400))
    def remove_much(self, slot: int, seed: int, first: int) -> None:
        hashes = random_hashes(seed, 400)[first:]
        self.index.removed(slot, hashes)
        self.held[slot] -= set(hashes.tolist())

    @rule(slot=slots, prompt=prompts, depth=depths)
    def remove_tail(self, slot: int, prompt: tuple[int, ...], depth: int) -> None:
        """Every block behind the depth goes, with everything that continues it: what is held stays prefix-closed."""
        gone = {
            value for other in PROMPTS for i, value in enumerate(other) if set(other[: i + 1]) & set(prompt[depth:])
        }
        self.index.removed(slot, array(gone))
        self.held[slot] -= gone

    @rule(slot=consumes(slots))
    def remove_slot(self, slot: int) -> None:
        self.index.remove_slot(slot)
        del self.held[slot]

    @rule(target=slots, slot=consumes(slots))
    def clear_slot(self, slot: int) -> int:
        del self.held[slot]
        new = self.index.clear_slot(slot)
        assert new not in self.held
        self.held[new] = set()
        return new

    @rule(budget=st.integers(1, 1000))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @invariant()
    def matches_agree(self) -> None:
        self.index.check()
        for prompt in PROMPTS:
            expected = {slot: _depth(prompt, held) for slot, held in self.held.items() if _depth(prompt, held)}
            staircase = self.index.match(array(prompt))
            assert {slot: depth for depth, mask in staircase for slot in slots_in(mask)} == expected
            assert staircase == sorted(staircase, reverse=True)

    def teardown(self) -> None:
        while not self.index.sweep(1000):
            pass
        self.index.check()
        rows = {(value, slot // 48) for slot, held in self.held.items() for value in held}
        assert self.index.num_entries == len(rows)
        for slot, held in self.held.items():
            assert all(self.index.may_hold(slot, value) for value in held)


TestIndexModel = IndexModel.TestCase
TestIndexModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def _depth(prompt: tuple[int, ...], held: set[int]) -> int:
    return next((depth for depth, value in enumerate(prompt) if value not in held), len(prompt))


@given(st.lists(st.sets(st.integers(0, 100)), max_size=30), st.sets(st.integers(0, 100)))
def test_holes_never_break_the_staircase(holders: list[set[int]], among: set[int]) -> None:
    """With holes, a slot's depth is one at which it holds the block, and slots that lack the first block have none."""
    index = PrefixIndex(1 << 20)
    slots = [index.add_slot() for _ in range(101)]
    for value, holding in enumerate(holders):
        for slot in holding:
            index.stored(slot, array([value]))
    seen: set[int] = set()
    for depth, mask in index.match(array(range(len(holders))), sum(1 << slot for slot in among)):
        found = set(slots_in(mask))
        assert found
        assert found <= holders[depth - 1] & among & holders[0]
        assert not found & seen
        seen |= found
    assert seen == (holders[0] & among if holders else set())
    assert slots == list(range(101))


class BoundModel(RuleBasedStateMachine):
    """Whatever is stored: the memory stays in its bound, and what the stride keeps is known exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.max_bytes = 60_000
        self.index = PrefixIndex(self.max_bytes)
        self.held: dict[int, HashArray] = {}
        self.count = 0

    @rule(count=st.integers(1, 3000), repeats=st.booleans())
    def store(self, count: int, repeats: bool) -> None:
        slot = self.index.add_slot()
        self.count += not repeats
        hashes = random_hashes(self.count, count)
        self.index.stored(slot, hashes)
        self.held[slot] = hashes

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.held:
            slot = data.draw(st.sampled_from(sorted(self.held)))
            self.index.remove_slot(slot)
            del self.held[slot]

    @rule(budget=st.integers(1, 5000))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @invariant()
    def memory_is_in_its_bound(self) -> None:
        assert self.index.num_bytes <= self.max_bytes
        table = self.index._table
        assert self.index.num_bytes == table.rows.nbytes + table.old.nbytes
        for slot, held in self.held.items():
            kept = np.sort(held[held % np.uint64(self.index.stride) == 0])
            assert self.index.depths(kept, 1 << slot)[slot] == len(kept)

    def teardown(self) -> None:
        self.index.check()


TestBoundModel = BoundModel.TestCase
TestBoundModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_over_its_bound_it_takes_a_coarser_stride() -> None:
    index = PrefixIndex(60_000)
    slot = index.add_slot()
    for seed in range(200):
        index.stored(slot, random_hashes(seed, 100))
        assert index.num_bytes <= 60_000
    index.check()
    assert 8 <= index.stride <= 64
    assert index.num_entries >= 300


def test_with_a_stride_depths_are_rounded_down_and_never_wrong() -> None:
    index = PrefixIndex(40_000)
    prompt = random_hashes(1, 100)
    slot, other = index.add_slot(), index.add_slot()
    index.stored(slot, prompt[:80])
    index.stored(other, random_hashes(2, 3000))
    assert index.stride > 1
    kept = [depth for depth, value in enumerate(prompt[:80].tolist(), start=1) if value % index.stride == 0]
    assert index.match(prompt, 1 << slot) == [(kept[-1], 1 << slot)]


def test_what_is_not_needed_any_more_is_given_back() -> None:
    index = PrefixIndex(1 << 40)
    slot = index.add_slot()
    index.stored(slot, random_hashes(1, 50_000))
    most = index.num_bytes
    index.remove_slot(slot)
    while not index.sweep(4096):
        pass
    index.sweep(4096)
    while not index.sweep(4096):
        pass
    assert index.num_bytes < most / 20


def test_a_slot_is_reused_only_after_its_sweep() -> None:
    index = PrefixIndex(1 << 20)
    slot = index.add_slot()
    index.stored(slot, array(PROMPTS[0]))
    index.remove_slot(slot)
    assert index.match(array(PROMPTS[0])) == []
    assert index.add_slot() != slot
    while not index.sweep(1000):
        pass
    assert index.num_entries == 0
    assert index.add_slot() == slot


def test_a_call_goes_over_a_bounded_number_of_rows() -> None:
    """A pass over all rows takes many calls, whether it is for a growth or for a group that is gone."""
    table = BlockTable()
    passes = []
    for seed in range(600):
        table.store(random_hashes(seed, 100), 0, 1)
        if len(table.old):
            passes.append(table.num_begun)
    assert max(passes) >= 5
    assert passes.count(max(passes)) >= len(table.rows) / 1.5 / (8 * 100) - 1


def test_hashes_that_are_small_numbers_are_as_good_as_any() -> None:
    """0 is one of them."""
    index = PrefixIndex(1 << 22)
    slots = [index.add_slot() for _ in range(50)]
    index.stored(slots[0], array(range(20_000)))
    index.stored(slots[49], array(range(100)))
    assert index.match(array(range(30_000))) == [(20_000, 1), (100, 1 << 49)]
    index.removed(slots[0], array([0]))
    assert not index.may_hold(slots[0], 0)
    assert index.match(array(range(100))) == [(100, 1 << 49)]
    index.check()


tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30)
salts = st.none() | st.sampled_from(["", "\ud800", "none", "salt", "\0"]) | st.text(max_size=5)


@given(tokens, tokens, salts, salts)
def test_prompts_match_as_far_as_tokens_and_salt_are_the_same(
    held: list[int], asked: list[int], salt: str | None, other: str | None
) -> None:
    """Whatever the tokens and salts are."""
    hasher, index = RoutingHasher(bytes(16), 3), PrefixIndex(1 << 20)
    index.stored(index.add_slot(), hasher.hash_blocks(held, salt))
    asked = held[: len(asked)] + asked
    common = next((i for i, (a, b) in enumerate(zip(held, asked, strict=False)) if a != b), min(len(held), len(asked)))
    expected = [(common // 3, 1)] if common >= 3 else []
    assert index.match(hasher.hash_blocks(asked, salt)) == expected
    assert index.match(hasher.hash_blocks(asked, other)) == (expected if salt == other else [])


def test_empty_prompts_match_nothing() -> None:
    index = PrefixIndex(1 << 20)
    index.stored(index.add_slot(), array(PROMPTS[0]))
    assert index.match(array(())) == []
    assert index.match(array((5,))) == []


def test_more_groups_than_there_are_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.router.index._MAX_SLOTS", 3)
    index = PrefixIndex(1 << 20)
    slots = [index.add_slot() for _ in range(3)]
    with pytest.raises(RuntimeError, match="has 3 slots"):
        index.add_slot()
    index.remove_slot(slots[1])
    assert index.add_slot() == 1


def slots_in(mask: int) -> list[int]:
    """The slots of a mask, lowest first."""
    slots = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return slots
