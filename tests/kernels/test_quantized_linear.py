"""A product by a quantised weight is what the reference says, at any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.backend import Kernels, reference_kernels
from octavo.kernels.quantized import Int4Weight, Weight, dequantize, quantize_fp8, quantize_int8

NUM_ROWS = st.sampled_from([1, 2, 17, 33, 70])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""What rounding and another order of sums may add, beside the length of a row times that of a column."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def random_int4(
    num_out: int, group_size: int, num_groups: int, dtype: torch.dtype = torch.float16, *, permuted: bool = False
) -> Int4Weight:
    num_in = group_size * num_groups
    packed = torch.randint(256, (num_out, num_in // 2)).to(torch.uint8)
    scales, minimums = torch.rand(2, num_out, num_groups).to(dtype)
    return Int4Weight(packed, scales, -8 * minimums, torch.randperm(num_in) if permuted else None)


def assert_as_reference(kernels: Kernels, weight: Weight, bias: Tensor | None, x: Tensor) -> None:
    product = kernels.prepare_linear(weight, bias)(x)
    expected = reference.prepare_linear(weight, bias)(x.float())
    assert product.shape == expected.shape
    assert product.dtype == x.dtype
    size = x.float().norm(dim=1)[:, None] * dequantize(weight).norm(dim=1) + expected.abs()
    assert ((product.float() - expected).abs() <= TOLERANCE[x.dtype] * size).all()


@pytest.fixture(scope="session")
def fp8_kernels(kernels: Kernels) -> Kernels:
    """CPUs refuse fp8."""
    return reference_kernels() if kernels.name == "cpu" else kernels


@settings(settings.get_profile("kernels"))
@given(
    form=st.sampled_from(["int8", "two digits", "fp8"]),
    num_rows=NUM_ROWS,
    num_in=st.sampled_from([16, 48, 130, 288]),
    num_out=st.integers(1, 150),
    dtype=DTYPES,
    has_bias=st.booleans(),
)
def test_int8_and_fp8(
    kernels: Kernels,
    fp8_kernels: Kernels,
    form: str,
    num_rows: int,
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    plain, x = randn(num_out, num_in, seed=2), randn(num_rows, num_in, dtype=dtype)
    bias = randn(num_out, seed=1) if has_bias else None
    if form == "fp8":
        assert_as_reference(fp8_kernels, quantize_fp8(plain), bias, x)
    else:
        assert_as_reference(kernels, quantize_int8(plain, input_digits=1 + (form == "two digits")), bias, x)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_two_digits_hold_what_lies_beside_an_outlier(kernels: Kernels, num_rows: int) -> None:
    plain, x = randn(20, 64), randn(num_rows, 64, seed=1)
    x[:, 5] = 500.0
    exact = x @ dequantize(quantize_int8(plain)).T

    def error(digits: int) -> float:
        product = kernels.prepare_linear(quantize_int8(plain, input_digits=digits))(x)
        return float((product - exact).abs().max())

    assert error(2) < error(1) / 50


@settings(settings.get_profile("kernels"))
@given(
    num_rows=NUM_ROWS,
    groups=st.sampled_from([(32, 1), (32, 5), (64, 3), (96, 2), (128, 1), (128, 3), (48, 1), (130, 1), (288, 1)]),
    num_out=st.integers(1, 150),
    dtype=DTYPES,
    dtype_of_scales=st.sampled_from([torch.float16, torch.float32]),
    has_bias=st.booleans(),
    permuted=st.booleans(),
)
def test_int4(
    kernels: Kernels,
    num_rows: int,
    groups: tuple[int, int],
    num_out: int,
    dtype: torch.dtype,
    dtype_of_scales: torch.dtype,
    has_bias: bool,
    permuted: bool,
) -> None:
    """``groups``: the size of each, and how many."""
    bias = randn(num_out, seed=1) if has_bias else None
    weight = random_int4(num_out, *groups, dtype_of_scales, permuted=permuted)
    assert_as_reference(kernels, weight, bias, randn(num_rows, groups[0] * groups[1], dtype=dtype))


WEIGHTS: dict[str, Callable[[int, int], Weight]] = {
    "plain": lambda num_out, num_in: randn(num_out, num_in, seed=2),
    "bfloat16": lambda num_out, num_in: randn(num_out, num_in, seed=2, dtype=torch.bfloat16),
    "int8": lambda num_out, num_in: quantize_int8(randn(num_out, num_in, seed=2)),
    "fp8": lambda num_out, num_in: quantize_fp8(randn(num_out, num_in, seed=2)),
    "int4": lambda num_out, num_in: random_int4(num_out, 32, num_in // 32),
}


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_rows_may_lie_apart_and_there_may_be_none(fp8_kernels: Kernels, kernels: Kernels, kind: str) -> None:
    kernels = fp8_kernels if kind == "fp8" else kernels
    weight, x = WEIGHTS[kind](70, 96), randn(5, 200)
    assert_as_reference(kernels, weight, None, x[:, 100:196])
    assert_as_reference(kernels, weight, None, randn(96, 5).T)
    assert kernels.prepare_linear(weight)(x[:0, :96]).shape == (0, 70)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_a_row_of_zeros_gives_the_bias(fp8_kernels: Kernels, kernels: Kernels, kind: str) -> None:
    kernels = fp8_kernels if kind == "fp8" else kernels
    bias = randn(20)
    product = kernels.prepare_linear(WEIGHTS[kind](20, 64), bias)(torch.zeros(2, 64))
    torch.testing.assert_close(product, bias.expand(2, 20))


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_few_rows_of_many_channels(wide_kernels: Kernels, kind: str) -> None:
    """Many programs share a result, and each time they add it up anew."""
    kernels = reference_kernels() if wide_kernels.name == "cpu" and kind == "fp8" else wide_kernels
    weight, x = WEIGHTS[kind](70, 1120), randn(3, 1120)
    assert_as_reference(kernels, weight, randn(70), x)
    product = kernels.prepare_linear(weight)
    first = product(x)
    assert torch.equal(product(x), first)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_row_does_not_depend_on_how_many_there_are(invariant_kernels: Kernels, kind: str) -> None:
    """Exactly where that is promised."""
    kernels = (
        reference_kernels() if invariant_kernels.name == "cpu" and kind in ("fp8", "bfloat16") else invariant_kernels
    )
    product, x = kernels.prepare_linear(WEIGHTS[kind](70, 160)), randn(70, 160)
    whole = product(x)
    for num_rows in (1, 3, 17):
        tolerance = 0.1 if kernels.name == "reference" else 0.0
        torch.testing.assert_close(product(x[:num_rows]), whole[:num_rows], atol=tolerance, rtol=0)


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_number_that_is_none_spoils_its_own_row(num_rows: int, digits: int, kernels: Kernels) -> None:
    """NaN must reach the logits, where it becomes an error; rounded, it would become some integer."""
    x = randn(num_rows, 64)
    x[0, 5] = torch.nan
    product = kernels.prepare_linear(quantize_int8(randn(32, 64, seed=1), input_digits=digits))(x)
    assert product[0].isnan().all()
    assert product[1:].isfinite().all()
