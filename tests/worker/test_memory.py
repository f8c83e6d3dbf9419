"""The KV cache is sized from a ledger; what cannot hold one sequence is refused with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.worker.errors import ConfigurationError
from octavo.worker.memory import CPU_SHARE, KvBudget, run_worst_case_step, size_kv_cache, worst_case_plan
from octavo.worker.model_runner import Limits, ModelRunner

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
    available = psutil.virtual_memory().available
    ledger = size_kv_cache(runner, KvBudget(num_ranks_on_machine=4))
    assert ledger.bytes_per_block == runner.kv_bytes_per_block == BYTES_PER_BLOCK
    assert ledger.kv_bytes == pytest.approx(available * CPU_SHARE / 4, rel=0.2)
    assert ledger.num_blocks == ledger.kv_bytes // BYTES_PER_BLOCK
    assert f"{ledger.num_blocks} blocks of 4 tokens" in ledger.table()


def test_bytes_or_blocks_may_be_set(runner: ModelRunner) -> None:
    assert size_kv_cache(runner, KvBudget(kv_cache_memory_bytes=100 * BYTES_PER_BLOCK + 1)).num_blocks == 100
    assert size_kv_cache(runner, KvBudget(num_blocks_override=77)).num_blocks == 77


def test_too_little_for_one_sequence(runner: ModelRunner) -> None:
    with pytest.raises(
        ConfigurationError, match=r"--max-model-len 64 tokens needs 16 KV blocks.*10 blocks.*to at most 40"
    ):
        size_kv_cache(runner, KvBudget(num_blocks_override=10))


def test_more_than_there_is(runner: ModelRunner) -> None:
    with pytest.raises(ConfigurationError, match=r"--kv-cache-memory-bytes is \d+, .* but only .* GiB are free"):
        size_kv_cache(runner, KvBudget(kv_cache_memory_bytes=1 << 60))


@pytest.mark.parametrize(
    ("budget", "sequences", "expected"),
    [(64, 4, [61, 1, 1, 1]), (200, 4, [64, 64, 64, 8]), (3, 4, [1, 1, 1]), (300, 2, [64, 64]), (7, 1, [7])],
)
def test_worst_case_uses_up_the_budget(budget: int, sequences: int, expected: list[int]) -> None:
    plan = worst_case_plan(Limits(4, sequences, budget, 64), long_contexts=True)
    assert plan.num_new_tokens.tolist() == expected
    assert (plan.num_new_tokens + plan.num_computed_tokens == 64).all()
    assert plan.logit_indices.size == len(expected)


def test_worst_case_runs_with_one_block(runner: ModelRunner) -> None:
    runner.allocate_kv(1)
    run_worst_case_step(runner)
