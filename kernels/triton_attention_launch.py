"""Sizes of paged attention's launches, from the shapes, the device and the bounds that the caller gives.

Nothing here looks at a tensor's content: a choice is the same when a graph is captured and when it is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .triton_device import Device

SMALLEST_ROWS = 16
"""A matrix product has at least as many rows."""

SHORT_ROWS = 64
"""A batch whose queries each fit into as many rows is short: a sequence is one query block, and memory is the limit."""

PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs that a short launch wants for each multiprocessor; see ``choose_num_splits``."""

MOST_PROGRAMS_PER_MULTIPROCESSOR = 32
LONGEST_SPLIT = 8192
SHORTEST_SPLIT = 128
MOST_SPLITS = 64


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    group: int
    """Query heads to a KV head."""
    head_dim: int
    query_bytes: int
    """Of an element."""
    cache_bytes: int

    @property
    def dim_padded(self) -> int:
        return max(16, _power_of_2(self.head_dim))

    @property
    def is_float32(self) -> bool:
        return self.query_bytes == 4

    @property
    def is_quantized(self) -> bool:
        return self.cache_bytes == 1


@dataclass(frozen=True)
class Launch:
    rows: int
    block_q: int
    """Query positions of a program: ``rows // group``."""
    tile: int
    """Keys of a step."""
    num_splits: int = 1
    one_block: bool = False
    """Each sequence is one query block, those with more queries than ``block_q`` left out."""
    fewest_queries: int = 1
    full_tiles: bool = True
    """A loop of its own for tiles that need no mask."""
    num_warps: int = 4
    num_stages: int = 2


def choose_launches(
    shape: Shape, device: Device, num_seqs: int, num_kv_heads: int, max_query_len: int, max_seq_len: int
) -> list[Launch]:
    """One launch if all queries are short or long, else one for each, whose programs leave what is the other's.

    A decoding sequence in a tile of 128 rows would wait for 127 of them, and for one program that walks all its keys.
    """
    if shape.group * max_query_len <= SHORT_ROWS:
        return [_short(shape, device, num_seqs, num_kv_heads, max_query_len, max_seq_len)]
    if num_seqs == 1:
        return [_long(shape, device, fewest_queries=1)]
    short = _short(shape, device, num_seqs, num_kv_heads, 1, max_seq_len)
    return [_long(shape, device, fewest_queries=short.block_q + 1), short]


def invariant_launch(shape: Shape, device: Device) -> Launch:
    """The same for decode and prefill, whatever the batch, without splits and with one loop: one order of every sum.

    A row's result then depends on its own query and keys alone. Tiles begin at multiples of their size, and one that
    a row does not see multiplies its sums by 1 and adds 0.
    """
    rows = _rows(shape, 32 if shape.is_float32 else 64)
    return Launch(
        rows,
        rows // shape.group,
        _tile(shape, rows, 32),
        full_tiles=False,
        num_warps=_num_warps(shape, rows),
        num_stages=2 if device.is_amd else 3,
    )


def choose_num_splits(num_programs: int, max_seq_len: int, num_multiprocessors: int) -> int:
    """Into how many programs to divide the keys of one: a power of two.

    * A launch of p programs on m multiprocessors, s on each at a time, takes ceil(p / (m s)) waves, the last of them
      partly empty. s is 2 or 3 (registers, shared memory). At four programs for each multiprocessor the last wave is at
      most half of the time, and as half of the multiprocessors fill the memory's bandwidth, little is lost. Fewer
      programs than that leave bandwidth unused: splits raise them to four for each.
    * Sequences are of unequal length and the longest ends last. No program walks over more than ``LONGEST_SPLIT`` keys
      (4 MiB at head size 128 and 2 bytes: some 100 µs at a multiprocessor's share of an H200's bandwidth) while there
      are at most 32 programs for each multiprocessor, which bounds the scratch.
    * A split costs its scratch, written and read: 8 (D + 2) bytes a query head, against 4 D bytes a key and *KV* head.
      At 4 query heads to a KV head that is as much as 8 keys: 6 % at ``SHORTEST_SPLIT``, below which no bound on the
      length is divided. The kernel gives a sequence at most as many splits as it has pairs of tiles.
    """
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_programs)
    for_longest = min(
        -(-max_seq_len // LONGEST_SPLIT), MOST_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_programs
    )
    most = min(MOST_SPLITS, max(1, max_seq_len // SHORTEST_SPLIT))
    return min(_power_of_2(max(wanted, for_longest, 1)), _power_of_2(most))


def _rows(shape: Shape, wanted: int) -> int:
    return max(SMALLEST_ROWS, _power_of_2(shape.group), wanted)


def _tile(shape: Shape, rows: int, most: int) -> int:
    """Keys of a step: with V, 32 KiB of 2 bytes an element, several of which shared memory holds.

    Half as many where the registers are full: of what is stored in a byte and widened, beside many rows or to float32.
    """
    elements = 4096 if shape.is_float32 else 8192
    if shape.is_quantized and (shape.is_float32 or rows > SMALLEST_ROWS):
        elements //= 2
    return min(most, max(16, elements // shape.dim_padded))


def _num_warps(shape: Shape, rows: int) -> int:
    """Enough threads to hold the result in registers; float32, multiplied without matrix units, takes more of them."""
    return 8 if rows * shape.dim_padded > (512 if shape.is_float32 else 8192) else 4


def _short(
    shape: Shape, device: Device, num_seqs: int, num_kv_heads: int, max_query_len: int, max_seq_len: int
) -> Launch:
    """Two tiles of K and V are on their way while one is computed.

    A microsecond of 4.8 TB/s over 132 multiprocessors is 36 KiB, a program has 64 KiB on its way. Triton counts a stage
    of the pipeline for each step of the look-up in the block table, hence 5 of them.
    """
    rows = _rows(shape, _power_of_2(shape.group * max_query_len))
    return Launch(
        rows,
        rows // shape.group,
        _tile(shape, rows, 128 if rows == SMALLEST_ROWS else 32),
        num_splits=choose_num_splits(num_seqs * num_kv_heads, max_seq_len, device.num_multiprocessors),
        one_block=True,
        full_tiles=False,
        # What is stored in a byte takes registers to be widened in.
        num_warps=8 if shape.is_quantized else _num_warps(shape, rows),
        num_stages=2 if device.is_amd else 5,
    )


def _long(shape: Shape, device: Device, fewest_queries: int) -> Launch:
    """As many rows as registers allow; float32, which has no matrix units, has a quarter of them."""
    rows = _rows(shape, 32 if shape.is_float32 else 128 if shape.dim_padded <= 128 else 64)
    return Launch(
        rows,
        rows // shape.group,
        _tile(shape, rows, 32 if shape.is_float32 or shape.is_quantized else 64),
        fewest_queries=fewest_queries,
        num_warps=_num_warps(shape, rows),
        num_stages=2 if device.is_amd else 3,
    )
