"""The KV cache is sized from a ledger; what is not there, or cannot hold one sequence, is refused with the numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.kernels.cpu_tiles import PANEL
from octavo.worker.errors import ConfigurationError
from octavo.worker.host_memory import host_memory, peak_growth
from octavo.worker.ledger import CPU_SHARE, GpuMemory, gpu_entries
from octavo.worker.memory import (
    KvBudget,
    allocate_pool,
    ledger_of,
    run_worst_case_step,
    size_kv_cache,
    weight_bytes,
    worst_case_plan,
)
from octavo.worker.model_runner import Limits, ModelRunner
from octavo.worker.prompt_reading import ROWS_AT_ONCE

BYTES_PER_BLOCK = 2 * 2 * 1 * 4 * 8 * 4
"""Layers × (K, V) × KV heads × block size × head_dim × float32."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, start_group: Any) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    with start_group(folder) as (runner, _):
        yield runner


def test_a_share_of_the_available_memory_divided_by_the_ranks(runner: ModelRunner) -> None:
    available = host_memory().available
    ledger = size_kv_cache(runner, KvBudget(num_ranks_on_machine=4))
    assert ledger.bytes_per_block == runner.kv_bytes_per_block == BYTES_PER_BLOCK
    assert ledger.kv_bytes == pytest.approx(available * CPU_SHARE / 4, rel=0.2)
    assert ledger.num_blocks == ledger.could_hold == ledger.kv_bytes // BYTES_PER_BLOCK
    assert f"{ledger.num_blocks:,} blocks of 4 tokens" in ledger.table()


def test_bytes_or_blocks_may_be_set(runner: ModelRunner) -> None:
    assert size_kv_cache(runner, KvBudget(kv_cache_memory_bytes=100 * BYTES_PER_BLOCK + 1)).num_blocks == 100
    assert size_kv_cache(runner, KvBudget(num_blocks_override=77)).num_blocks == 77


def test_sizing_leaves_no_pool_behind(runner: ModelRunner) -> None:
    size_kv_cache(runner, KvBudget(num_blocks_override=77))
    assert not hasattr(runner, "kv_pool")


@pytest.mark.parametrize(
    ("budget", "raise_this"),
    [
        (KvBudget(num_blocks_override=10), "--num-gpu-blocks-override"),
        (KvBudget(kv_cache_memory_bytes=10 * BYTES_PER_BLOCK), "--kv-cache-memory-bytes"),
    ],
)
def test_too_little_for_one_sequence(runner: ModelRunner, budget: KvBudget, raise_this: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=rf"--max-model-len 64 tokens needs 16 KV blocks.*10 blocks: raise {raise_this}, .*to at most 40$",
    ):
        size_kv_cache(runner, budget)


def test_too_little_for_one_block_gives_no_length_that_would_fit(runner: ModelRunner) -> None:
    with pytest.raises(ConfigurationError, match=r"0 blocks: raise --kv-cache-memory-bytes$"):
        size_kv_cache(runner, KvBudget(kv_cache_memory_bytes=BYTES_PER_BLOCK - 1))


