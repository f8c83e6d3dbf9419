"""A mixture of experts is the sum of its chosen ones, at any number of tokens, however unevenly they are chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.backend import Kernels, cpu_kernels
from octavo.kernels.cpu_experts import WIDENED
from octavo.kernels.cpu_program import BatchSizes
from octavo.kernels.cpu_tiles import BLOCK_ROWS
from octavo.kernels.reference_experts import choose_experts
from octavo.kernels.triton_experts import TILES, choose_tile, most_tiles

HIDDEN, COLUMNS, EXPERTS = 80, 50, 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
Weights = tuple[Tensor, Tensor]


def random_weights(dtype: torch.dtype = torch.float32, num_experts: int = EXPERTS) -> Weights:
    gate_up = torch.randn(num_experts, 2 * COLUMNS, HIDDEN) * HIDDEN**-0.5
    return gate_up.to(dtype), (torch.randn(num_experts, HIDDEN, COLUMNS) * COLUMNS**-0.5).to(dtype)


def defined(x: Tensor, logits: Tensor, weights: Weights, k: int, *, renormalise: bool) -> Tensor:
    """Token by token, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, scores) in enumerate(zip(x.double(), logits.double().softmax(dim=-1), strict=True)):
        best = sorted(range(len(scores)), key=lambda expert: (-float(scores[expert]), expert))[:k]
        share = scores[best].sum() if renormalise else 1.0
        for expert in best:
            gate, up = (weights[0][expert].double() @ row).chunk(2)
            out[token] += scores[expert] / share * (weights[1][expert].double() @ (F.silu(gate) * up))
    return out


