"""GPTQ and AWQ checkpoints are read exactly: the logits are those of the float model that they stand for."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from packed_model import WEIGHTS, save_packed, tiny_llama
from prompt_plan import LENGTH, compute, expected_logits
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from octavo.kernels.backend import reference_kernels
from octavo.kernels.quantized import dequantize
from octavo.worker.collectives import SingleProcess
from octavo.worker.errors import ConfigurationError
from octavo.worker.model.check import check_model_folder
from octavo.worker.model.config import ModelConfig
from octavo.worker.model.matrices import Share
from octavo.worker.model.packed_checkpoint import packed_matrix
from octavo.worker.model.partition import partition
from octavo.worker.model.weights import Checkpoint
from octavo.worker.model_runner import ModelRunner

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
DOWN = "model.layers.1.mlp.down_proj"

FORMATS: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "gptq, one group": GPTQ | {"group_size": -1},
    "gptq, desc_act": GPTQ | {"desc_act": True},
    "awq": AWQ,
    "awq, one group": AWQ | {"group_size": -1},
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ checkpoint, not to be changed."""
    folder = tmp_path_factory.mktemp("packed")
    save_packed(tiny_llama(), folder, GPTQ)
    return folder


def check_logits(logits: torch.Tensor, model: LlamaForCausalLM) -> None:
    torch.testing.assert_close(logits, expected_logits(model), atol=2e-4, rtol=0)


def load(folder: Path) -> ModelRunner:
    runner = ModelRunner.load(
        folder,
        rank=0,
        size=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        collectives=SingleProcess(),
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=64,
        kernels=reference_kernels(),
    )
    runner.allocate_kv(LENGTH // 4)
    return runner


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_computes_with_the_weights_that_a_checkpoint_stands_for(name: str, tmp_path: Path) -> None:
    model = tiny_llama()
    save_packed(model, tmp_path, FORMATS[name])
    check_logits(compute(load(tmp_path)), model)


@pytest.mark.parametrize("plain", [("v_proj", "layers.0.mlp"), ("self_attn",)])
def test_modules_may_be_stored_as_usual(plain: tuple[str, ...], tmp_path: Path) -> None:
    """Also one of those that are otherwise computed in one product."""
    model = tiny_llama(tie_word_embeddings=True)
    save_packed(model, tmp_path, AWQ | {"modules_to_not_convert": list(plain)}, plain)
    check_logits(compute(load(tmp_path)), model)


@pytest.mark.parametrize("name", ["gptq", "gptq, one group", "awq", "awq, one group"])
def test_a_slice_may_begin_and_end_within_the_integers_that_hold_it(name: str, tmp_path: Path) -> None:
    model = tiny_llama()
    save_packed(model, tmp_path, FORMATS[name])
    packing, whole = ModelConfig.from_folder(tmp_path).packing, model.get_submodule(DOWN).weight
    assert packing is not None
    with ExitStack() as stack:
        checkpoint = Checkpoint(tmp_path, stack)
        for rows, columns in ((range(96), range(160)), (range(3, 50), range(16, 96)), (range(91, 96), range(32, 160))):
            share = Share(f"{DOWN}.weight", (96, 160), rows, columns)
            matrix = packed_matrix(share, packing, torch.device("cpu"))
            for part in matrix.parts():
                checkpoint.copy(part)
            expected = whole[rows.start : rows.stop, columns.start : columns.stop]
            torch.testing.assert_close(dequantize(matrix.weight()), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "size"), [("gptq", 2), ("awq", 3)])
def test_each_rank_reads_its_slice(name: str, size: int, tmp_path: Path, start_group: Any) -> None:
    """Of three KV heads over two ranks, and an MLP whose ten groups are dealt out whole."""
    model = tiny_llama()
    save_packed(model, tmp_path, FORMATS[name])
    with start_group(tmp_path, size) as (runner, executor):
        check_logits(compute(runner, executor), model)


