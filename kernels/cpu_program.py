"""Team and Program: kernels on CPUs run at once, or recorded and played back in a parallel region for all of them.

Calling a kernel from Python and waking the other threads for it takes as long as a small model's arithmetic: some two
hundred calls a step. A program is the list of what was called, at the addresses that were used, for any number of rows
up to those it was recorded with. It is to a CPU what a CUDA graph is to a GPU, but for the sizes: each kernel reads its
number of rows when it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .cpu_numba import claim_threads
from .cpu_team import LAUNCH_WORDS, RUN_LAUNCHES, TALLY_WORDS

T = TypeVar("T")
Words = npt.NDArray[np.int64]

CALL_WORDS = 16
"""Most words of a call that a launch reads: the number of rows, and what its planner adds."""

_ALIGNMENT = 64
"""Bytes: a cache line."""


class Launch(NamedTuple):
    """A call of a function of ``cpu_team.compile_work``."""

    address: int
    words: Sequence[int]


class BatchSizes(NamedTuple):
    """What changes from call to call beside the number of rows; see ``reference.paged_attention``."""

    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    table_width: int
    """Blocks of a row of the block tables."""


class Planner(Protocol):
    """Prepares launches whose work depends on more than the number of rows. Equal planners give equal plans."""

    def plan(self, sizes: BatchSizes, threads: int) -> tuple[Sequence[int], Any]:
        """Words for the launches to read after the number of rows; and what must be kept while they run."""
        ...


class Team:
    """The threads of a rank: as many as torch has. Used by one thread at a time."""

    def __init__(self) -> None:
        self._program: Program | None = None

    def run(
        self,
        launches: Sequence[Launch],
        rows: int,
        *,
        planned: tuple[Planner, BatchSizes] | None = None,
        is_small: bool = False,
    ) -> None:
        """Run the launches one after the other now, or note them for a program.

        ``is_small``: waking other threads costs more than they bring.
        """
        if self._program is not None:
            self._program.add(launches, planned[0] if planned else None)
            return
        threads = 1 if is_small else claim_threads()
        call, keep = [rows], None
        if planned is not None:
            more, keep = planned[0].plan(planned[1], threads)
            call += more
        _run(_in_memory(launches, [0] * len(launches)), np.array(call, np.int64), threads)
        del keep

    def between(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, which works in place or gives a new tensor; not a kernel of the team."""
        if self._program is None:
            return function(x)
        self.call(lambda rows, x: x[:rows].copy_(function(x[:rows])), x.shape[0], x)
        return x

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """``[T, n]`` of each → ``[T, sum of n]``."""
        num_rows = parts[0].shape[0]
        out = self.empty(num_rows, sum(part.shape[1] for part in parts), dtype=parts[0].dtype)

        def join(rows: int, out: Tensor, *parts: Tensor) -> None:
            torch.cat([part[:rows] for part in parts], dim=1, out=out[:rows])

        self.call(join, num_rows, out, *parts)
        return out

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """``x + other``, in x's memory; both ``[T, n]``."""
        self.call(lambda rows, x, other: x[:rows].add_(other[:rows]), x.shape[0], x, other)
        return x

    def call(self, function: Callable[..., object], rows: int, *tensors: Tensor) -> None:
        """``function(number of rows, *tensors)``, now or whenever the program comes to it.

        It must refer to no other tensor of the program: those it is given leave their memory free to be used again.
        """
        if self._program is None:
            function(rows, *tensors)
            return
        aliases = [self._program.memory.alias(tensor) for tensor in tensors]
        self._program.add_call(lambda rows: function(rows, *aliases))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for what a kernel gives. A program's is used again, but never for two tensors that both live."""
        return torch.empty(shape, dtype=dtype) if self._program is None else self._program.memory.empty(shape, dtype)

    def record(self, build: Callable[[], T]) -> tuple[Program, T]:
        """What ``build`` calls, for tensors of at least the most rows that there will be; nothing is computed yet.

        Also gives what ``build`` returns, which the program fills in. Raises NotRecordable.
        """
        if self._program is not None:
            raise RuntimeError("a program is being recorded already")
        self._program = program = Program()
        try:
            result = build()
        finally:
            self._program = None
        program.close()
        return program, result

    def must_not_record(self, what: str) -> None:
        """Raises NotRecordable where a program is being recorded."""
        if self._program is not None:
            raise NotRecordable(f"{what} cannot be recorded")


class NotRecordable(Exception):
    """A kernel has no form that could be played back."""


