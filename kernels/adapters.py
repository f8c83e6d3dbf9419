"""LoRA (Hu et al. 2021): which adapter each row of a batch has, and what adapters add to a product, in plain torch.

A layer's product has *slots*, of which each holds an adapter's two matrices. Adapters come and go while requests are
served: a slot's memory stays where it is, so that recorded programs and graphs stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST_RANK = 64


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of a step's rows, for all layers."""

    slots: Tensor
    """int32 ``[T]``: -1 is none."""
    order: Tensor | None = None
    """On GPUs int64 ``[T]``: rows by slot."""
    starts: Tensor | None = None
    """On GPUs int32 ``[num_slots + 1]``: where in ``order`` each slot's rows begin."""


class AdapterProduct(Protocol):
    """A layer's adapters."""

    def load(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Fill a slot with ``a [rank, in]`` and ``b [out, rank]``; a factor for the whole belongs into ``b``. No step
        may run meanwhile. Raises ValueError for a slot, a rank or a shape that there is no room for."""
        ...

    def __call__(self, x: Tensor, out: Tensor, rows: RowAdapters) -> Tensor:
        """``out [T, out]``, in place: each row that has an adapter gets ``b @ (a @ x)`` added. ``x [T, in]``."""
        ...


class PrepareAdapters(Protocol):
    """Room for ``num_slots`` adapters of a layer's product from ``in`` to ``out``, all of them zeros.

    ``dtype`` and ``device`` are the activations'. Raises ValueError for sizes, or on CPUs a dtype, without a kernel.
    """

    def __call__(
        self, num_slots: int, max_rank: int, num_in: int, num_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> AdapterProduct: ...


class ReferenceAdapters:
    """Row by row."""

    def __init__(
        self, num_slots: int, max_rank: int, num_in: int, num_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        check_sizes(num_slots, max_rank)
        self._sizes = num_slots, max_rank, num_in, num_out
        self._dtype = dtype
        self._device = device
        self._of_slot: dict[int, tuple[Tensor, Tensor]] = {}

    def load(self, slot: int, a: Tensor, b: Tensor) -> None:
        check_adapter(slot, a, b, *self._sizes)
        kept = [part.to(self._device, self._dtype).float() for part in (a, b)]
        self._of_slot[slot] = kept[0], kept[1]

    def __call__(self, x: Tensor, out: Tensor, rows: RowAdapters) -> Tensor:
        for row, slot in enumerate(rows.slots.tolist()):
            if slot in self._of_slot:
                a, b = self._of_slot[slot]
                out[row] += (b @ (a @ x[row].float())).to(out.dtype)
        return out


def group_rows(slots: Tensor, num_slots: int) -> RowAdapters:
    """Where the rows are not sorted."""
    return RowAdapters(slots)


def check_adapter(slot: int, a: Tensor, b: Tensor, num_slots: int, max_rank: int, num_in: int, num_out: int) -> None:
    """Raises ValueError where an adapter does not fit."""
    if not 0 <= slot < num_slots:
        raise ValueError(f"slot is {slot}, expected 0 to {num_slots - 1}")
    rank = a.shape[0]
    if not 1 <= rank <= max_rank:
        raise ValueError(f"the adapter's rank is {rank}, expected 1 to {max_rank}")
    if a.shape != (rank, num_in) or b.shape != (num_out, rank):
        raise ValueError(
            f"the adapter's matrices are {tuple(a.shape)} and {tuple(b.shape)}, "
            f"expected {(rank, num_in)} and {(num_out, rank)}"
        )


def check_sizes(num_slots: int, max_rank: int) -> None:
    """Raises ValueError for slots or ranks that no kernel has room for."""
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}, expected at least 1")
    if not 1 <= max_rank <= LARGEST_RANK:
        raise ValueError(f"max_rank is {max_rank}, expected 1 to {LARGEST_RANK}")