def test_biases_of_zeros_are_passed_over_and_others_refused(packed: Path, tmp_path: Path) -> None:
    """Early GPTQ checkpoints have them, for models that have none."""
    copytree(packed, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors | {f"{DOWN}.bias": torch.zeros(96)}, tmp_path / WEIGHTS)
    load(tmp_path)
    save_file(tensors | {f"{DOWN}.bias": torch.full((96,), 0.5)}, tmp_path / WEIGHTS)
    with pytest.raises(ConfigurationError, match=rf"does not use, the first is {DOWN}\.bias"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("what", "tensor", "message"),
    [
        ("qweight", torch.zeros(19, 96, dtype=torch.int32), r"qweight .*has the shape \[19, 96\], expected \[20, 96\]"),
        ("scales", torch.zeros(5, 96), r"scales .*has the shape \[5, 96\], expected \[10, 96\]"),
        ("qzeros", torch.zeros(10, 96, dtype=torch.int32), r"qzeros .*has the shape \[10, 96\], expected \[10, 12\]"),
        ("qweight", torch.zeros(20, 96), r"qweight .*has the type F32; known: I32"),
        ("scales", torch.zeros(10, 96, dtype=torch.int32), r"scales .*has the type I32; known: F32"),
        ("g_idx", None, r"lacks the tensor .*g_idx \(shape \[160\]\)"),
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    what: str, tensor: torch.Tensor | None, message: str, packed: Path, tmp_path: Path
) -> None:
    """Before anything is read: what ``octavo serve`` does first."""
    check_model_folder(packed)
    rewrite(packed, tmp_path, what, tensor)
    with pytest.raises(ConfigurationError, match=message):
        check_model_folder(tmp_path)


def test_groups_of_other_sizes_are_refused(packed: Path, tmp_path: Path) -> None:
    rewrite(packed, tmp_path, "g_idx", torch.zeros(160, dtype=torch.int32))
    with pytest.raises(ConfigurationError, match=rf"{DOWN}\.g_idx does not give each group 16 of the input channels"):
        load(tmp_path)


def rewrite(packed: Path, folder: Path, what: str, tensor: torch.Tensor | None) -> None:
    """A copy in ``folder``, with one tensor of one matrix replaced, or (None) left out."""
    copytree(packed, folder, dirs_exist_ok=True)
    tensors = load_file(folder / WEIGHTS)
    del tensors[f"{DOWN}.{what}"]
    save_file(tensors | ({} if tensor is None else {f"{DOWN}.{what}": tensor}), folder / WEIGHTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; known: gptq, awq"),
        (GPTQ | {"bits": 8}, "bits is 8; known: 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; known: gptq, gptq_v2"),
        (GPTQ | {"group_size": 0}, "group_size is 0; known: -1 and multiples of 8"),
        (GPTQ | {"dynamic": {"-:.*mlp.*": {}}}, "dynamic gives modules settings of their own"),
        (GPTQ | {"group_size": 24}, "160 input channels, which are not whole groups of 24"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; known: gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False; known: True"),
    ],
)
def test_what_is_not_read_exactly_is_refused_by_name(
    settings: dict[str, Any], message: str, packed: Path, tmp_path: Path
) -> None:
    copytree(packed, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"group_size": 48}, 2, r"-size is 2: rank 1 would begin with query head 4, input channel 64 of o_proj"),
        ({"desc_act": True}, 2, r"is 2, but .* groups of 16 input channels are scattered \(desc_act\).*the limit is 1"),
        ({"group_size": 64}, 3, r"is 3, but the checkpoint has 2 groups of 64 MLP columns.*the limit is 2"),
    ],
)
def test_ranks_that_would_cut_a_group_are_refused(
    changes: dict[str, Any], size: int, message: str, packed: Path, tmp_path: Path
) -> None:
    config = json.loads((packed / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ | changes}))
    with pytest.raises(ConfigurationError, match=message):
        partition(ModelConfig.from_folder(tmp_path), size)
