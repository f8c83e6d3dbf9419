"""Small tensors between host and device, so that neither waits for the other.

On a GPU they lie in pinned memory, and the copies are queued behind the kernels. The memory comes from torch's caching
allocator for pinned memory, which notes an event for every copy of this kind (``copy_kernel_cuda``,
``CachingHostAllocator``): a buffer whose tensor is gone is not given out again before the device has read it. So there
is nothing to take turns with.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .step_plan import Int32Array

ALIGNED = 4
"""Numbers of 16 bytes. Triton compiles a kernel anew for pointers that are no multiple of 16, for each of them."""


def staging(num_numbers: int, device: torch.device) -> Tensor:
    """int32 on the host, not initialised, to be filled and copied to ``device``."""
    return torch.empty(num_numbers, dtype=torch.int32, pin_memory=device.type == "cuda")


def to_device(array: Int32Array, device: torch.device) -> Tensor:
    """The same numbers on the device; on a CPU the same memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    staged = staging(array.size, device)
    staged.numpy()[:] = array.reshape(-1)
    return staged.to(device, non_blocking=True).view(array.shape)


def all_to_device(arrays: list[Int32Array], device: torch.device) -> list[Tensor]:
    """As ``to_device`` for flat arrays, in one copy; each begins at a multiple of 16 bytes."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    begins = [0, *itertools.accumulate(aligned(array.size) for array in arrays)]
    packed = staging(begins[-1], device)
    numbers = packed.numpy()
    for array, begin in zip(arrays, begins, strict=False):
        numbers[begin : begin + array.size] = array
    on_device = packed.to(device, non_blocking=True)
    return [on_device[begin : begin + array.size] for array, begin in zip(arrays, begins, strict=False)]


def aligned(num_numbers: int) -> int:
    """Rounded up to 16 bytes."""
    return -(-num_numbers // ALIGNED) * ALIGNED


class HostCopy:
    """A tensor on its way from the device to the host, behind everything that was launched before it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> Tensor:
        """The tensor on the host, when it is there. Raises what the device had to complain of meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
