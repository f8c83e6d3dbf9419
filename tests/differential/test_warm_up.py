"""On CPUs, nothing is compiled in a step, which other ranks would wait for: all of it is before the first one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_model import save_packed, tiny_llama
from prompt_plan import compute

from octavo.kernels import (
    cpu_attention,
    cpu_cache,
    cpu_columns,
    cpu_elementwise,
    cpu_linear_amx,
    cpu_linear_float,
    cpu_linear_int4,
    cpu_linear_int8,
    cpu_logprobs,
    cpu_program,
    cpu_quantize,
    cpu_sample,
)
from octavo.kernels.backend import cpu_kernels
from octavo.kernels.cpu_threads import warm_up
from octavo.worker.collectives import SingleProcess
from octavo.worker.model.products import weight_forms
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sampler import sample_rows
from octavo.worker.sampling_row import SamplingRow

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}


KERNELS = (
    cpu_attention,
    cpu_cache,
    cpu_columns,
    cpu_elementwise,
    cpu_linear_amx,
    cpu_linear_float,
    cpu_linear_int4,
    cpu_linear_int8,
    cpu_logprobs,
    cpu_program,
    cpu_quantize,
    cpu_sample,
)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """The kernels that were called, each with the types of its arguments, and what they were built for."""
    found: set[Any] = set()

    def record(call: Callable[..., Any], describe: Callable[[Any], Any], *key: Any) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            found.add((*key, *map(describe, arguments)))
            return call(*arguments)

        return recorded

    for module in KERNELS:
        for name, value in list(vars(module).items()):
            if isinstance(value, dict) and value.keys() == {False, True}:
                builds = {parallel: record(kernel, type, name, parallel) for parallel, kernel in value.items()}
                monkeypatch.setattr(module, name, builds)
            elif hasattr(value, "cache_info"):
                monkeypatch.setattr(module, name, record(value, str, name))
    return found


def save_plain(folder: Path) -> None:
    tiny_llama().save_pretrained(folder)


def save_int4(folder: Path) -> None:
    save_packed(tiny_llama(), folder, GPTQ)


@pytest.mark.parametrize(
    ("save", "quantization"),
    [(save_plain, None), (save_plain, "int8"), (save_int4, None)],
    ids=["plain", "int8", "int4"],
)
def test_steps_use_kernels_that_the_warm_up_has_called(
    save: Callable[[Path], None], quantization: str | None, tmp_path: Path, used: set[Any]
) -> None:
    save(tmp_path)
    kernels = cpu_kernels()
    runner = ModelRunner.load(
        tmp_path,
        rank=0,
        size=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        collectives=SingleProcess(),
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        kernels=kernels,
        quantization=quantization,  # type: ignore[arg-type]
    )
    warm_up(
        kernels,
        num_query_heads=6,
        num_kv_heads=3,
        head_dim=16,
        vocab_size=96,
        weight_forms=weight_forms(runner.placement),
        kv_dtype=runner.kv_dtype,
    )
    known = set(used)
    used.clear()
    runner.allocate_kv(16)
    for first, count in ((0, 30), (30, 1)):
        logits = compute(runner, first=first, count=count)
        sample_rows(logits, [SamplingRow(1, 0, 0, 1.0, 0.9, None)] * count, kernels)
    assert len(used) > 8
    assert used <= known
