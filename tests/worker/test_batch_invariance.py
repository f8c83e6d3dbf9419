"""A sequence's logits are the same, to the bit, alone and among others, and so are its draws: on CPUs, but for half
precision, without ``--batch-invariant`` too, as long as its prompt is cut into the same chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_model import save_packed, tiny_llama
from torch import Tensor

from octavo.kernels.backend import select_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sampler import sample_rows
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.spec import Quantization
from octavo.worker.step_plan import PlanKind, StepPlan

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS_EACH, NUM_SEQS, PROMPT, LENGTH = 4, 12, 8, 37, 46
TOKENS = np.random.default_rng(0).integers(0, 96, (NUM_SEQS, LENGTH)).astype(np.int32)
PACKED = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}

WEIGHTS: dict[str, tuple[Quantization | None, torch.dtype | None]] = {
    "float32": (None, None),
    "int8": ("int8", None),
    "int8, int8 KV": ("int8", torch.int8),
    "int4": (None, None),
}


@pytest.fixture(scope="module", params=WEIGHTS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    quantization, kv_dtype = WEIGHTS[request.param]
    folder, model = tmp_path_factory.mktemp("model"), tiny_llama()
    if request.param == "int4":
        save_packed(model, folder, PACKED)
    else:
        model.save_pretrained(folder)
    return load(folder, quantization, kv_dtype)


def load(folder: Path, quantization: Quantization | None, kv_dtype: torch.dtype | None) -> ModelRunner:
    runner = ModelRunner.load(
        folder,
        rank=0,
        size=1,
        device=CPU,
        dtype=torch.float32,
        collectives=SingleProcess(),
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=NUM_SEQS * LENGTH,
        max_model_len=BLOCKS_EACH * BLOCK_SIZE,
        kernels=select_kernels(CPU, batch_invariant=True),
        kv_dtype=kv_dtype,
        quantization=quantization,
    )
    runner.allocate_kv(NUM_SEQS * BLOCKS_EACH)
    return runner


def compute(runner: ModelRunner, steps: Sequence[Mapping[int, int]]) -> Tensor:
    """Logits of sequence 0's tokens, in order; a step maps sequences to how many of their next tokens it computes."""
    computed, logits = dict.fromkeys(range(NUM_SEQS), 0), []
    for step in steps:
        given = runner.execute(plan(step, computed))
        assert given is not None
        logits.append(given.clone())
        for seq, count in step.items():
            computed[seq] += count
    return torch.cat(logits)


def plan(step: Mapping[int, int], computed: Mapping[int, int]) -> StepPlan:
    seqs = list(step)
    first = sum(step[seq] for seq in seqs[: seqs.index(0)])
    return StepPlan(
        PlanKind.STEP,
        slots=np.array(seqs, np.int32),
        num_new_tokens=np.array(list(step.values()), np.int32),
        num_computed_tokens=np.array([computed[seq] for seq in seqs], np.int32),
        token_ids=np.concatenate([TOKENS[seq, computed[seq] : computed[seq] + step[seq]] for seq in seqs]),
        table_updates=np.array([[seq, 0, BLOCKS_EACH] for seq in seqs], np.int32),
        table_blocks=np.concatenate([np.arange(BLOCKS_EACH, dtype=np.int32) + seq * BLOCKS_EACH for seq in seqs]),
        logit_indices=np.arange(first, first + step[0], dtype=np.int32),
    )


ALONE = [{0: PROMPT}, *[{0: 1}] * (LENGTH - PROMPT)]
AMONG_OTHERS: list[Mapping[int, int]] = [
    dict.fromkeys([3, 1, 0, 2, 7], PROMPT),
    {4: PROMPT, 5: 9, 6: 1, 0: 1, 1: 1},
    *[dict.fromkeys([5, 4, 0, 3, 6, 1, 7, 2], 1)] * (LENGTH - PROMPT - 1),
]


def test_a_sequences_logits_and_draws_are_the_same_bits(runner: ModelRunner) -> None:
    alone, among_others = compute(runner, ALONE), compute(runner, AMONG_OTHERS)
    assert torch.equal(alone, among_others)
    kernels = select_kernels(CPU, batch_invariant=True)
    rows = [SamplingRow(seed=7, branch=0, position=i, temperature=i % 2 * 0.8, top_p=0.9, top_k=40) for i in range(5)]
    together = sample_rows(among_others[-5:], rows, kernels).token_ids.tolist()
    each = [sample_rows(alone[i - 5 :][:1], [row], kernels).token_ids.item() for i, row in enumerate(rows)]
    assert together == each
