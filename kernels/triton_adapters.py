"""LoRA adapters on GPUs: rows sorted by adapter once a step, then two grouped products for each layer's product.

Programs find their rows as those of experts do; see triton_experts_kernels.py. Rows without an adapter come first in
the order and belong to no program. One tile for any number of rows: a row's result does not depend on the others.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adapters import RowAdapters, check_adapter, check_sizes
from .triton_device import Device
from .triton_experts import most_tiles
from .triton_experts_kernels import find_rows, multiply_tile
from .triton_linear_tiles import Tile

TILES = {
    2: Tile(rows=16, columns=64, inner=64, num_warps=4, num_stages=3),
    4: Tile(rows=16, columns=64, inner=32, num_warps=4, num_stages=3),
}
"""By the bytes of an element."""


@triton.jit
def adapter_kernel(
    x,
    weight,
    order,
    starts,
    out,
    num_out,
    num_in,
    x_stride,
    out_stride,
    IS_SECOND: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The first product goes from the rows to their places in the order, the second back, added to what is there.
    ``weight [slots, out, in]``. Grid (tiles, column tiles)."""
    slot, begin, end = find_rows(starts, tl.program_id(0), NUM_SLOTS, SLOTS_PADDED, ROWS)
    if slot < NUM_SLOTS:
        place = begin + tl.arange(0, ROWS)
        exists = place < end
        row = tl.load(order + place, mask=exists, other=0).to(tl.int64)
        source = place.to(tl.int64) if IS_SECOND else row
        target = row if IS_SECOND else place.to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        column_exists = column < num_out
        x_rows = x + source * x_stride
        weight_rows = weight + (slot.to(tl.int64) * num_out + column) * num_in
        total = multiply_tile(x_rows, weight_rows, exists, column_exists, num_in, ROWS, COLUMNS, INNER, UPCAST)
        out_at = out + target[:, None] * out_stride + column[None, :]
        stored = exists[:, None] & column_exists[None, :]
        if IS_SECOND:
            total += tl.load(out_at, mask=stored, other=0.0).to(tl.float32)
        tl.store(out_at, total.to(out.dtype.element_ty), mask=stored)


def group_rows(slots: Tensor, num_slots: int) -> RowAdapters:
    """Sorted; asks the device for nothing."""
    ordered, order = slots.sort(stable=True)
    bounds = torch.arange(num_slots + 1, dtype=slots.dtype, device=slots.device)
    return RowAdapters(slots, order, torch.searchsorted(ordered, bounds, out_int32=True))


class Adapters:
    """See ``adapters.AdapterProduct``. ``dtype`` is the activations'."""

    def __init__(
        self, num_slots: int, max_rank: int, num_in: int, num_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        check_sizes(num_slots, max_rank)
        self._sizes = num_slots, max_rank, num_in, num_out
        self._first = torch.zeros(num_slots, max_rank, num_in, dtype=dtype, device=device)
        self._second = torch.zeros(num_slots, num_out, max_rank, dtype=dtype, device=device)

    def load(self, slot: int, a: Tensor, b: Tensor) -> None:
        check_adapter(slot, a, b, *self._sizes)
        for of_slot, part in ((self._first[slot], a), (self._second[slot], b)):
            of_slot.zero_()
            of_slot[: part.shape[0], : part.shape[1]] = part

    def __call__(self, x: Tensor, out: Tensor, rows: RowAdapters) -> Tensor:
        inner = torch.empty((x.shape[0], self._sizes[1]), dtype=x.dtype, device=x.device)
        if x.shape[0] > 0:
            self._multiply(x, self._first, inner, rows, is_second=False)
            self._multiply(inner, self._second, out, rows, is_second=True)
        return out

    def _multiply(self, x: Tensor, weight: Tensor, out: Tensor, rows: RowAdapters, *, is_second: bool) -> None:
        num_slots, num_out, num_in = weight.shape
        tile = TILES[weight.element_size()]
        num_tiles = most_tiles(x.shape[0], num_slots, tile.rows)
        adapter_kernel[(num_tiles, triton.cdiv(num_out, tile.columns))](
            x,
            weight,
            rows.order,
            rows.starts,
            out,
            num_out,
            num_in,
            x.stride(0),
            out.stride(0),
            IS_SECOND=is_second,
            NUM_SLOTS=num_slots,
            SLOTS_PADDED=triton.next_power_of_2(num_slots),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            INNER=tile.inner,
            # See triton_linear_scaled.gemm.
            UPCAST=triton.knobs.runtime.interpret and weight.dtype == torch.bfloat16,
            **tile.options(Device.of(x.device)),
        )
