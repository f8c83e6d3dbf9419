"""GGUF files: every quantised type is read as ggml defines it, and rotary scalings are known by their keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file
from tiny_gguf import write_gguf

from octavo.worker.checkpoint import resolve_model
from octavo.worker.errors import ConfigurationError
from octavo.worker.model.config import ModelConfig
from octavo.worker.model.rope_config import RopeConfig, RopeType


def quiet(line: str) -> None:
    pass


def nibbles(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return packed & 15, packed >> 4


def halves(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at a place of each block, ``[blocks, 1]``."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def q4_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """d, 16 bytes: the first of 16 pairs are the low halves."""
    return halves(blocks, 0) * (np.hstack(nibbles(blocks[:, 2:18])).astype(np.float32) - 8)


def q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """d, m, 16 bytes."""
    return halves(blocks, 0) * np.hstack(nibbles(blocks[:, 4:20])) + halves(blocks, 2)


def q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """d, 32 int8."""
    return halves(blocks, 0) * blocks[:, 2:34].copy().view(np.int8)


def k_scales(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Eight scales and eight minimums of six bits in bytes 4 to 15: each ``[blocks, 8, 1]``."""
    packed = blocks[:, 4:16].astype(np.int32)
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.hstack((low & 63, rest & 15 | low >> 6 << 4))
    minimums = np.hstack((high & 63, rest >> 4 | high >> 6 << 4))
    return halves(blocks, 0)[..., None] * scales[..., None], halves(blocks, 2)[..., None] * minimums[..., None]


def q4_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """d, dmin, scales, 128 bytes: 32 of them hold two runs of 32 numbers."""
    scales, minimums = k_scales(blocks)
    low, high = nibbles(blocks[:, 16:144].reshape(-1, 4, 32))
    q = np.stack((low, high), axis=2).reshape(-1, 8, 32)
    return (scales * q - minimums).reshape(-1, 256)


def q5_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """d, dmin, scales, 32 bytes whose bit i is the fifth of run i, 128 bytes as in Q4_K."""
    scales, minimums = k_scales(blocks)
    low, high = nibbles(blocks[:, 48:176].reshape(-1, 4, 32))
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = np.stack((low, high), axis=2).reshape(-1, 8, 32) + 16 * fifth
    return (scales * q - minimums).reshape(-1, 256)


def q6_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """128 bytes of low halves, 64 of upper pairs of bits, 16 int8 scales, d; in two parts of 128 numbers."""
    low, high = nibbles(blocks[:, :128].reshape(-1, 2, 64))
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = np.concatenate((low, high), axis=2).reshape(-1, 2, 4, 32) | upper << 4
    scales = halves(blocks, 208) * blocks[:, 192:208].copy().view(np.int8)
    return (scales[..., None] * (q.reshape(-1, 16, 16).astype(np.float32) - 32)).reshape(-1, 256)


@pytest.mark.parametrize(
    ("name", "places_of_floats", "meaning"),
    [
        ("Q4_0", [0], q4_0),
        ("Q4_1", [0, 2], q4_1),
        ("Q8_0", [0], q8_0),
        ("Q4_K", [0, 2], q4_k),
        ("Q5_K", [0, 2], q5_k),
        ("Q6_K", [208], q6_k),
    ],
)
def test_quantised_types_are_read_exactly(
    name: str, places_of_floats: list[int], meaning: Callable[[NDArray[np.uint8]], NDArray[np.float32]], tmp_path: Path
) -> None:
    """Random blocks, whose layouts are ggml's (ggml-common.h)."""
    kind = gguf.GGMLQuantizationType[name]
    length, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (32 * 256 // length, size), np.uint8)
    for at in places_of_floats:
        blocks[:, at : at + 2] = draw.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    write_gguf(tmp_path / "tiny.gguf", packed=(blocks.reshape(32, -1), kind))
    resolved = resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)
    read = load_file(resolved.path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_allclose(read.numpy(), meaning(blocks).reshape(32, 256), rtol=1e-6, atol=1e-6)


SCALING = "llama.rope.scaling"


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({f"{SCALING}.type": "none"}, RopeConfig(500000.0)),
        ({f"{SCALING}.type": "linear", f"{SCALING}.factor": 4.0}, RopeConfig(500000.0, RopeType.LINEAR, 4.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeConfig(500000.0, RopeType.LINEAR, 2.0)),
        (
            {f"{SCALING}.type": "yarn", f"{SCALING}.factor": 4.0, f"{SCALING}.yarn_beta_fast": 16.0},
            RopeConfig(500000.0, RopeType.YARN, 4.0, 64, beta_fast=16.0, attention_factor=0.1 * math.log(4) + 1),
        ),
    ],
)
def test_rotary_scalings_of_gguf_files(keys: dict[str, Any], rope: RopeConfig, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", keys=keys)
    resolved = resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)
    assert ModelConfig.from_folder(resolved.path).rope == rope


def llama3_factors(factor: float) -> NDArray[np.float32]:
    """By which each frequency of an 8-dimensional head is divided, in the words of Llama 3.1: waves that are shorter
    than a quarter of 8192 are kept, longer than all of it stretched, others between."""
    waves = 2 * np.pi * 500000.0 ** (np.arange(0, 8, 2) / 8)
    smooth = ((8192 / waves - 1) / 3).clip(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def test_llama_3s_scaling_is_known_by_its_factors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": llama3_factors(32.0)})
    resolved = resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)
    assert ModelConfig.from_folder(resolved.path).rope == RopeConfig(500000.0, RopeType.LLAMA3, 32.0, 8192)
    write_gguf(tmp_path / "odd.gguf", tensors={"rope_freqs.weight": llama3_factors(5.0)})
    with pytest.raises(ConfigurationError, match="holds factors from 1 to 5, which are not those of Llama 3"):
        resolve_model(str(tmp_path / "odd.gguf"), cache_dir=tmp_path / "cache", report=quiet)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({f"{SCALING}.type": "longrope"}, "type is 'longrope'; known: none, linear, yarn"),
        ({f"{SCALING}.type": "yarn"}, r"lacks the key llama\.rope\.scaling\.factor"),
        ({"llama.rope.dimension_count": 4}, r"llama\.rope\.dimension_count is 4.0; known: a whole head, 8"),
        ({"llama.attention.key_length": "8"}, r"key_length is '8', expected a positive whole number"),
    ],
)
def test_what_the_keys_say_that_is_not_known_is_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", keys=keys)
    with pytest.raises(ConfigurationError, match=message):
        resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0", "blk.0.attn_q_norm.weight"])
def test_tensors_that_a_llama_does_not_have_are_named(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tensors={name: np.zeros(32, np.float32)})
    with pytest.raises(ConfigurationError, match=f"tensor {name} is unknown in a Llama model"):
        resolve_model(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", report=quiet)
