"""A packed layer computes what torch's linear does, at any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.backend import Kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
