"""Log-probabilities: of a token, its rank, and the likeliest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.backend import Kernels, reference_kernels


def random_logits(num_rows: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """And a token for each row, or none. Of every second batch the logits are whole: there are many equals."""
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    logits = 4 * torch.randn(num_rows, vocab_size, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < seed % 3 * 0.3] = -torch.inf
    return logits.round() if seed % 2 else logits, torch.randint(-1, vocab_size, (num_rows,), generator=generator)


@settings(settings.get_profile("kernels"))
@given(
    vocab_size=st.sampled_from([1, 5, 64, 700, 9000]),
    k=st.sampled_from([0, 1, 5, 20, 200]),
    seed=st.integers(0, 10_000),
)
def test_every_backend_finds_the_same(kernels: Kernels, vocab_size: int, k: int, seed: int, interpreted: bool) -> None:
    logits, token_ids = random_logits(3 if interpreted else 8, vocab_size, seed)
    k, before = min(k, vocab_size), logits.clone()
    actual, expected = (each.logprobs(logits, token_ids, k) for each in (kernels, reference_kernels()))
    assert torch.equal(actual.top_token_ids, expected.top_token_ids)
    assert torch.equal(actual.ranks, expected.ranks)
    for name in ("logprobs", "top_logprobs"):
        x, y = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-5, equal_nan=True)
    assert torch.equal(logits, before)


def test_they_are_those_of_the_softmax(kernels: Kernels) -> None:
    found = kernels.logprobs(torch.tensor([[0.2, 0.5, 0.3]]).log() + 7, torch.tensor([2]), 2)
    assert found.logprobs.tolist() == pytest.approx([math.log(0.3)], abs=1e-6)
    assert found.ranks.tolist() == [2]
    assert found.top_token_ids.tolist() == [[1, 2]]
    assert found.top_logprobs[0].tolist() == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)


def test_equals_come_by_their_ids_and_have_one_rank(kernels: Kernels) -> None:
    """More of them than are wanted; far apart; 0 and -0 are equal."""
    logits = torch.full((1, 9000), -1.0)
    logits[0, [8000, 70, 5000, 69]] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    logits[0, 7] = -0.5
    assert kernels.logprobs(logits, torch.tensor([5000]), 3).top_token_ids.tolist() == [[69, 70, 5000]]
    found = kernels.logprobs(logits.expand(4, -1).contiguous(), torch.tensor([8000, 70, 7, 8999]), 6)
    assert found.ranks.tolist() == [1, 1, 5, 6]
    assert found.top_token_ids.tolist() == [[69, 70, 5000, 8000, 7, 0]] * 4


def test_no_logprobs_are_wanted_but_the_tokens(kernels: Kernels) -> None:
    found = kernels.logprobs(torch.zeros(2, 50), torch.tensor([3, 49]), 0)
    assert found.top_token_ids.shape == found.top_logprobs.shape == (2, 0)
    assert found.logprobs.tolist() == pytest.approx([-math.log(50)] * 2)


def test_minus_infinity_is_a_log_probability(kernels: Kernels) -> None:
    """As it is of what a model can never say."""
    found = kernels.logprobs(torch.tensor([[-torch.inf, 1.0, -torch.inf]]), torch.tensor([2]), 3)
    assert found.logprobs.tolist() == [-math.inf]
    assert found.top_token_ids.tolist() == [[1, 0, 2]]
    assert found.top_logprobs.tolist() == [[0.0, -math.inf, -math.inf]]


def test_rows_without_numbers_have_none_and_others_go_on(kernels: Kernels) -> None:
    logits = torch.zeros(5, 5000)
    logits[0, 4999] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    found = kernels.logprobs(logits, torch.tensor([1, 1, 1, 1, -1]), 2)
    assert found.ranks.tolist() == [0, 0, 0, 1, 0]
    assert found.logprobs.isnan().tolist() == [True, True, True, False, True]
    assert found.top_token_ids.tolist() == [[-1, -1]] * 3 + [[0, 1]] * 2
    assert found.top_logprobs.isnan().tolist() == [[True, True]] * 3 + [[False, False]] * 2


def test_a_row_is_the_same_alone_and_with_others(kernels: Kernels) -> None:
    """By two threads as well."""
    logits, token_ids = random_logits(7, 5000, seed=4)
    torch.set_num_threads(2)
    together = kernels.logprobs(logits, token_ids, 5)
    alone = [kernels.logprobs(logits[row : row + 1], token_ids[row : row + 1], 5) for row in range(7)]
    for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
        expected = torch.cat([getattr(each, name) for each in alone])
        assert torch.equal(getattr(together, name).nan_to_num(1.0), expected.nan_to_num(1.0))