@pytest.mark.parametrize(
    ("budget", "setting"),
    [
        (KvBudget(kv_cache_memory_bytes=1 << 60), f"--kv-cache-memory-bytes is {1 << 60}"),
        (KvBudget(num_blocks_override=1 << 50), f"--num-gpu-blocks-override is {1 << 50}"),
    ],
)
def test_more_than_there_is(runner: ModelRunner, budget: KvBudget, setting: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{setting}, .* for KV on cpu, but only .* GiB are free$"):
        size_kv_cache(runner, budget)


def a_gpu(free_blocks: int, budget: KvBudget) -> Any:
    """``ledger_of`` a GPU where utilization leaves so many blocks: a runner as far as the sums look at it."""
    runner: Any = SimpleNamespace(
        placement=SimpleNamespace(device=torch.device("cuda", 0)),
        limits=Limits(4, 4, 64, 64),
        kv_bytes_per_block=BYTES_PER_BLOCK,
        kv_dtype=torch.bfloat16,
    )
    memory = GpuMemory(total=2000 * BYTES_PER_BLOCK, used=0, allocator=0, weights=0, step_peak=0)
    taken = 2000 * BYTES_PER_BLOCK * budget.gpu_memory_utilization - free_blocks * BYTES_PER_BLOCK
    return ledger_of(runner, budget, (*gpu_entries(memory, budget.gpu_memory_utilization), ("taken", -int(taken))))


@pytest.fixture(autouse=True)
def a_name_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")


def test_a_gpu_gives_what_its_utilization_leaves() -> None:
    ledger = a_gpu(100, KvBudget(gpu_memory_utilization=0.5))
    assert (ledger.device, ledger.num_blocks) == ("cuda:0, H200", 100)


def test_utilization_is_the_wall_of_a_gpu_for_what_is_set_too() -> None:
    assert a_gpu(100, KvBudget(gpu_memory_utilization=0.5, num_blocks_override=50)).num_blocks == 50
    with pytest.raises(ConfigurationError, match=r"is 101, .* on cuda:0, .* within --gpu-memory-utilization 0\.5$"):
        a_gpu(100, KvBudget(gpu_memory_utilization=0.5, num_blocks_override=101))


def test_a_gpu_with_too_little_for_one_sequence() -> None:
    with pytest.raises(ConfigurationError, match=r"15 blocks: raise --gpu-memory-utilization, .* to at most 60$"):
        a_gpu(15, KvBudget(gpu_memory_utilization=0.5))


def test_every_weight_counts_once_and_packed_copies_count(runner: ModelRunner) -> None:
    """Untied embedding and head; a plain matrix is dropped once it is packed, in whole panels and with a bias."""
    hidden, mlp, vocabulary, layers, heads, kv_heads, head_dim, positions = 16, 24, 50, 2, 2, 1, 8, 64
    attention = [((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim)]
    products = layers * [*attention, (2 * mlp, hidden), (hidden, mlp)] + [(vocabulary, hidden)]
    matrices = sum(-(-out // PANEL) * PANEL * (inputs + 1) for out, inputs in products)
    others = vocabulary * hidden + (2 * layers + 1) * hidden + positions * head_dim
    assert weight_bytes(runner.model) == 4 * (matrices + others)


def test_the_growth_of_resident_memory_is_measured_at_its_peak() -> None:
    size = 64 << 20
    assert peak_growth(lambda: b"x" * size) >= 0.9 * size
    assert peak_growth(lambda: None) < size / 4


def test_the_pool_is_resident_once_it_is_allocated(runner: ModelRunner) -> None:
    num_blocks = (64 << 20) // BYTES_PER_BLOCK
    assert peak_growth(lambda: allocate_pool(runner, num_blocks)) >= 0.9 * num_blocks * BYTES_PER_BLOCK


def test_a_pool_that_cannot_be_had_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ConfigurationError, match=r"GiB for \d+ KV blocks could not be had on cpu"):
        allocate_pool(runner, (1 << 60) // BYTES_PER_BLOCK)


@pytest.mark.parametrize(
    ("budget", "sequences", "expected"),
    [(64, 4, [61, 1, 1, 1]), (200, 4, [64, 64, 64, 8]), (3, 4, [1, 1, 1]), (300, 2, [64, 64]), (7, 1, [7])],
)
def test_worst_case_uses_up_the_budget(budget: int, sequences: int, expected: list[int]) -> None:
    plan = worst_case_plan(Limits(4, sequences, budget, 64), long_contexts=True)
    assert plan.num_new_tokens.tolist() == expected
    assert (plan.num_new_tokens + plan.num_computed_tokens == 64).all()
    assert plan.logit_indices.size == len(expected)
    assert plan.scored[:, :2].tolist() == [[0, min(expected[0], ROWS_AT_ONCE)]]


def test_worst_case_runs_with_one_block(runner: ModelRunner) -> None:
    runner.allocate_kv(1)
    run_worst_case_step(runner)