@dataclass
class _Stretch:
    """Steps that follow each other; closed, their words in memory."""

    launches: list[Launch] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    """Of each launch, where in the call's words its own begin."""
    in_memory: Words = field(default_factory=lambda: np.empty((0, LAUNCH_WORDS), np.int64))


class Program:
    """Recorded launches, and calls of other functions between them."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._parts: list[_Stretch | Callable[[int], object]] = []
        self._planners: dict[Planner, int] = {}
        """Each with the place of its words among a call's; the first place is that of launches without."""

    def add(self, launches: Sequence[Launch], planner: Planner | None) -> None:
        own = 0 if planner is None else self._planners.setdefault(planner, CALL_WORDS * (1 + len(self._planners)))
        stretch = self._parts[-1] if self._parts else None
        if not isinstance(stretch, _Stretch):
            stretch = _Stretch()
            self._parts.append(stretch)
        stretch.launches += launches
        stretch.own += [own] * len(launches)

    def add_call(self, function: Callable[[int], object]) -> None:
        self._parts.append(function)

    def close(self) -> None:
        """Nothing more is added."""
        for part in self._parts:
            if isinstance(part, _Stretch):
                part.in_memory = _in_memory(part.launches, part.own)
        self._call = np.zeros(CALL_WORDS * (1 + len(self._planners)), np.int64)

    def play(self, rows: int, sizes: BatchSizes) -> None:
        """Compute, for the first ``rows`` rows of what it was recorded with."""
        threads, kept = claim_threads(), []
        self._call[::CALL_WORDS] = rows
        for planner, at in self._planners.items():
            more, keep = planner.plan(sizes, threads)
            if len(more) >= CALL_WORDS:
                raise ValueError(
                    f"{type(planner).__name__} gives {len(more)} words; there is room for {CALL_WORDS - 1}"
                )
            self._call[at + 1 : at + 1 + len(more)] = more
            kept.append(keep)
        for part in self._parts:
            if isinstance(part, _Stretch):
                _run(part.in_memory, self._call, threads)
            else:
                part(rows)


class Memory:
    """Tensors whose memory is used again when nothing refers to them any more, as CUDA graphs' pools do."""

    def __init__(self) -> None:
        self._blocks: list[tuple[npt.NDArray[np.uint8], Callable[[], object]]] = []
        """Each with a reference to the array that was given out last, which is dead when no tensor has it."""

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block, _ in self._blocks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Aligned to a cache line. The smallest block that is large enough and free."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        free = [i for i, (block, given) in enumerate(self._blocks) if given() is None and block.nbytes >= num_bytes]
        index = min(free, key=lambda i: self._blocks[i][0].nbytes, default=None)
        block = _aligned(num_bytes) if index is None else self._blocks[index][0]
        array = block[:num_bytes]
        given = (block, weakref.ref(array))
        if index is None:
            self._blocks.append(given)
        else:
            self._blocks[index] = given
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def alias(self, tensor: Tensor) -> Tensor:
        """The same numbers, without a claim on their memory; a tensor from elsewhere itself."""
        for block, _ in self._blocks:
            offset = tensor.data_ptr() - block.ctypes.data
            if 0 <= offset < block.nbytes:
                size = tensor.itemsize
                whole = torch.from_numpy(block[: block.nbytes // size * size]).view(tensor.dtype)
                return whole.as_strided(tensor.shape, tensor.stride(), offset // size)
        return tensor


def _aligned(num_bytes: int) -> npt.NDArray[np.uint8]:
    """At least one byte. Pages that nothing writes take no memory."""
    whole = np.empty(max(num_bytes, 1) + _ALIGNMENT, np.uint8)
    skipped = -whole.ctypes.data % _ALIGNMENT
    return whole[skipped : skipped + max(num_bytes, 1)]


def _in_memory(launches: Sequence[Launch], own: Sequence[int]) -> Words:
    """As ``RUN_LAUNCHES`` reads them."""
    in_memory = np.zeros((len(launches), LAUNCH_WORDS), np.int64)
    for row, launch, first in zip(in_memory, launches, own, strict=True):
        row[0], row[1] = launch.address, first
        row[2 : 2 + len(launch.words)] = launch.words
    return in_memory


def _run(launches: Words, call: Words, threads: int) -> None:
    tallies = _aligned(8 * TALLY_WORDS * len(launches))
    at = launches.ctypes.data, len(launches), call.ctypes.data, tallies.ctypes.data
    RUN_LAUNCHES[threads > 1](*at, threads)
