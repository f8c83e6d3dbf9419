"""On CPUs a model's layers are recorded and run as one program: the same numbers as kernel by kernel, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.worker.executor import Executor
from octavo.worker.model_runner import ModelRunner
from octavo.worker.step_plan import PlanKind, StepPlan

SHAPE: dict[str, Any] = {"intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 50}


def save_model(folder: Path, head_dim: int) -> Path:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 4 * head_dim}
    LlamaForCausalLM(LlamaConfig(**SHAPE, **heads, max_position_embeddings=64)).save_pretrained(folder)
    return folder


def mixed_plan(computed: list[int], new: list[int]) -> StepPlan:
    """Sequence i in slot i, with blocks of its own; logits of each one's last token."""
    num = len(new)
    return StepPlan(
        PlanKind.STEP,
        slots=np.arange(num, dtype=np.int32),
        num_new_tokens=np.array(new, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        token_ids=np.arange(sum(new), dtype=np.int32) % 50,
        table_updates=np.array([[i, 0, 10] for i in range(num)], np.int32),
        table_blocks=np.arange(10 * num, dtype=np.int32),
        logit_indices=(np.cumsum(new) - 1).astype(np.int32),
    )


STEPS = [([0, 0, 0], [20, 1, 5]), ([20, 1, 5], [1, 9, 1]), ([21, 10, 6], [1, 1, 1])]
"""Prompts, a chunk beside decodes, decodes."""


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    logits = [runner.execute(mixed_plan(computed, new)) for computed, new in STEPS]
    return [rows.clone() for rows in logits if rows is not None]


def test_it_computes_what_the_kernels_one_by_one_do(tmp_path: Path, start_group: Any) -> None:
    with start_group(save_model(tmp_path, 8)) as (runner, _):
        program = runner._layer_program
        assert program is not None
        played = logits_of(runner)
        runner._layer_program = None
        assert len(played) == len(STEPS)
        assert all(map(torch.equal, played, logits_of(runner)))


def test_it_goes_on_after_the_kv_cache_has_moved(tmp_path: Path, start_group: Any) -> None:
    with start_group(save_model(tmp_path, 8)) as (runner, _):
        before = logits_of(runner)
        runner.release_kv()
        runner.allocate_kv(100)
        assert all(map(torch.equal, before, logits_of(runner)))


def test_a_model_that_cannot_be_recorded_is_run_kernel_by_kernel(
    tmp_path: Path, start_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of 6 numbers have no attention kernel on CPUs."""
    with start_group(save_model(tmp_path, 6)) as group:
        runner: ModelRunner = group[0]
        assert isinstance(group[1], Executor)
        assert runner._layer_program is None
        assert "heads of 6" in caplog.text
        assert all(rows.isfinite().all() for rows in logits_of(runner))
