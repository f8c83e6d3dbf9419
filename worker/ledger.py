"""Ledger: where the memory of a rank's device goes. Plain arithmetic on numbers that ``worker/memory.py`` measures."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

Entries = tuple[tuple[str, int], ...]
"""(what, bytes), positive for what there is and negative for what is taken; their sum is left for KV."""

CPU_SHARE = 0.25
"""Of the available memory, for the KV of all ranks on a machine."""

_GIB = 1 << 30
_LABEL_WIDTH = 58


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Measured on a GPU when the weights are loaded, in bytes."""

    total: int
    used: int
    """By all processes and CUDA contexts (NVML)."""
    allocator: int
    """Of ``used``: what this process's allocator holds."""
    weights: int
    step_peak: int
    """What the worst-case step takes beyond the weights."""
    graphs: int = 0
    """For recorded steps of decoding: their buffers, the pool that they share, and what the driver keeps of each."""


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Measured on a machine when the weights are loaded and before the worst-case step, in bytes."""

    total: int
    available: int
    own: int
    """Resident memory of this process alone."""
    weights: int
    """All parameters of this rank, packed copies too."""
    step_peak: int
    """By how much resident memory grew at the most in the worst-case step."""


def gpu_entries(memory: GpuMemory, utilization: float, form: str = "") -> Entries:
    """``utilization``: the part of the GPU that may be filled, by others too. ``form`` of the weights, for people."""
    return (
        ("memory of the GPU", memory.total),
        (f"kept free: --gpu-memory-utilization {utilization:g}", int(memory.total * utilization) - memory.total),
        ("others' use and CUDA context (NVML)", memory.allocator - memory.used),
        (_joined("weights", form), -memory.weights),
        ("peak of the worst-case step", -memory.step_peak),
        ("graphs of decoding, estimated", -memory.graphs),
    )


def cpu_entries(memory: CpuMemory, num_ranks: int, *, shared: bool, form: str = "") -> Entries:
    """``shared``: KV gets ``CPU_SHARE`` of what is available, divided by the ``num_ranks`` of the machine.

    Otherwise all that is available is left for what the user set.
    """
    entries = (
        ("memory of the machine", memory.total),
        ("other processes", memory.available + memory.own - memory.total),
        (_joined("weights", form, "packed copies too"), -memory.weights),
        ("this process beside them", memory.weights - memory.own),
        ("peak of the worst-case step", -memory.step_peak),
    )
    return (*entries, _kept_free(left_of(entries), num_ranks)) if shared else entries


def _kept_free(available: int, num_ranks: int) -> tuple[str, int]:
    among = f", the rest for {num_ranks} ranks" if num_ranks > 1 else ""
    share = int(available * CPU_SHARE / num_ranks)
    return f"kept free: {1 - CPU_SHARE:.0%} of {gib(available)}{among}", share - available


def _joined(*words: str) -> str:
    return ", ".join(filter(None, words))


def left_of(entries: Entries) -> int:
    """Bytes for KV; not below 0."""
    return max(0, sum(amount for _, amount in entries))


@dataclass(frozen=True, slots=True)
class Ledger:
    """One rank's account."""

    device: str
    entries: Entries
    kv_bytes: int
    """For the KV pool at the most: what the entries leave, or what was set."""
    bytes_per_block: int
    block_size: int
    max_model_len: int
    num_blocks: int
    """Of the KV pool. What this rank can hold, until the group has agreed."""
    setting: str | None = None
    """The flag and value that size the pool, if one was given."""
    kv_form: str = ""
    """How K and V are kept, where it is not as activations are."""

    @property
    def could_hold(self) -> int:
        """Blocks that this rank has memory for."""
        return self.kv_bytes // self.bytes_per_block

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    def agreed(self, num_blocks: int) -> Ledger:
        """The same with the group's number of blocks, the least of its ranks."""
        return dataclasses.replace(self, num_blocks=num_blocks)

    def table(self) -> str:
        """A few lines for people. The amounts of the lines above "left over" add up to it."""
        pool = self.num_blocks * self.bytes_per_block
        label = _joined("KV pool", self.kv_form) + ("" if self.setting is None else f": {self.setting}")
        rows = [*self.entries, (label, -pool), ("left over", sum(amount for _, amount in self.entries) - pool)]
        lines = [f"{self.device:<{_LABEL_WIDTH + 2}}      GiB"]
        lines += [f"  {what:<{_LABEL_WIDTH}} {amount / _GIB:8.2f}" for what, amount in rows]
        return "\n".join([*lines, f"  {self._holds()}", *self._more_than_the_group()])

    def _holds(self) -> str:
        tokens = self.num_blocks * self.block_size
        # Rounded down: ten sequences that nearly fit are nine.
        sequences = math.floor(10 * self.num_blocks / self.max_blocks) / 10
        return (
            f"= {self.num_blocks:,} blocks of {self.block_size} tokens, {tokens:,} tokens: "
            f"{sequences:,.1f} sequences of --max-model-len {self.max_model_len:,}"
        )

    def _more_than_the_group(self) -> list[str]:
        if self.could_hold <= self.num_blocks:
            return []
        return [f"  this rank could hold {self.could_hold:,} blocks; a group uses what its least rank can hold"]


def gib(amount: int) -> str:
    return f"{amount / _GIB:.2f} GiB"