@settings(settings.get_profile("kernels"))
@given(
    num_tokens=st.sampled_from([0, 1, 2, 17, 70]),
    num_chosen=st.integers(1, EXPERTS),
    renormalise=st.booleans(),
    favoured=st.integers(0, EXPERTS - 1),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_the_sum_of_the_chosen(
    kernels: Kernels,
    num_tokens: int,
    num_chosen: int,
    renormalise: bool,
    favoured: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Also where most tokens choose the same, and some experts have none."""
    torch.manual_seed(seed)
    weights, x = random_weights(dtype), torch.randn(num_tokens, HIDDEN).to(dtype)
    logits = torch.randn(num_tokens, EXPERTS).to(dtype)
    logits[:, favoured] += 4
    given = kernels.prepare_experts(*weights, num_chosen=num_chosen, renormalise=renormalise)(x, logits)
    assert given.dtype == dtype
    expected = defined(x, logits, weights, num_chosen, renormalise=renormalise)
    torch.testing.assert_close(given.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_more_experts_than_a_power_of_two(kernels: Kernels) -> None:
    weights, x, logits = random_weights(num_experts=11), torch.randn(9, HIDDEN), torch.randn(9, 11)
    given = kernels.prepare_experts(*weights, num_chosen=3, renormalise=True)(x, logits)
    expected = defined(x, logits, weights, 3, renormalise=True)
    torch.testing.assert_close(given.double(), expected, atol=1e-5, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen(kernels: Kernels) -> None:
    weights, x, logits = random_weights(), torch.randn(4, HIDDEN), torch.zeros(4, EXPERTS)
    given = kernels.prepare_experts(*weights, num_chosen=3, renormalise=False)(x, logits)
    expected = defined(x, logits, weights, 3, renormalise=False)
    torch.testing.assert_close(given.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_of_nan_is_its_own_affair(kernels: Kernels) -> None:
    """Padding may hold anything, and a token whose logits are no numbers must not reach past the experts."""
    experts = kernels.prepare_experts(*random_weights(), num_chosen=3, renormalise=True)
    x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)
    expected = experts(x, logits)
    x[2], logits[2], logits[3, 1:] = torch.nan, torch.nan, -torch.inf
    given = experts(x, logits)
    assert given[2].isnan().all()
    assert given[3].isfinite().all()
    torch.testing.assert_close(given[[0, 1, 4]], expected[[0, 1, 4]], atol=1e-6, rtol=0)


def test_a_token_does_not_depend_on_the_others(invariant_kernels: Kernels) -> None:
    """Bit for bit: batch mates, which share its experts or do not, must not change a sampled token. The reference,
    which no token is sampled from, has torch's products."""
    tolerance = 1e-6 if invariant_kernels.name == "reference" else 0.0
    experts = invariant_kernels.prepare_experts(*random_weights(), num_chosen=2, renormalise=True)
    x, logits = torch.randn(90, HIDDEN), torch.randn(90, EXPERTS)
    logits[10:, 3] += 5
    whole = experts(x, logits)
    for begin, end in [(0, 1), (40, 41), (3, 20), (20, 90)]:
        part = experts(x[begin:end], logits[begin:end])
        torch.testing.assert_close(part, whole[begin:end], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda gate_up, down: (gate_up[:, :-1], down, 2), r"\(8, 100, 80\)"),
        (lambda gate_up, down: (gate_up, down, 9), "num_chosen is 9, expected 1 to 8"),
        (lambda gate_up, down: (gate_up, down, 0), "num_chosen is 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    kernels: Kernels, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, int]], message: str
) -> None:
    gate_up, down, num_chosen = change(*random_weights())
    with pytest.raises(ValueError, match=message):
        kernels.prepare_experts(gate_up, down, num_chosen=num_chosen, renormalise=True)


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_of_the_chosen_add_up_to_one_if_they_are_to(renormalise: bool) -> None:
    _, weights = choose_experts(torch.randn(20, EXPERTS), 3, renormalise=renormalise)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(20)) == renormalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_more_input_channels_than_are_widened_at_once(dtype: torch.dtype) -> None:
    """On CPUs. Inputs are float32 and weights are taken as they are, so that nothing is rounded to half precision."""
    hidden, columns = 2 * WIDENED + 40, WIDENED + 30
    gate_up = (torch.randn(EXPERTS, 2 * columns, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(EXPERTS, hidden, columns) * columns**-0.5).to(dtype)
    x, logits = torch.randn(20, hidden), torch.randn(20, EXPERTS)
    given = cpu_kernels().prepare_experts(gate_up, down, num_chosen=2, renormalise=True)(x, logits)
    expected = defined(x, logits, (gate_up, down), 2, renormalise=True)
    torch.testing.assert_close(given.double(), expected, atol=1e-5, rtol=1e-5)


def test_an_expert_on_cpus_has_more_rows_than_a_block() -> None:
    weights, num_tokens = random_weights(), 2 * BLOCK_ROWS + 5
    x, logits = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, EXPERTS)
    logits[:, 5] += 9
    given = cpu_kernels().prepare_experts(*weights, num_chosen=2, renormalise=True)(x, logits)
    expected = defined(x, logits, weights, 2, renormalise=True)
    torch.testing.assert_close(given.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_experts_are_played_back(dtype: torch.dtype, num_threads: int) -> None:
    """For any number of rows up to those recorded; see cpu_program.py."""
    torch.set_num_threads(num_threads)
    kernels = cpu_kernels()
    assert kernels.team is not None
    experts = kernels.prepare_experts(*random_weights(dtype), num_chosen=2, renormalise=True)
    x, logits = torch.empty(300, HIDDEN), torch.empty(300, EXPERTS)
    program, out = kernels.team.record(lambda: experts(x, logits))
    for num_rows in (1, 2, 16, 300, 5):
        x[:num_rows], logits[:num_rows] = torch.randn(num_rows, HIDDEN), torch.randn(num_rows, EXPERTS)
        program.play(num_rows, BatchSizes(0, 0, 0, 0, 0))
        assert torch.equal(out[:num_rows], experts(x[:num_rows], logits[:num_rows]))


@given(counts=st.lists(st.integers(0, 100), min_size=1, max_size=20), rows=st.sampled_from([16, 64]))
def test_the_grid_has_room_for_every_tile(counts: list[int], rows: int) -> None:
    assert sum(-(-count // rows) for count in counts) <= most_tiles(sum(counts), len(counts), rows)


def test_tiles_are_as_high_as_the_experts_fill_on_average() -> None:
    assert [choose_tile(TILES[2], pairs, 8).rows for pairs in (2, 128, 256, 511, 512, 9000)] == [16, 16, 32, 32, 64, 64]
