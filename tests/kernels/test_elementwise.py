"""RMS norm, rotary embedding and activation × gate equal their formulas, computed in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels.backend import Kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))
each_size = pytest.mark.parametrize("num_rows", [1, 90])
"""90 rows are enough for the kernels that use several threads."""


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@each_dtype
@each_size
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 576).to(dtype), torch.rand(576).to(dtype)
    out, total = kernels.rms_norm(x, weight, 1e-5)
    assert total is x
    assert_close(out, normed(x, weight, 1e-5), dtype)


@each_dtype
@each_size
def test_rms_norm_adds_to_the_residual_first(kernels: Kernels, dtype: torch.dtype, num_rows: int) -> None:
    x, residual = torch.randn(2, num_rows, 576).to(dtype)
    weight = torch.rand(576).to(dtype)
    summed = residual + x
    out, total = kernels.rms_norm(x, weight, 1e-5, residual)
    assert_close(total, summed.double(), dtype)
    assert_close(out, normed(summed, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_in_float32_is_not_rounded_to_the_activations_dtype(kernels: Kernels, dtype: torch.dtype) -> None:
    """By less than half a step of theirs from 1: no single product shows it, the mean of all does."""
    x, little = torch.randn(5, 576).to(dtype), 0.4 * torch.finfo(dtype).eps
    plain, scaled = (kernels.rms_norm(x, torch.full((576,), weight), 1e-5)[0] for weight in (1.0, 1.0 + little))
    ratio = float(scaled.double().abs().mean() / plain.double().abs().mean())
    assert ratio == pytest.approx(1 + little, abs=little / 4)


@each_dtype
@each_size
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_norm_heads(kernels: Kernels, dtype: torch.dtype, num_rows: int, weight_dtype: torch.dtype | None) -> None:
    fused = torch.randn(num_rows, 6, 80).to(dtype)
    query, key, value = fused.split_with_sizes([3, 2, 1], dim=1)
    weights = torch.rand(2, 80).to(weight_dtype or dtype)
    expected = [normed(x, weight, 1e-5) for x, weight in zip((query, key), weights, strict=True)]
    kept = value.clone()
    for actual, wanted in zip(kernels.norm_heads(query, key, *weights, 1e-5), expected, strict=True):
        assert_close(actual, wanted, dtype)
    assert torch.equal(value, kept)


def test_the_norm_of_zeros_is_zero(kernels: Kernels) -> None:
    out, _ = kernels.rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-5)
    assert torch.equal(out, torch.zeros(2, 64))


@each_dtype
@each_size
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_rotary(kernels: Kernels, dtype: torch.dtype, num_rows: int, position_dtype: torch.dtype) -> None:
    half = 40
    fused = torch.randn(num_rows, 6, 2 * half).to(dtype)
    query, key = fused[:, :3], fused[:, 3:5]
    positions = torch.randint(0, 200, (num_rows,)).to(position_dtype)
    angles = torch.arange(200)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    expected = [rotated(x, angles[positions.long()]) for x in (query, key)]
    for actual, wanted in zip(kernels.rotary(query, key, positions, cos_sin), expected, strict=True):
        assert_close(actual, wanted, dtype)


@each_dtype
@each_size
def test_rotary_of_a_part_of_each_head(kernels: Kernels, dtype: torch.dtype, num_rows: int) -> None:
    half, width = 24, 64
    fused = torch.randn(num_rows, 6, width).to(dtype)
    query, key = fused[:, :3], fused[:, 3:5]
    positions = torch.randint(0, 200, (num_rows,))
    angles = torch.arange(200)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    expected = [
        torch.cat((rotated(x[..., : 2 * half], angles[positions]), x[..., 2 * half :].double()), dim=-1)
        for x in (query, key)
    ]
    for actual, wanted in zip(kernels.rotary(query, key, positions, cos_sin), expected, strict=True):
        assert_close(actual, wanted, dtype)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (i, i + half) is a complex number, turned by its angle."""
    low, high = x.double().chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles.double()), angles.double())[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))).tanh())


def gelu_erf(x: Tensor) -> Tensor:
    return x * (1 + (x / math.sqrt(2)).erf()) / 2


ACTIVATIONS = {"silu_mul": silu, "gelu_mul": gelu, "gelu_erf_mul": gelu_erf}
each_activation = pytest.mark.parametrize("name", list(ACTIVATIONS))


@each_dtype
@each_size
@each_activation
def test_activation_times_gate(kernels: Kernels, name: str, dtype: torch.dtype, num_rows: int) -> None:
    gate_up = 4 * torch.randn(num_rows, 2 * 300).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(getattr(kernels, name)(gate_up), ACTIVATIONS[name](gate) * up, dtype)


@each_activation
def test_activations_of_extremes(kernels: Kernels, name: str) -> None:
    gate_up = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 90.0]])
    torch.testing.assert_close(getattr(kernels, name)(gate_up), expected, atol=1e-6, rtol=1e-6)


def test_two_threads_give_the_same(kernels: Kernels) -> None:
    x, residual = torch.randn(2, 200, 576)
    weight = torch.rand(576)
    alone = kernels.rms_norm(x, weight, 1e-5, residual.clone())[0], kernels.silu_mul(x)
    torch.set_num_threads(2)
    together = kernels.rms_norm(x, weight, 1e-5, residual.clone())[0], kernels.silu_mul(x)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
