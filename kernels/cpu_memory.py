"""Large memory on CPUs that is there from the start, in pages that are as large as the machine has them."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap

import torch
from torch import Tensor

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: give every page memory now. Python's ``mmap`` does not name it."""


def resident(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros whose memory is taken now, in huge pages where the kernel gives them on request.

    An ordinary allocation only reserves addresses: a page gets memory when it is first written, and the process is
    ended when there is none left then. KV tiles are read at random, and with pages of 4 KiB each tile of 16 × 64
    float32 would be one of its own to look up. Raises RuntimeError when the memory is not there.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    try:
        area = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise RuntimeError(f"{num_bytes} bytes of memory could not be had: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            area.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(area, dtype=torch.uint8).view(dtype).view(shape)  # keeps the area
    try:
        area.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise RuntimeError(f"{num_bytes} bytes of memory could not be had: {error}") from error
        tensor.zero_()  # an older kernel
    return tensor
