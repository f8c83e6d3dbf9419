"""A product of bytes by AMX tiles is the one by the tiles that every processor has, bit for bit; one of bfloat16 is
exact but for the order of its sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import cpu_linear_int8, reference
from octavo.kernels.cpu_amx import has_amx
from octavo.kernels.cpu_linear_amx import AmxHalfLinear, AmxInt8Linear
from octavo.kernels.cpu_linear_int8 import Int8Linear
from octavo.kernels.cpu_program import Team
from octavo.kernels.quantized import Int8Weight, dequantize, quantize_int8

pytestmark = pytest.mark.skipif(
    not (has_amx(torch.int8) and has_amx(torch.bfloat16)), reason="this processor has no AMX, or Linux does not let us"
)


@pytest.fixture(autouse=True)
def no_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear_int8, "has_byte_products", lambda: False)


@settings(settings.get_profile("kernels"))
@given(
    num_rows=st.one_of(st.integers(0, 40), st.sampled_from([64, 65, 100])),
    num_in=st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 1024])),
    num_out=st.one_of(st.integers(1, 100), st.sampled_from([576, 1000])),
    digits=st.sampled_from([1, 2]),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
)
def test_it_is_that_of_the_tiles(
    num_rows: int, num_in: int, num_out: int, digits: int, has_bias: bool, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    plain, x, bias = torch.randn(num_out, num_in), torch.randn(num_rows, num_in), torch.randn(num_out)
    weight, offset = quantize_int8(plain, input_digits=digits), bias if has_bias else None
    product = AmxInt8Linear(Team(), weight, offset)(x)
    assert torch.equal(product, Int8Linear(Team(), weight, offset)(x))
    error = (product - reference.prepare_linear(weight, offset)(x)).abs()
    assert (error <= 1e-5 * x.norm(dim=1)[:, None] * dequantize(weight).norm(dim=1) + 1e-6).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 500])
def test_a_row_does_not_depend_on_other_rows(num_rows: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    product = AmxInt8Linear(Team(), quantize_int8(torch.randn(1000, 300)))
    x = torch.randn(500, 300)
    assert torch.equal(product(x[:num_rows]), product(x)[:num_rows])
    assert torch.equal(product(x[-num_rows:]), product(x)[-num_rows:])


@settings(settings.get_profile("kernels"))
@given(
    num_rows=st.one_of(st.integers(0, 40), st.sampled_from([64, 65, 100])),
    num_in=st.one_of(st.integers(1, 100), st.sampled_from([64, 1024])),
    num_out=st.one_of(st.integers(1, 100), st.sampled_from([576, 1000])),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
)
def test_bfloat16(num_rows: int, num_in: int, num_out: int, has_bias: bool, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    weight, x, bias = torch.randn(num_out, num_in).bfloat16(), torch.randn(num_rows, num_in), torch.randn(num_out)
    product = AmxHalfLinear(Team(), weight, bias if has_bias else None)(x)
    expected = x.bfloat16().double() @ weight.double().t() + (bias if has_bias else 0)
    assert product.dtype == torch.float32
    size = x.norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((product - expected).abs() <= 1e-6 * size + 1e-6).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 17, 500])
def test_a_row_in_bfloat16_does_not_depend_on_other_rows(num_rows: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    product = AmxHalfLinear(Team(), torch.randn(1000, 300).bfloat16())
    x = torch.randn(500, 300)
    assert torch.equal(product(x[:num_rows]), product(x)[:num_rows])
    assert torch.equal(product(x[-num_rows:]), product(x)[-num_rows:])


SPECIAL = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.3e38, 3.4e38, torch.inf, -torch.inf, torch.nan, 2e-38]


def test_inputs_are_rounded_as_torch_rounds_them() -> None:
    """To even; beyond the largest number to infinity."""
    x = torch.cat((torch.tensor(SPECIAL), torch.randn(1000))).view(-1, 1)
    one = AmxHalfLinear(Team(), torch.ones(1, 1).bfloat16())
    torch.testing.assert_close(one(x), x.bfloat16().float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("digits", [1, 2])
def test_nan_stays_in_its_row(digits: int) -> None:
    product = AmxInt8Linear(Team(), quantize_int8(torch.randn(70, 100), input_digits=digits))
    x = torch.randn(20, 100)
    expected = product(x)
    expected[3] = torch.nan
    x[3, 7] = torch.nan
    torch.testing.assert_close(product(x), expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_sums_are_exact(num_rows: int) -> None:
    values = torch.where(torch.rand(40, 1100) < 0.9, 127, -127).to(torch.int8)
    x = torch.where(torch.rand(num_rows, 1100) < 0.9, 127.0, -127.0)  # whose scale is 1
    product = AmxInt8Linear(Team(), Int8Weight(values, torch.ones(40)))(x)
    assert torch.equal(product.double(), (x.double() @ values.double().t()).float().double())
