"""BlockTables: the block table of every slot of the persistent batch, on the host and on the device.

Plans carry what changed, and so does the copy to the device: the tables of 256 long sequences are megabytes, what a
step of decoding changes in them is a few numbers. The host has them too, since it works out where new tokens go.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .host_copy import to_device
from .step_plan import Int32Array, StepPlan


class BlockTables:
    """int32 ``[num_slots, max_blocks]``."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        shape = (num_slots, max_blocks)
        self._host = np.zeros(shape, np.int32)
        self._block_size = block_size
        self._device = device
        self._on_device = (
            torch.from_numpy(self._host)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=torch.int32, device=device)
        )

    def update(self, plan: StepPlan) -> None:
        """Take over what the plan changes."""
        begin = 0
        for slot, first, count in plan.table_updates.tolist():
            self._host[slot, first : first + count] = plan.table_blocks[begin : begin + count]
            begin += count
        if begin and self._device.type != "cpu":
            changes = to_device(np.stack((self._places(plan.table_updates), plan.table_blocks)), self._device)
            self._on_device.view(-1).index_put_((changes[0],), changes[1])

    def _places(self, updates: Int32Array) -> Int32Array:
        """Where in the flat tables each of an update's blocks goes."""
        counts = updates[:, 2]
        first = updates[:, 0] * self._host.shape[1] + updates[:, 1]
        begins = np.cumsum(counts) - counts
        return (np.repeat(first - begins, counts) + np.arange(counts.sum())).astype(np.int32)

    def slot_mapping(self, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Where the K and V of tokens go, each given by its sequence's slot and its position."""
        blocks = self._host[slots, positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size

    def rows(self, slots: Tensor, max_seq_len: int) -> Tensor:
        """The tables of these slots, int32 ``[S, blocks of max_seq_len tokens]``."""
        return self._on_device[:, : -(-max_seq_len // self._block_size)].index_select(0, slots)
