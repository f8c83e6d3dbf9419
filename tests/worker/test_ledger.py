"""The ledger's sums, from numbers as NVML, CUDA and the machine would give them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.ledger import CPU_SHARE, CpuMemory, Entries, GpuMemory, Ledger, cpu_entries, gpu_entries, left_of

GIB = 1 << 30
H200 = GpuMemory(total=140 * GIB, used=17 * GIB, allocator=15 * GIB, weights=15 * GIB, step_peak=3 * GIB)
MACHINE = CpuMemory(total=32 * GIB, available=24 * GIB, own=2 * GIB, weights=1 * GIB, step_peak=4 * GIB)

amounts = st.integers(0, 1 << 40)


def a_ledger(entries: Entries = (("memory of the GPU", 100 * GIB),), **fields: object) -> Ledger:
    ledger = Ledger("cuda:0, H200", entries, 64 * GIB, GIB // 64, 16, max_model_len=8192, num_blocks=64 * 64)
    return replace(ledger, **fields)  # type: ignore[arg-type]


def test_a_gpu_is_filled_up_to_its_utilization_with_what_others_and_the_model_leave() -> None:
    entries = gpu_entries(H200, 0.9)
    assert left_of(entries) == pytest.approx((140 * 0.9 - 2 - 15 - 3) * GIB, rel=1e-9)
    assert dict(entries)["others' use and CUDA context (NVML)"] == -2 * GIB


def test_a_gpu_that_others_fill_leaves_nothing() -> None:
    assert left_of(gpu_entries(replace(H200, used=140 * GIB), 0.9)) == 0


@given(amounts, amounts, amounts, amounts, st.floats(0.01, 1.0))
def test_what_a_gpu_leaves_never_passes_its_utilization(
    total: int, others: int, weights: int, peak: int, utilization: float
) -> None:
    memory = GpuMemory(total, others + weights, weights, weights, peak)
    assert 0 <= left_of(gpu_entries(memory, utilization)) <= max(0, total * utilization - others - weights - peak)


def test_the_ranks_of_a_machine_share_a_quarter_of_what_is_available_beyond_the_worst_step() -> None:
    assert left_of(cpu_entries(MACHINE, 4, shared=True)) == 20 * GIB * CPU_SHARE / 4


def test_what_is_set_may_take_all_that_is_available() -> None:
    assert left_of(cpu_entries(MACHINE, 4, shared=False)) == 20 * GIB


def test_a_machines_memory_is_accounted_for_whole() -> None:
    assert [amount // GIB for _, amount in cpu_entries(MACHINE, 1, shared=False)] == [32, -6, -1, -1, -4]


def test_the_table_holds_the_pool_what_is_left_and_what_fits() -> None:
    lines = a_ledger().table().splitlines()
    assert lines[0].split() == ["cuda:0,", "H200", "GiB"]
    assert lines[-3].split() == ["KV", "pool", "-64.00"]
    assert lines[-2].split() == ["left", "over", "36.00"]
    assert lines[-1].strip() == ("= 4,096 blocks of 16 tokens, 65,536 tokens: 8.0 sequences of --max-model-len 8,192")


def test_the_lines_of_the_table_add_up_to_what_is_left_over() -> None:
    ledger = a_ledger(gpu_entries(H200, 0.9), num_blocks=4000)
    numbers = [float(found) for found in re.findall(r" (-?\d+\.\d\d)$", ledger.table(), re.MULTILINE)]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.05)


def test_a_sequence_takes_whole_blocks_and_the_number_that_fit_is_rounded_down() -> None:
    assert ": 1.5 sequences of --max-model-len 17" in a_ledger(max_model_len=17, num_blocks=3).table()
    assert ": 1.9 sequences of --max-model-len 320" in a_ledger(max_model_len=320, num_blocks=39).table()


def test_a_rank_that_could_hold_more_than_the_group_uses_says_so() -> None:
    assert "could hold" not in a_ledger().table()
    agreed = a_ledger().agreed(4000)
    assert agreed.num_blocks == 4000
    assert "this rank could hold 4,096 blocks" in agreed.table().splitlines()[-1]


def test_how_weights_and_kv_are_kept_is_said_where_it_was_chosen() -> None:
    table = a_ledger(gpu_entries(H200, 0.9, "int8"), kv_form="fp8_e4m3").table()
    assert re.search(r"^  weights, int8 +-", table, re.MULTILINE)
    assert re.search(r"^  KV pool, fp8_e4m3 +-", table, re.MULTILINE)
    assert dict(cpu_entries(MACHINE, 1, shared=False, form="4-bit AWQ in groups of 128")).keys() >= {
        "weights, 4-bit AWQ in groups of 128, packed copies too"
    }


def test_the_flag_that_sizes_the_pool_is_named() -> None:
    assert "KV pool: --num-gpu-blocks-override 77" in a_ledger(setting="--num-gpu-blocks-override 77").table()
