"""A layer's product is torch's, at any number of rows, and on CPUs a row's product is its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import cpu_linear, cpu_linear_int8, reference
from octavo.kernels.backend import Kernels, cpu_kernels
from octavo.kernels.cpu_linear import prepare_linear
from octavo.kernels.cpu_linear_int8 import Int8Linear, has_byte_products
from octavo.kernels.cpu_program import Team
from octavo.kernels.cpu_tiles import INT8_TILE_ROWS, TILE_ROWS
from octavo.kernels.quantized import Int4Weight, Int8Weight, Weight, dequantize, quantize_fp8, quantize_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 65, 300])
def test_linear(kernels: Kernels, dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    weight, x = torch.randn(70, 48).to(dtype), torch.randn(num_rows, 48).to(dtype)
    offset = torch.randn(70).to(dtype) if bias else None
    product = kernels.prepare_linear(weight, offset)(x)
    assert product.shape == (num_rows, 70)
    assert product.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=0)


def test_no_rows(kernels: Kernels) -> None:
    assert kernels.prepare_linear(torch.randn(70, 48))(torch.randn(0, 48)).shape == (0, 70)


def test_rows_may_lie_apart(kernels: Kernels) -> None:
    weight, x = torch.randn(70, 48), torch.randn(9, 100)
    product = kernels.prepare_linear(weight)
    for part in (x[:, 3:51], x.t()[:48].t(), torch.randn(48, 9).t()):
        torch.testing.assert_close(product(part), F.linear(part, weight), atol=1e-4, rtol=0)


def int4_weight(num_out: int, num_in: int, group_size: int) -> Int4Weight:
    scales, minimums = torch.rand(2, num_out, num_in // group_size)
    packed = torch.randint(256, (num_out, num_in // 2)).to(torch.uint8)
    return Int4Weight(packed, scales + 0.5, -8 * minimums)


WEIGHTS: dict[str, Callable[[], Weight]] = {
    "float32": lambda: torch.randn(150, 96),
    "int8": lambda: quantize_int8(torch.randn(150, 96)),
    "int4": lambda: int4_weight(150, 96, 32),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_row_on_cpus_does_not_depend_on_other_rows(kind: str, num_threads: int) -> None:
    """Bit for bit: not on their number, nor on its place, nor on the threads."""
    torch.set_num_threads(num_threads)
    product = cpu_kernels().prepare_linear(WEIGHTS[kind](), torch.randn(150))
    x = torch.randn(800, 96)
    whole = product(x)
    for num_rows in {1, 2, 3, 16, 64, 400} | set(range(1, TILE_ROWS + INT8_TILE_ROWS)):
        assert torch.equal(product(x[:num_rows]), whole[:num_rows])
        assert torch.equal(product(x[-num_rows:]), whole[-num_rows:])


@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 12, 13, 40])
def test_int8_sums_are_exact(monkeypatch: pytest.MonkeyPatch, num_rows: int, has_units: bool) -> None:
    """The largest products there are do not saturate, by the tiles and by oneDNN where it multiplies bytes."""
    monkeypatch.setattr(cpu_linear_int8, "has_byte_products", lambda: has_units and has_byte_products())
    values = torch.where(torch.rand(40, 1100) < 0.9, 127, -127).to(torch.int8)
    x = torch.where(torch.rand(num_rows, 1100) < 0.9, 127.0, -127.0)  # whose scale is 1
    product = Int8Linear(Team(), Int8Weight(values, torch.ones(40)))(x)
    assert torch.equal(product.double(), (x.double() @ values.double().t()).float().double())


def test_int8_by_tiles_and_by_onednn_is_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = quantize_int8(torch.randn(100, 130)), torch.randn(100), torch.randn(50, 130)
    product = Int8Linear(Team(), weight, bias)(x)
    monkeypatch.setattr(cpu_linear_int8, "has_byte_products", lambda: False)
    assert torch.equal(product, Int8Linear(Team(), weight, bias)(x))


def test_int8_without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_amx", lambda dtype: False)
    assert isinstance(prepare_linear(Team(), quantize_int8(torch.randn(10, 10))), Int8Linear)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("num_in", "group_size"), [(96, 32), (256, 128), (66, 66)])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_int4_on_cpus(num_in: int, group_size: int, ordered: bool, num_rows: int) -> None:
    plain = int4_weight(70, num_in, group_size)
    permutation = None if ordered else torch.randperm(num_in)
    weight = Int4Weight(plain.packed, plain.scales.half(), plain.minimums.half(), permutation)
    assert_as_reference(weight, torch.randn(70), torch.randn(num_rows, num_in))


def assert_as_reference(weight: Weight, bias: Tensor, x: Tensor) -> None:
    expected = reference.prepare_linear(weight, bias)(x)
    size = x.norm(dim=1)[:, None] * dequantize(weight).norm(dim=1)
    assert ((prepare_linear(Team(), weight, bias)(x) - expected).abs() / size).max() < 1e-6


def test_fp8_is_refused_on_cpus() -> None:
    with pytest.raises(ValueError, match="fp8"):
        prepare_linear(Team(), quantize_fp8(torch.randn(4, 4)))
