"""A timed all-reduce by the ranks of a group, over the links and with the library that the model would use."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from ...worker.errors import OctavoError
from ..local_ray import free_ports
from .facts import Reduction

CPU_BYTES = 4 * 2**20
GPU_BYTES = 64 * 2**20
MOST_TIMES = 500
MEET_S = 60.0
"""For all ranks of a group to start and to find each other."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What one rank does. ``device`` as torch names it."""

    host: str
    port: int
    rank: int
    size: int
    device: str
    seconds: float
    listen_fd: int | None = None


def reduce_rank(order: RankOrder) -> tuple[str, int, float]:
    """Take part: backend, bytes of the tensor, seconds of the median all-reduce. Raises OctavoError."""
    import torch

    from ...worker.collectives import Rendezvous, TorchDistributed

    device = torch.device(order.device)
    meeting = Rendezvous(order.host, order.port, order.rank, order.size, timeout_s=MEET_S, listen_fd=order.listen_fd)
    collectives = TorchDistributed(meeting, device)
    try:
        size_bytes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
        x = torch.ones(size_bytes // 4, device=device)
        first = [_timed(collectives, x) for _ in range(3)]  # links are made with the first
        count = collectives.minimum(max(3, min(MOST_TIMES, int(order.seconds / max(first[-1], 1e-6)))))
        times = [_timed(collectives, x.fill_(1.0)) for _ in range(count)]
        if not bool((x == order.size).all()):
            raise OctavoError(f"rank {order.rank} got a wrong sum")
    except RuntimeError as error:
        raise OctavoError(f"rank {order.rank}: {str(error).splitlines()[0]}") from error
    finally:
        collectives.close()
    return "nccl" if device.type == "cuda" else "gloo", size_bytes, statistics.median(times)


def _timed(collectives: object, x: object) -> float:
    import torch

    begin = time.perf_counter()
    collectives.all_reduce(x)  # type: ignore[attr-defined]
    if x.is_cuda:  # type: ignore[attr-defined]
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def reduce_here(group: int, devices: Sequence[str], node: str, seconds: float) -> Reduction:
    """One group with all ranks on this machine, in processes of their own."""
    size = len(devices)
    (port,) = free_ports(1, "127.0.0.1")
    orders = [RankOrder("127.0.0.1", port, rank, size, device, seconds) for rank, device in enumerate(devices)]
    reduction = Reduction(group, (node,) * size)
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            results = list(pool.map(reduce_rank, orders, timeout=MEET_S + 2 * seconds))
        except (OctavoError, OSError, RuntimeError, TimeoutError) as error:
            return replace(reduction, error=str(error) or "the ranks did not come to an end")
    return measured(reduction, results)


def measured(reduction: Reduction, results: Sequence[tuple[str, int, float]]) -> Reduction:
    """With what the ranks found; the slowest counts."""
    backend, size_bytes, _ = results[0]
    return replace(reduction, backend=backend, size_bytes=size_bytes, seconds=max(seconds for _, _, seconds in results))
