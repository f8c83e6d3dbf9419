"""On CPUs sequences that share a prefix's blocks are attended to together; each gets what it would get alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.kernels.backend import cpu_kernels, reference_kernels
from octavo.kernels.cpu_attention_plan import MOST_TOGETHER, SEGMENT, AttentionPlanner
from octavo.kernels.cpu_program import BatchSizes

BLOCK = 16
MakeBatch = Callable[..., Any]


def share(batch: Any, num_blocks: dict[int, int]) -> Any:
    """Sequence → how many of its first blocks are sequence 0's."""
    tables = batch.block_tables.clone()
    for seq, count in num_blocks.items():
        tables[seq, :count] = tables[0, :count]
    return replace(batch, block_tables=tables)


def num_tasks(batch: Any, threads: int, num_kv_heads: int = 2, block_size: int = BLOCK) -> tuple[int, int]:
    """Entries and tasks of each KV head."""
    at = (tensor.data_ptr() for tensor in (batch.block_tables, batch.seq_lens, batch.query_start_loc))
    window = batch.sliding_window or 1 << 30
    longest = int(batch.query_start_loc.diff().max())
    sizes = BatchSizes(len(batch.query), *batch.seq_lens.shape, longest, 4000, batch.block_tables.shape[1])
    plan, _ = AttentionPlanner(*at, block_size, num_kv_heads, 3, 64, window).plan(sizes, threads)
    return plan.num_entries, plan.num_tasks


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_each_sequence_gets_what_it_gets_alone(
    batch_maker: MakeBatch, window: int | None, kv_dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    seqs = [
        (1100, 1),
        (1300, 1),
        (1030, 1),
        (1100, 3),
        (1100, 1),
        (600, 1),
        (1024, 40),
        (1023, 1),
        (1200, 3),
        (1030, 3),
    ]
    made = batch_maker(seqs, kv_dtype=kv_dtype, sliding_window=window, soft_cap=30.0)
    batch = share(made, {1: 64, 2: 64, 3: 64, 4: 33, 5: 32, 6: 64, 7: 64, 8: 64, 9: 64})
    kernels = cpu_kernels()
    num_entries, num_joined_tasks = num_tasks(batch, 1, num_kv_heads=8)
    assert num_joined_tasks < num_entries
    together = batch.attend(kernels)
    torch.testing.assert_close(together, batch.attend(reference_kernels()), atol=2e-5, rtol=0)
    for seq, (cached, new) in enumerate(seqs):
        rows = slice(int(batch.query_start_loc[seq]), int(batch.query_start_loc[seq + 1]))
        assert torch.equal(batch.pick(seq, rows, cached + new).attend(kernels), together[rows])


def test_whole_segments_of_the_same_blocks_are_joined(batch_maker: MakeBatch) -> None:
    """Two segments that four sequences share, one that a fifth has of them; not one that differs in its last block."""
    batch = share(batch_maker([(1100, 1)] * 6), {1: 64, 2: 64, 3: 64, 4: 32, 5: 31})
    assert num_tasks(batch, 1, num_kv_heads=8) == (18, 18 - 3 - 3 - 1)


def test_sequences_with_other_numbers_of_new_tokens_are_not_joined(batch_maker: MakeBatch) -> None:
    batch = share(batch_maker([(1100, 1), (1100, 2), (1100, 2)]), {1: 64, 2: 64})
    assert num_tasks(batch, 1, num_kv_heads=8) == (9, 7)


def test_a_task_is_bounded(batch_maker: MakeBatch) -> None:
    num_seqs = 2 * MOST_TOGETHER + 1
    batch = share(batch_maker([(SEGMENT, 1)] * num_seqs), dict.fromkeys(range(1, num_seqs), SEGMENT // BLOCK))
    assert num_tasks(batch, 1, num_kv_heads=8) == (2 * num_seqs, num_seqs + 3)


def test_there_is_work_for_every_thread(batch_maker: MakeBatch) -> None:
    """Eight tasks for each, of all heads together, if there are as many entries."""
    batch = share(batch_maker([(SEGMENT, 1)] * 16), dict.fromkeys(range(1, 16), SEGMENT // BLOCK))
    assert num_tasks(batch, 1) == (32, 17 + 1)
    assert num_tasks(batch, 4) == (32, 8 + 16)
    assert num_tasks(batch, 16) == (32, 32)


def test_blocks_that_do_not_divide_a_segment_are_not_joined(batch_maker: MakeBatch) -> None:
    batch = share(batch_maker([(1100, 1)] * 4, block_size=48), {1: 22, 2: 22, 3: 22})
    assert num_tasks(batch, 1, num_kv_heads=8, block_size=48) == (12, 12)


def test_with_a_window_segments_are_joined_by_their_place(batch_maker: MakeBatch) -> None:
    """The third is the first sequence's third and the others' second."""
    batch = share(batch_maker([(1600, 1), (1700, 1), (1710, 1)], sliding_window=1100), {1: 96, 2: 96})
    assert num_tasks(batch, 1, num_kv_heads=8) == (10, 8)
