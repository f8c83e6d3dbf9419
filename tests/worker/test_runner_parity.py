"""The runner computes what transformers computes: whole, in chunks, in ragged batches, over any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.worker.executor import Executor
from octavo.worker.model_runner import ModelRunner
from octavo.worker.step_plan import PlanKind, StepPlan

TOLERANCE = 2e-4
BLOCK_SIZE = 4

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False, "vocab_size": 211},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
}


CASES = [(1, shape) for shape in SHAPES] + [(2, "tied"), (3, "tied"), (3, "untied")]
"""How positions turn does not depend on the number of ranks."""


def tiny_llama(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """Nine query and three KV heads like SmolLM2's, random weights, saved to ``folder``."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 256,
        "hidden_size": 72,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()
    model.save_pretrained(folder)
    return model


@dataclass
class Run:
    """One sequence: its tokens, its slot, and its blocks, which are scattered over the pool."""

    tokens: list[int]
    slot: int
    blocks: list[int]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def scattered(prompts: list[list[int]]) -> list[Run]:
    free = np.random.default_rng(1).permutation(64).tolist()
    take = 64 // BLOCK_SIZE
    return [Run(tokens, slot, [free.pop() for _ in range(take)]) for slot, tokens in enumerate(prompts)]


def step(executor: Executor, runner: ModelRunner, work: list[tuple[Run, int]], number: int = 1) -> None:
    """Compute the next n tokens of each run in one plan; the logits of all of them are collected."""
    plan = StepPlan(
        PlanKind.STEP,
        step=number,
        slots=np.array([run.slot for run, _ in work], np.int32),
        num_new_tokens=np.array([count for _, count in work], np.int32),
        num_computed_tokens=np.array([run.computed for run, _ in work], np.int32),
        token_ids=np.array([t for run, n in work for t in run.tokens[run.computed : run.computed + n]], np.int32),
        table_updates=np.array([[run.slot, 0, len(run.blocks)] for run, _ in work], np.int32),
        table_blocks=np.array([block for run, _ in work for block in run.blocks], np.int32),
        logit_indices=np.arange(sum(n for _, n in work), dtype=np.int32),
    )
    executor._broadcast(plan)
    logits = runner.execute(plan)
    assert logits is not None
    assert logits.dtype == torch.float32
    for (run, count), rows in zip(work, logits.split([count for _, count in work]), strict=True):
        run.logits.append(rows)
        run.computed += count


def check(run: Run, reference: LlamaForCausalLM) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([run.tokens[: run.computed]])).logits[0]
    torch.testing.assert_close(torch.cat(run.logits), expected, atol=TOLERANCE, rtol=0)


def prompts(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 200, length).tolist() for length in lengths]


@pytest.mark.parametrize(("size", "shape"), CASES)
def test_logits_equal_those_of_transformers(size: int, shape: str, start_group: Any, tmp_path: Path) -> None:
    folder, reference = tmp_path, tiny_llama(tmp_path, **SHAPES[shape])
    with start_group(folder, size) as (runner, executor):
        whole, chunked, *ragged = scattered(prompts(33, 40))[:2]
        step(executor, runner, [(whole, 33)])
        for count in (7, 7, 7, 7, 7, 1, 1, 1, 1, 1):
            step(executor, runner, [(chunked, count)])
        check(whole, reference)
        check(chunked, reference)
        first, second, third = ragged = scattered(prompts(20, 31, 13))
        step(executor, runner, [(first, 12)])
        step(executor, runner, [(second, 9), (first, 1)])
        step(executor, runner, [(first, 1), (third, 13), (second, 21)])
        step(executor, runner, [(second, 1), (first, 6)])
        for run in ragged:
            check(run, reference)
