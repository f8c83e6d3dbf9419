"""A checkpoint is loaded whole or refused: every tensor is used, every layer is filled, every error has a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.kernels.backend import reference_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.errors import ConfigurationError
from octavo.worker.model_runner import ModelRunner

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(
        folder,
        rank=0,
        size=1,
        device=CPU,
        dtype=torch.float32,
        collectives=SingleProcess(),
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=32,
        kernels=reference_kernels(),
        **options,
    )


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Save the weights anew with some replaced, added, or (None) left out."""
    tensors: dict[str, torch.Tensor | None] = dict(load_file(folder / WEIGHTS)) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def shard(folder: Path) -> list[str]:
    """Split the checkpoint into two files with an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return names


def test_progress_is_told(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: told.append((done, total)))
    assert told[0][0] == 0
    assert told[-1] == (15, 15)


def test_sharded_checkpoint(folder: Path) -> None:
    shard(folder)
    load(folder)


def test_missing_shard(folder: Path) -> None:
    names = shard(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=rf"part-1\.safetensors is missing; .* it holds {names[1]}"):
        load(folder)


def test_shard_without_the_tensor_that_the_index_names(folder: Path) -> None:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra"] = "part-0.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=r"part-0\.safetensors lacks the tensor model\.extra"):
        load(folder)


def test_broken_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")
    with pytest.raises(ConfigurationError, match="has no readable weight_map"):
        load(folder)


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, **{DOWN: None})
    with pytest.raises(ConfigurationError, match=rf"lacks the tensor {DOWN} \(shape \[16, 24\]\)"):
        load(folder)


def test_unused_tensor(folder: Path) -> None:
    rewrite(folder, **{"model.layers.2.extra": torch.zeros(3)})
    with pytest.raises(ConfigurationError, match=r"1 tensors that the model does not use.* model\.layers\.2\.extra"):
        load(folder)


def test_stored_rotary_frequencies_may_stay_unread(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load(folder)


def test_shape_that_does_not_fit(folder: Path) -> None:
    rewrite(folder, **{DOWN: torch.zeros(16, 23)})
    with pytest.raises(ConfigurationError, match=rf"{DOWN} .*has the shape \[16, 23\], expected \[16, 24\]"):
        load(folder)


def test_file_that_was_cut_off(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(ConfigurationError, match=rf"\({len(whole) - 100} bytes\) is no whole safetensors file"):
        load(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigurationError, match=r"has no \.safetensors file"):
        load(folder)


def test_half_precision_is_converted(folder: Path) -> None:
    rewrite(folder, **{DOWN: torch.ones(16, 24, dtype=torch.bfloat16)})
    load(folder)
