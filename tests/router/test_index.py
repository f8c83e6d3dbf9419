"""The prefix index against a dictionary of sets."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from octavo.router.index import BYTES_PER_ENTRY, PrefixIndex, find_staircase, slots_in

PROMPTS = [tuple(np.random.default_rng(seed).integers(0, 2**64, 12, dtype=np.uint64).tolist()) for seed in range(7)]
# The last ones share their first blocks with the first: hashes are of prefixes, so what follows differs.
PROMPTS[5:] = [PROMPTS[0][:5] + PROMPTS[5][5:], PROMPTS[0][:9] + PROMPTS[6][9:]]
prompts = st.sampled_from(PROMPTS)
depths = st.integers(0, 12)


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
        self.index.stored(slot, prompt[:depth])
        self.held[slot] |= set(prompt[:depth])

    @rule(slot=slots, prompt=prompts, depth=depths)
    def remove_tail(self, slot: int, prompt: tuple[int, ...], depth: int) -> None:
        """Every block behind the depth goes, with everything that continues it: what is held stays prefix-closed."""
        gone = {
            value for other in PROMPTS for i, value in enumerate(other) if set(other[: i + 1]) & set(prompt[depth:])
        }
        self.index.removed(slot, tuple(gone))
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

    @rule(budget=st.integers(1, 400))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @invariant()
    def matches_agree(self) -> None:
        self.index.check()
        for prompt in PROMPTS:
            expected = {slot: _depth(prompt, held) for slot, held in self.held.items() if _depth(prompt, held)}
            staircase = self.index.match(prompt)
            assert {slot: depth for depth, mask in staircase for slot in slots_in(mask)} == expected
            assert staircase == sorted(staircase, reverse=True)

    def teardown(self) -> None:
        while not self.index.sweep(1000):
            pass
        self.index.check()
        assert self.index.num_entries == len(set().union(*self.held.values()))
        for slot, held in self.held.items():
            assert all(self.index.may_hold(slot, value) for value in held)


TestIndexModel = IndexModel.TestCase
TestIndexModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def _depth(prompt: tuple[int, ...], held: set[int]) -> int:
    return next((depth for depth, value in enumerate(prompt) if value not in held), len(prompt))


@given(st.lists(st.integers(0, 255), max_size=40), st.integers(0, 255))
def test_holes_never_break_the_staircase(masks: list[int], among: int) -> None:
    """With holes, a slot's depth is one at which it holds the block, and slots that lack the first block have none."""
    steps = find_staircase(lambda position: masks[position], range(len(masks)), among)
    seen = 0
    for depth, mask in steps:
        assert mask
        assert mask & masks[depth - 1] & among & masks[0] == mask
        assert not mask & seen
        seen |= mask
    assert seen == (masks[0] & among if masks else 0)


def test_the_size_stays_in_its_bound_by_a_coarser_stride() -> None:
    index = PrefixIndex(2000 * BYTES_PER_ENTRY)
    rng = random.Random(0)
    slot = index.add_slot()
    for _ in range(200):
        index.stored(slot, [rng.getrandbits(64) for _ in range(100)])
        assert index.num_entries <= 2000 + 256
    index.check()
    assert index.stride >= 8


def test_with_a_stride_depths_are_rounded_down_and_never_wrong() -> None:
    index = PrefixIndex(500 * BYTES_PER_ENTRY)
    rng = random.Random(1)
    prompt = [rng.getrandbits(64) for _ in range(100)]
    slot, other = index.add_slot(), index.add_slot()
    index.stored(slot, prompt[:80])
    index.stored(other, [rng.getrandbits(64) for _ in range(1000)])
    assert index.stride > 1
    kept = [depth for depth, value in enumerate(prompt[:80], start=1) if value % index.stride == 0]
    assert index.match(prompt, 1 << slot) == [(kept[-1], 1 << slot)]


def test_a_slot_is_reused_only_after_its_sweep() -> None:
    index = PrefixIndex(1 << 20)
    slot = index.add_slot()
    index.stored(slot, PROMPTS[0])
    index.remove_slot(slot)
    assert index.match(PROMPTS[0]) == []
    assert index.add_slot() != slot
    while not index.sweep(1000):
        pass
    assert index.num_entries == 0
    assert index.add_slot() == slot


def test_empty_prompts_match_nothing() -> None:
    index = PrefixIndex(1 << 20)
    index.stored(index.add_slot(), PROMPTS[0])
    assert index.match(()) == []
    assert index.match((5,)) == []
