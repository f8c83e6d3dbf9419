"""Numbers packed for one copy to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.worker import host_copy
from octavo.worker.host_copy import HostCopy, all_to_device, to_device

META = torch.device("meta")
"""A device of its own, without memory: what is copied to it has shapes and offsets."""


def test_each_array_begins_at_a_multiple_of_16_bytes() -> None:
    arrays = [np.arange(size, dtype=np.int32) for size in (1, 4, 0, 7, 3)]
    parts = all_to_device(arrays, META)
    assert [part.storage_offset() for part in parts] == [0, 4, 8, 8, 16]
    assert [part.shape for part in parts] == [(1,), (4,), (0,), (7,), (3,)]


def test_arrays_are_packed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = torch.zeros(12, dtype=torch.int32)
    monkeypatch.setattr(host_copy, "staging", lambda num_numbers, device: staged[:num_numbers])
    all_to_device([np.array([1, 2, 3, 4, 5], np.int32), np.array([6], np.int32)], META)
    assert staged.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 6, 0, 0, 0]


def test_an_array_keeps_its_shape() -> None:
    assert to_device(np.zeros((3, 2), np.int32), META).shape == (3, 2)


def test_on_a_cpu_nothing_is_copied() -> None:
    array = np.arange(6, dtype=np.int32)
    tensor = torch.arange(3)
    assert np.shares_memory(to_device(array, torch.device("cpu")).numpy(), array)
    assert HostCopy(tensor).wait() is tensor
