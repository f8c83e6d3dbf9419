"""``--quantization``: matrices are rounded when they are loaded, each rank's slice by itself; all else stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_model import tiny_llama
from prompt_plan import compute, expected_logits
from torch import Tensor
from transformers import LlamaForCausalLM

from octavo.kernels.backend import reference_kernels
from octavo.kernels.quantized import Fp8Weight, Int8Weight, Weight, quantize_fp8, quantize_int8
from octavo.worker.collectives import SingleProcess
from octavo.worker.errors import ConfigurationError
from octavo.worker.memory import weight_bytes
from octavo.worker.model.config import ModelConfig
from octavo.worker.model.device_limits import Device, check_device
from octavo.worker.model_runner import ModelRunner


class Loaded:
    """A model loaded on one rank, and the weights that its products were prepared with."""

    def __init__(self, folder: Path, quantization: str, dtype: torch.dtype = torch.float32) -> None:
        self.weights: list[Weight] = []
        known = reference_kernels().prepare_linear

        def prepare_linear(weight: Weight, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
            self.weights.append(weight)
            return known(weight, bias)

        self.runner = ModelRunner.load(
            folder,
            rank=0,
            size=1,
            device=torch.device("cpu"),
            dtype=dtype,
            collectives=SingleProcess(),
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=64,
            kernels=replace(reference_kernels(), prepare_linear=prepare_linear),
            quantization=quantization,  # type: ignore[arg-type]
        )


def matrices(model: LlamaForCausalLM) -> list[Tensor]:
    """In the order of the computation, those of one product together."""
    found = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]):
            found.append(torch.cat([module.weight.data for module in group]))
        found += [torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data]), mlp.down_proj.weight.data]
    return [*found, model.lm_head.weight.data]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "rounded"), [("int8", Int8Weight, quantize_int8), ("fp8", Fp8Weight, quantize_fp8)]
)
def test_every_matrix_is_rounded_and_nothing_else(
    name: str, kind: type, rounded: Callable[[Tensor], Any], tied: bool, tmp_path: Path
) -> None:
    """The head of a tied model too, in a copy of its own."""
    model = tiny_llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = Loaded(tmp_path, name)
    for weight, matrix in zip(loaded.weights, matrices(model), strict=True):
        assert isinstance(weight, kind)
        assert torch.equal(weight.values.float(), rounded(matrix).values.float())
        assert torch.equal(weight.scales, rounded(matrix).scales)
    assert torch.equal(loaded.runner.model.embedding.weight, model.state_dict()["model.embed_tokens.weight"])


def test_half_precision_does_not_round_a_second_time(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = Loaded(tmp_path, "int8", torch.bfloat16)
    first = loaded.weights[0]
    assert isinstance(first, Int8Weight)
    assert torch.equal(first.scales, quantize_int8(matrices(model)[0]).scales)


def test_what_a_product_keeps_counts_as_weights(tmp_path: Path) -> None:
    """Also where it is a function that keeps it."""
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    runner = Loaded(tmp_path, "int8").runner
    num_values = sum(parameter.numel() for parameter in model.parameters())
    assert weight_bytes(runner.model) == 4 * num_values + sum(table.nbytes for table in runner.model.rotary_tables)


@pytest.mark.parametrize("size", [1, 2])
def test_logits_stay_near_those_of_the_whole_weights(size: int, tmp_path: Path, start_group: Any) -> None:
    """Each rank rounds its own slice: the scales of a row that two ranks share differ, and fit the better."""
    model = tiny_llama(initializer_range=0.1)
    model.save_pretrained(tmp_path)
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    with start_group(tmp_path, size, limits=limits | {"quantization": "int8"}) as (runner, executor):
        logits = compute(runner, executor)
    expected = expected_logits(model)
    assert (logits - expected).std() < 0.06 * expected.std()


def tiny_config(folder: Path, **changes: Any) -> ModelConfig:
    tiny_llama().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return ModelConfig.from_folder(folder)


A_PACKED_MODEL = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}


@pytest.mark.parametrize(
    ("device", "dtype", "quantization", "changes", "message"),
    [
        (Device("cpu"), "auto", "fp8", {}, r"fp8 needs a GPU of compute capability 8\.9 or more.* device is cpu"),
        (Device("cuda", "A100", (8, 0)), "auto", "fp8", {}, r"the device is A100, compute capability 8\.0, where int8"),
        (Device("cuda", "MI210", None, "gfx90a"), "auto", "fp8", {}, "the device is MI210, gfx90a, where int8 runs"),
        (Device("cuda", "MI300X", None, "gfx942"), "auto", "fp8", {}, r"gfx95x, gfx12x; the device is MI300X, gfx942"),
        (Device("cpu"), "bfloat16", "int8", {}, "--dtype bfloat16 says nothing with --quantization int8"),
        (Device("cpu"), "auto", "int8", A_PACKED_MODEL, "is int8, but .* quantised already, as 4-bit GPTQ in g"),
        (Device("cuda"), "auto", None, A_PACKED_MODEL, "groups of 16 input channels; GPUs take multiples of 32"),
        (Device("cpu"), "auto", None, {"head_dim": 258}, "head_dim is 258; the kernels go up to 256"),
    ],
)
def test_what_a_device_cannot_run_is_refused_by_name(
    device: Device, dtype: str, quantization: str | None, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_device(device, tiny_config(tmp_path, **changes), dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("device", [Device("cuda", "L4", (8, 9)), Device("cuda", "MI355X", None, "gfx950")])
def test_gpus_that_multiply_fp8_may(device: Device, tmp_path: Path) -> None:
    check_device(device, tiny_config(tmp_path), dtype="auto", quantization="fp8")
