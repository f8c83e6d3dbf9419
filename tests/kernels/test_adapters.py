"""Each row of a batch gets its own adapter's product added, or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.adapters import LARGEST_RANK, AdapterProduct
from octavo.kernels.backend import Kernels, cpu_kernels
from octavo.kernels.cpu_program import BatchSizes

NUM_SLOTS, NUM_IN, NUM_OUT = 5, 75, 70
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
Adapter = tuple[Tensor, Tensor]


def random_adapter(rank: int, dtype: torch.dtype = torch.float32) -> Adapter:
    a, b = torch.randn(rank, NUM_IN) * NUM_IN**-0.5, torch.randn(NUM_OUT, rank) * rank**-0.5
    return a.to(dtype), b.to(dtype)


def prepare(kernels: Kernels, adapters: dict[int, Adapter], dtype: torch.dtype = torch.float32) -> AdapterProduct:
    device = torch.get_default_device()
    product = kernels.prepare_adapters(NUM_SLOTS, LARGEST_RANK, NUM_IN, NUM_OUT, dtype=dtype, device=device)
    for slot, (a, b) in adapters.items():
        product.load(slot, a, b)
    return product


def added(kernels: Kernels, product: AdapterProduct, x: Tensor, base: Tensor, slots: Tensor) -> Tensor:
    """To a copy of ``base``."""
    return product(x, base.clone(), kernels.group_rows(slots, NUM_SLOTS))


def defined(x: Tensor, base: Tensor, slots: Tensor, adapters: dict[int, Adapter]) -> Tensor:
    """In float64."""
    out = base.double()
    for row, slot in enumerate(slots.tolist()):
        if slot in adapters:
            a, b = (part.double() for part in adapters[slot])
            out[row] += b @ (a @ x[row].double())
    return out


@settings(settings.get_profile("kernels"))
@given(
    runs=st.lists(st.tuples(st.integers(-1, NUM_SLOTS - 1), st.sampled_from([1, 1, 1, 5, 40])), max_size=8),
    ranks=st.lists(st.sampled_from([1, 8, 16, 33, LARGEST_RANK]), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_rows_of_different_adapters(
    kernels: Kernels, runs: list[tuple[int, int]], ranks: list[int], dtype: torch.dtype, seed: int
) -> None:
    """Single tokens and prompts, with adapters of different ranks, and without."""
    torch.manual_seed(seed)
    dtype = torch.float32 if kernels.name == "cpu" else dtype
    adapters = {slot: random_adapter(rank, dtype) for slot, rank in enumerate(ranks)}
    slots = torch.tensor([slot for slot, length in runs for _ in range(length)], dtype=torch.int32)
    x, base = torch.randn(len(slots), NUM_IN).to(dtype), torch.randn(len(slots), NUM_OUT).to(dtype)
    given = added(kernels, prepare(kernels, adapters, dtype), x, base, slots)
    expected = defined(x, base, slots, adapters)
    torch.testing.assert_close(given.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(given[slots < 0], base[slots < 0])


def test_a_row_does_not_depend_on_the_others(kernels: Kernels) -> None:
    """Bit for bit: not on their number, nor on their adapters."""
    product = prepare(kernels, {slot: random_adapter(16) for slot in range(NUM_SLOTS)})
    x, base, slots = torch.randn(50, NUM_IN), torch.randn(50, NUM_OUT), torch.randint(-1, NUM_SLOTS, (50,)).int()
    slots[20:45] = 2
    whole = added(kernels, product, x, base, slots)
    for begin, end in [(0, 1), (33, 34), (7, 30), (40, 50)]:
        part = slice(begin, end)
        assert torch.equal(added(kernels, product, x[part], base[part], slots[part]), whole[part])


def test_a_slot_that_is_filled_again_keeps_nothing(kernels: Kernels) -> None:
    """Nor of an adapter of a larger rank."""
    small = random_adapter(3)
    product = prepare(kernels, {1: random_adapter(LARGEST_RANK)})
    product.load(1, *small)
    x, base, slots = torch.randn(4, NUM_IN), torch.randn(4, NUM_OUT), torch.ones(4, dtype=torch.int32)
    given = added(kernels, product, x, base, slots)
    torch.testing.assert_close(given.double(), defined(x, base, slots, {1: small}), atol=1e-5, rtol=1e-5)


def test_a_row_of_nan_without_an_adapter_is_left_alone(kernels: Kernels) -> None:
    """Padding may hold anything."""
    adapters = {0: random_adapter(8)}
    x, base, slots = torch.randn(6, NUM_IN), torch.randn(6, NUM_OUT), torch.tensor([0, 0, -1, 0, -1, -1]).int()
    x[slots < 0] = torch.nan
    given = added(kernels, prepare(kernels, adapters), x, base, slots)
    torch.testing.assert_close(given.double(), defined(x, base, slots, adapters), atol=1e-5, rtol=1e-5)


def test_out_may_be_columns_of_a_fused_product(kernels: Kernels) -> None:
    adapters = {3: random_adapter(8)}
    x, slots = torch.randn(20, NUM_IN), torch.full((20,), 3, dtype=torch.int32)
    fused = torch.randn(20, NUM_OUT + 30)
    before = fused.clone()
    prepare(kernels, adapters)(x, fused[:, 10 : 10 + NUM_OUT], kernels.group_rows(slots, NUM_SLOTS))
    expected = defined(x, before[:, 10 : 10 + NUM_OUT], slots, adapters)
    torch.testing.assert_close(fused[:, 10 : 10 + NUM_OUT].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(fused[:, :10], before[:, :10])
    assert torch.equal(fused[:, 10 + NUM_OUT :], before[:, 10 + NUM_OUT :])


@pytest.mark.parametrize(
    ("slot", "a", "b", "message"),
    [
        (NUM_SLOTS, (8, NUM_IN), (NUM_OUT, 8), "slot is 5, expected 0 to 4"),
        (-1, (8, NUM_IN), (NUM_OUT, 8), "slot is -1"),
        (0, (65, NUM_IN), (NUM_OUT, 65), "rank is 65, expected 1 to 64"),
        (0, (8, NUM_IN + 1), (NUM_OUT, 8), r"\(8, 76\) and \(70, 8\), expected \(8, 75\)"),
        (0, (8, NUM_IN), (NUM_OUT, 9), r"\(70, 9\), expected"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    kernels: Kernels, slot: int, a: tuple[int, int], b: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(kernels, {slot: (torch.zeros(a), torch.zeros(b))})


@pytest.mark.parametrize(("num_slots", "max_rank", "message"), [(0, 8, "num_slots is 0"), (2, 65, "max_rank is 65")])
def test_room_that_no_kernel_has_is_refused(kernels: Kernels, num_slots: int, max_rank: int, message: str) -> None:
    device = torch.get_default_device()
    with pytest.raises(ValueError, match=message):
        kernels.prepare_adapters(num_slots, max_rank, 8, 8, dtype=torch.float32, device=device)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_adapters_are_played_back(num_threads: int) -> None:
    """Also one that was loaded after the program was recorded; see cpu_program.py."""
    torch.set_num_threads(num_threads)
    kernels = cpu_kernels()
    assert kernels.team is not None
    product = prepare(kernels, {0: random_adapter(8)})
    x, out, slots = torch.empty(300, NUM_IN), torch.empty(300, NUM_OUT), torch.zeros(300, dtype=torch.int32)
    program, _ = kernels.team.record(lambda: product(x, out, kernels.group_rows(slots, NUM_SLOTS)))
    product.load(2, *random_adapter(40))
    for num_rows in (1, 2, 30, 300, 5):
        x[:num_rows], base = torch.randn(num_rows, NUM_IN), torch.randn(num_rows, NUM_OUT)
        slots[:num_rows] = torch.randint(-1, 3, (num_rows,)).int()
        out[:num_rows] = base
        program.play(num_rows, BatchSizes(0, 0, 0, 0, 0))
        assert torch.equal(out[:num_rows], added(kernels, product, x[:num_rows], base, slots[:num_rows]))
