"""The picture of a block pool: its size is bounded, and it says what is so. ``test_block_pool.py`` holds every state of
every block against a model."""

from __future__ import annotations

from collections import Counter

from engine_bench import EngineBench, request
from hypothesis import given
from hypothesis import strategies as st
from page_runs import expand

from octavo.worker.block_pool import BlockStates
from octavo.worker.pool_state import (
    MOST_PAGES,
    MOST_SEQUENCES,
    MOST_TABLE_BLOCKS,
    STATES,
    PoolCopy,
    PoolState,
    SequencePages,
    copy_pool,
    pool_state,
)
from octavo.worker.scheduler import SchedulerLimits

BLOCK_STATES = st.sampled_from(STATES)


def states_of(letters: str) -> BlockStates:
    counts = [{"s": 2, "w": 1}.get(letter, 0) for letter in letters]
    findable = bytes(letter == "c" for letter in letters)
    return BlockStates(counts, findable, [block for block, letter in enumerate(letters) if letter == "x"])


def picture(letters: str, most_pages: int = MOST_PAGES) -> PoolState:
    return pool_state(PoolCopy(states_of(letters), 16, 0, 0, 8, ()), most_pages)


def look(bench: EngineBench) -> PoolState:
    return pool_state(copy_pool(bench.engine))


@given(st.text(BLOCK_STATES, min_size=1, max_size=300), st.integers(1, 40))
def test_a_page_of_several_blocks_is_what_most_of_them_are(letters: str, most_pages: int) -> None:
    state = picture(letters, most_pages)
    each, pages = state.blocks_per_page, expand(state.pages)
    assert len(pages) == -(-len(letters) // each) <= most_pages
    for page, letter in enumerate(pages):
        within = Counter(letters[page * each : (page + 1) * each])
        assert within[letter] == max(within.values())
    assert state.num_blocks_by_state == {letter: letters.count(letter) for letter in STATES}


def test_of_equally_many_the_liveliest_is_shown() -> None:
    assert picture("fcws", 2).pages == "1c1s"


def test_the_picture_of_a_large_pool_is_as_small_as_that_of_a_small_one() -> None:
    state = picture("fwcs" * 50_000)
    assert len(expand(state.pages)) <= MOST_PAGES
    assert state.num_blocks == 200_000


def test_it_says_where_the_blocks_of_running_sequences_are() -> None:
    bench = EngineBench()
    bench.submit(request("a", prompt=range(10, 20), max_tokens=9))
    bench.step()
    state = look(bench)
    assert (state.num_running, state.num_waiting, state.block_size, state.max_num_seqs) == (1, 0, 4, 8)
    assert state.sequences == (SequencePages("a", 0, 10, 0, 10, 11, 3, ((0, 3),)),)
    assert expand(state.pages)[:4] == "wwwf"


def test_what_two_sequences_have_in_common_is_shared() -> None:
    bench = EngineBench()
    for name in "ab":
        bench.submit(request(name, prompt=range(10, 20), max_tokens=9))
        bench.step()
    state = look(bench)
    assert state.num_blocks_by_state["s"] == 2
    (_, other) = state.sequences
    assert (other.num_cached_tokens, other.table) == (8, ((0, 2), (3, 1)))


def test_what_has_ended_stays_cached() -> None:
    bench = EngineBench()
    bench.submit(request(prompt=range(10, 20)))
    bench.run()
    state = look(bench)
    assert state.sequences == ()
    assert state.num_blocks_by_state == {"s": 0, "w": 0, "c": 3, "x": 0, "f": 29}


def test_a_few_sequences_are_shown_and_the_beginning_of_their_tables() -> None:
    many = MOST_SEQUENCES + 3
    bench = EngineBench(num_blocks=4 * MOST_TABLE_BLOCKS, max_num_seqs=many, budget=4096)
    long = MOST_TABLE_BLOCKS + 10
    bench.scheduler.limits = SchedulerLimits(4 * MOST_TABLE_BLOCKS, 4, many, 4096, max_model_len=4096)
    bench.submit(request("long", prompt=range(4 * long), max_tokens=9))
    for number in range(many - 1):
        bench.submit(request(str(number), prompt=range(number + 10, number + 20), max_tokens=9))
    bench.step()
    state = look(bench)
    assert state.num_running == many
    assert len(state.sequences) == MOST_SEQUENCES
    assert sum(length for _, length in state.sequences[0].table) == MOST_TABLE_BLOCKS
    assert state.sequences[0].num_blocks == long
