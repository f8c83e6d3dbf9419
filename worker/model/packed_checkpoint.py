"""Matrices that a GPTQ or AWQ checkpoint stores in 4 bits, read exactly: weight = scale × (q − zero).

For a matrix ``[out, in]`` that would be ``NAME.weight`` there are, with ``g`` groups of input channels::

                  GPTQ                                   AWQ
    NAME.qweight  int32 [in / 8, out]                    int32 [in, out / 8]
    NAME.qzeros   int32 [g, out / 8]                     int32 [g, out / 8]
    NAME.scales   float [g, out]                         float [g, out]
    NAME.g_idx    int32 [in]: each input channel's group

Eight numbers lie in an int32, the first in the lowest bits; AWQ has them in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ's
first format stores zero points less one, its second ("gptq_v2") and AWQ as they are. (``pack`` of the linear layers of
AutoGPTQ, GPTQModel and AutoAWQ.) A rank reads the int32s that its slice touches and cuts what is over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels.quantized import Int4Weight
from ..errors import ConfigurationError
from .matrices import Part, Share, span
from .packing import NIBBLES, Packing, PackingMethod

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight output channels lies at each place of an int32."""


class _PackedMatrix:
    """Scales and zero points, which both formats store alike but for the order."""

    order: tuple[int, ...] = tuple(range(NIBBLES))

    def __init__(self, share: Share, packing: Packing, device: torch.device) -> None:
        self._name = share.name.removesuffix(".weight")
        self._share = share
        self._packing = packing
        self._device = device
        self._group_size = packing.group_size or share.shape[1]
        self._refuse_uneven(share.shape)
        self._groups = self._owned_groups(share.columns)

    def parts(self) -> Iterator[Part]:
        (out, inputs), rows = self._share.shape, self._share.rows
        groups, zeros = inputs // self._group_size, _words(rows)
        self._scales = self._empty(len(self._groups), len(rows), dtype=torch.float32)
        self._zeros = self._empty(len(self._groups), len(zeros))
        yield self._part("scales", (groups, out), self._groups, rows, self._scales)
        yield self._part("qzeros", (groups, out // NIBBLES), self._groups, zeros, self._zeros)

    def _weight(self, q: Tensor, permutation: Tensor | None) -> Int4Weight:
        """Of the numbers ``q``, uint8 ``[out, in]``."""
        zeros = _cut(_unpacked(self._zeros, self.order), self._share.rows) + self._packing.zero_offset
        scales, minimums = self._scales, -self._scales * zeros
        del self._scales, self._zeros
        packed = q[:, 0::2] | q[:, 1::2] << 4
        return Int4Weight(packed, scales.T.contiguous(), minimums.T.contiguous(), permutation)

    def _part(self, what: str, shape: tuple[int, int], rows: range, columns: range, target: Tensor) -> Part:
        return Part(f"{self._name}.{what}", shape, (span(rows), span(columns)), target)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _owned_groups(self, columns: range) -> range:
        """Raises ConfigurationError when a group belongs to two ranks: a slice has whole groups or is of one."""
        size = self._group_size
        if self._packing.group_size is None:
            return range(1)
        if columns.start % size or columns.stop % size:
            raise ConfigurationError(
                f"--tensor-parallel-size: a rank would own the input channels {columns.start} to {columns.stop} of "
                f"{self._name}, which cuts a group of {size}"
            )
        return range(columns.start // size, columns.stop // size)

    def _refuse_uneven(self, shape: tuple[int, int]) -> None:
        for size, what, unit in (
            (shape[0], "output channels, which are not stored in eights", NIBBLES),
            (shape[1], "input channels, which are not stored in eights", NIBBLES),
            (shape[1], f"input channels, which are not whole groups of {self._group_size}", self._group_size),
        ):
            if size % unit:
                raise ConfigurationError(f"{self._name}, {self._packing.describe()}, has {size} {what}")


class GptqMatrix(_PackedMatrix):
    def parts(self) -> Iterator[Part]:
        (out, inputs), rows, words = self._share.shape, self._share.rows, _words(self._share.columns)
        self._words = self._empty(len(words), len(rows))
        self._group_of = self._empty(len(self._share.columns))
        yield self._part("qweight", (inputs // NIBBLES, out), words, rows, self._words)
        yield Part(f"{self._name}.g_idx", (inputs,), (span(self._share.columns),), self._group_of)
        yield from super().parts()

    def weight(self) -> Int4Weight:
        q = _cut(_unpacked(self._words.T.contiguous(), self.order), self._share.columns)
        permutation = self._permutation()
        del self._words, self._group_of
        return self._weight(q if permutation is None else q[:, permutation], permutation)

    def _permutation(self) -> Tensor | None:
        """The input channels in the order of their groups, int64 ``[in]``; None where they have it."""
        size = len(self._share.columns) // len(self._groups)
        group_of = self._group_of - self._groups.start
        expected = torch.arange(len(self._groups), device=self._device).repeat_interleave(size)
        if torch.equal(group_of.long(), expected):
            return None
        order = group_of.argsort(stable=True)
        if not torch.equal(group_of[order].long(), expected):
            raise ConfigurationError(
                f"{self._name}.g_idx does not give each group {size} of the input channels "
                f"{self._share.columns.start} to {self._share.columns.stop}"
            )
        return order


class AwqMatrix(_PackedMatrix):
    order = AWQ_ORDER

    def parts(self) -> Iterator[Part]:
        (out, inputs), columns, words = self._share.shape, self._share.columns, _words(self._share.rows)
        self._words = self._empty(len(columns), len(words))
        yield self._part("qweight", (inputs, out // NIBBLES), columns, words, self._words)
        yield from super().parts()

    def weight(self) -> Int4Weight:
        q = _cut(_unpacked(self._words, self.order), self._share.rows)
        del self._words
        return self._weight(q.T.contiguous(), None)


def packed_matrix(share: Share, packing: Packing, device: torch.device) -> GptqMatrix | AwqMatrix:
    """Raises ConfigurationError, with the numbers, for a shape or a slice that is not whole groups."""
    kind = GptqMatrix if packing.method is PackingMethod.GPTQ else AwqMatrix
    return kind(share, packing, device)


def _words(run: range) -> range:
    """The int32s that hold a run of numbers."""
    return range(run.start // NIBBLES, -(-run.stop // NIBBLES))


def _cut(numbers: Tensor, run: range) -> Tensor:
    """The run, of the columns of the int32s that hold it."""
    first = run.start % NIBBLES
    return numbers[:, first : first + len(run)]


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """int32 ``[n, m]`` to uint8 ``[n, 8 m]``; ``order`` says whose number lies at each place of an int32."""
    places = [order.index(number) for number in range(NIBBLES)]
    shifts = 4 * torch.tensor(places, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts & 15).to(torch.uint8).flatten(1)
