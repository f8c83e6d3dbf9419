"""How the ranks of a worker group talk: tensors by all-reduce, step plans on a CPU channel of their own.

Plans do not travel by NCCL, since every rank's host must read the lengths in them before it can start its kernels,
and that would force a device synchronisation.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ConfigurationError
from .step_plan import Int32Array, plan_length

T = TypeVar("T")

FIRST_MESSAGE_LENGTH = 1024
"""int32 in the first message of a plan: header and body of nearly every step of decoding."""


class Collectives(Protocol):
    """What a rank needs of the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; may work in place."""
        ...

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On rank 0 ``[rows, sum(widths)]`` of all ranks' ``x [rows, widths[rank]]``, None on the others."""
        ...

    def broadcast_plan(self, buffer: Int32Array | None) -> Int32Array:
        """Rank 0 gives a packed plan, the others None; all get it. Blocks the others until there is one."""
        ...

    def share_sampled(self, token_ids: Tensor | None, count: int, device: torch.device) -> Tensor:
        """Rank 0 gives ``count`` sampled ids, int64, the others None; all get them, on ``device``."""
        ...

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""
        ...

    def close(self) -> None:
        """Leave the group. The others' next call fails."""
        ...


class SingleProcess:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x

    def broadcast_plan(self, buffer: Int32Array | None) -> Int32Array:
        return _given(buffer)

    def share_sampled(self, token_ids: Tensor | None, count: int, device: torch.device) -> Tensor:
        return _given(token_ids).to(device)

    def minimum(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: rank 0 opens a TCPStore there, the others connect to it."""

    host: str
    port: int
    rank: int
    size: int
    timeout_s: float = 60.0
    """For meeting, and for each collective: a rank waits at most so long for the others, plans included."""
    listen_fd: int | None = None
    """Rank 0: a socket that listens on ``port`` already, so that nobody can take the port in between."""


class TorchDistributed:
    """Several processes: NCCL or gloo for tensors, gloo for plans."""

    def __init__(self, meeting: Rendezvous, device: torch.device) -> None:
        """Meet the other ranks. Raises ConfigurationError when they do not come in time."""
        self.rank = meeting.rank
        self.size = meeting.size
        self._first_message = torch.empty(FIRST_MESSAGE_LENGTH, dtype=torch.int32)
        try:
            self._tensors, self._plans = _join(meeting, device)
        except (dist.DistError, RuntimeError) as error:
            raise ConfigurationError(
                f"rank {meeting.rank} of {meeting.size} could not meet the others at {meeting.host}:{meeting.port} "
                f"within {meeting.timeout_s:g} s: {error}"
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        self._tensors.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Shares of unequal width travel padded to the widest: a gather wants equal shapes."""
        padded = x.new_zeros(x.shape[0], max(widths))
        padded[:, : x.shape[1]] = x
        shares = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        dist.gather(padded, shares, dst=0, group=self._tensors)
        if shares is None:
            return None
        return torch.cat([share[:, :width] for share, width in zip(shares, widths, strict=True)], dim=1)

    def broadcast_plan(self, buffer: Int32Array | None) -> Int32Array:
        first = self._first_message
        if buffer is not None:
            head = buffer[:FIRST_MESSAGE_LENGTH]
            first.numpy()[: head.size] = head
        dist.broadcast(first, src=0, group=self._plans)
        plan = first.numpy().copy() if buffer is None else buffer
        length = plan_length(plan)
        if length <= FIRST_MESSAGE_LENGTH:
            return plan[:length]
        return self._broadcast_rest(plan, length)

    def _broadcast_rest(self, plan: Int32Array, length: int) -> Int32Array:
        whole = np.empty(length, np.int32)
        whole[: min(plan.size, length)] = plan[:length]
        dist.broadcast(torch.from_numpy(whole[FIRST_MESSAGE_LENGTH:]), src=0, group=self._plans)
        return whole

    def share_sampled(self, token_ids: Tensor | None, count: int, device: torch.device) -> Tensor:
        ids = torch.empty(count, dtype=torch.int64, device=device) if token_ids is None else token_ids.to(device)
        dist.broadcast(ids, src=0, group=self._tensors)
        return ids

    def minimum(self, value: int) -> int:
        least = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._plans)
        return int(least)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(meeting: Rendezvous, device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group for tensors and the group for plans."""
    timeout = datetime.timedelta(seconds=meeting.timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host, meeting.port, meeting.size, meeting.rank == 0, timeout, master_listen_fd=meeting.listen_fd
    )
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    return dist.new_group(timeout=timeout), dist.new_group(backend="gloo", timeout=timeout)


def _given(value: T | None) -> T:
    if value is None:
        raise ValueError("rank 0 must give the value that is shared")
    return value
