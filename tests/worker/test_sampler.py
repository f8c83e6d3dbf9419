"""Rows of one step are sampled each by its own wishes, from logits as the runner gives them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels.backend import Kernels, reference_kernels, select_kernels
from octavo.worker.messages import SamplingParams
from octavo.worker.sampler import sample_rows
from octavo.worker.sampling_row import Candidate, SamplingRow
from octavo.worker.sampling_state import SamplingState
from octavo.worker.token_logprobs import LogprobsCopy

KERNELS: Kernels = select_kernels(torch.device("cpu"))


def row(seed: int = 0, temperature: float = 0.0, banned: tuple[int, ...] = (), candidates: int = 0) -> SamplingRow:
    return SamplingRow(seed, 0, 0, temperature, 1.0, None, banned, candidates)


@torch.inference_mode()
def made_in_inference_mode() -> Tensor:
    return torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 2)


# ---- drawn tokens ----


def test_banned_tokens_are_not_drawn_also_from_inference_tensors() -> None:
    tokens = sample_rows(made_in_inference_mode(), [row(banned=(1, 99, -1)), row()], KERNELS).token_ids
    assert tokens.tolist() == [2, 1]
    rows = [row(temperature=1.0, banned=(0, 1, 2)), row()]
    assert sample_rows(made_in_inference_mode(), rows, KERNELS).token_ids.tolist() == [3, 1]


def test_each_row_has_its_own_filters() -> None:
    """Rows 1, 3 and 5 may draw one token only: as top_k, as top_p, as min_p."""
    logits = torch.zeros(6, 1_000)
    logits[:, 7] = 1.0
    wishes = [SamplingRow(5, branch, 0, 1.0, 1.0, None) for branch in range(6)]
    wishes[1] = dataclasses.replace(wishes[1], top_k=1)
    wishes[3] = dataclasses.replace(wishes[3], top_p=0.001)
    wishes[5] = dataclasses.replace(wishes[5], min_p=0.5)
    assert [token == 7 for token in sample_rows(logits, wishes, KERNELS).token_ids.tolist()] == [False, True] * 3


def test_logits_are_left_as_they_are() -> None:
    logits = made_in_inference_mode()
    sample_rows(logits, [row(banned=(1,)), row(candidates=1, banned=(1,))], KERNELS)
    assert torch.equal(logits, made_in_inference_mode())


# ---- logits that are no numbers ----


@pytest.mark.parametrize("candidates", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan] * 4, [0.0, math.nan, 0.0, 0.0], [-math.inf] * 4, [0.0, math.inf, 0.0, 0.0]])
def test_a_row_of_no_numbers_gives_no_token(bad: list[float], temperature: float, candidates: int) -> None:
    rows = [row(), row(temperature=temperature, candidates=candidates), row(temperature=1.0), row(candidates=1)]
    got = sample_rows(
        torch.tensor([[0.0, 3.0, 2.0, 1.0], bad, [0.0, -99.0, -99.0, -99.0], [0.0, 0.0, 1.0, 0.0]]), rows, KERNELS
    )
    assert got.token_ids.tolist() == [1, -1, 0, 2]
    assert not got.candidates.get(1)


def test_branches_of_one_prompt_draw_each_for_itself() -> None:
    logits = torch.zeros(1, 1_000).expand(128, -1).contiguous()
    rows = [SamplingRow(7, branch, 0, 1.0, 1.0, None) for branch in range(128)]
    together = sample_rows(logits, rows, KERNELS).token_ids.tolist()
    assert len(set(together)) > 100
    assert [int(sample_rows(logits[:1], [row], KERNELS).token_ids) for row in rows] == together


# ---- rows with a state ----


def bent(position: int = 0, **wishes: Any) -> SamplingRow:
    """Greedy; token 1 was drawn ``position`` times before."""
    state = SamplingState.start(SamplingParams(max_tokens=9, seed=0, **wishes), (0,))
    for before in range(position):
        state.accept(before, 1)
    return dataclasses.replace(row(), position=position, state=state)


@pytest.mark.parametrize("kernels", [KERNELS, reference_kernels()], ids=lambda kernels: kernels.name)
def test_a_state_bends_its_own_row_beside_all_kinds_of_others(kernels: Kernels) -> None:
    stopped = bent(1, frequency_penalty=9.0, stop_token_ids=(1,))
    rows = [
        row(candidates=2),
        bent(1, frequency_penalty=2.5),
        row(banned=(1,)),
        bent(2, allowed_token_ids=(0, 3), presence_penalty=1.0),
        bent(bad_words=((1,), (0, 2))),
        bent(allowed_token_ids=(7,)),
        bent(logit_bias=((0, 3.5), (9, 5.0))),
        stopped,
        bent(3, repetition_penalty=4.0),
        row(),
    ]
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * len(rows))
    got = sample_rows(logits, rows, kernels)
    assert got.token_ids.tolist()[:5] == [1, 2, 2, 3, 3]
    assert got.token_ids.tolist()[6:] == [0, 1, 2, 1]
    assert set(got.ends) == {5}
    assert got.ends[5].param == "allowed_token_ids"


def test_rows_are_told_as_many_of_the_likeliest_tokens_as_they_want() -> None:
    """More than the vocabulary has are all of it."""
    wanted = [None, 0, 2, 9]
    rows = [dataclasses.replace(row(banned=(1,)), num_logprobs=count) for count in wanted]
    logits = torch.tensor([[0.0, 3.0, 2.0, 2.0]] * len(rows))
    (part,) = sample_rows(logits, rows, KERNELS).logprobs
    told = LogprobsCopy(part).wait()
    assert {index: each.top_token_ids for index, each in told.items()} == {1: (), 2: (1, 2), 3: (1, 2, 3, 0)}
    assert {each.rank for each in told.values()} == {2}
    assert told[3].top_logprobs == pytest.approx(torch.log_softmax(logits[0], dim=-1)[[1, 2, 3, 0]].tolist())


# ---- candidates ----


def expected_candidates(logits: list[float], count: int, banned: tuple[int, ...]) -> tuple[Candidate, ...]:
    """Every token in order, from the definition."""
    log_probs = torch.log_softmax(torch.tensor(logits), dim=-1).tolist()
    allowed = [(token, value) for token, value in enumerate(log_probs) if token not in banned and value > -math.inf]
    return tuple(sorted(allowed, key=lambda candidate: (-candidate[1], candidate[0]))[:count])


logits_with_equals = st.lists(st.sampled_from([-math.inf, -40.0, -1.0, 0.0, 0.5, 2.0]), min_size=6, max_size=6).filter(
    lambda logits: max(logits) > -math.inf
)


@given(
    st.lists(
        st.tuples(logits_with_equals, st.integers(0, 8), st.sets(st.integers(-1, 6), max_size=4)),
        min_size=1,
        max_size=5,
    )
)
def test_candidates_are_the_likeliest_tokens_that_are_not_banned(
    wishes: list[tuple[list[float], int, set[int]]],
) -> None:
    """Best first, equals by their id; beside rows that draw, and rows that want more or fewer."""
    wishes = [wish for wish in wishes if expected_candidates(wish[0], 1, tuple(wish[2]))]
    if not wishes:
        return
    rows = [row(banned=tuple(banned), candidates=count) for _, count, banned in wishes]
    got = sample_rows(torch.tensor([logits for logits, _, _ in wishes]), rows, KERNELS)
    assert set(got.candidates) == {index for index, (_, count, _) in enumerate(wishes) if count}
    for index, (logits, count, banned) in enumerate(wishes):
        expected = expected_candidates(logits, max(count, 1), tuple(banned))
        assert int(got.token_ids[index]) == expected[0][0]
        if count:
            assert [token for token, _ in got.candidates[index]] == [token for token, _ in expected]
            assert [value for _, value in got.candidates[index]] == pytest.approx([value for _, value in expected])


def test_log_probabilities_are_those_of_the_model_whatever_is_banned() -> None:
    logits = made_in_inference_mode()
    candidates = sample_rows(logits, [row(candidates=2, banned=(1,)), row()], KERNELS).candidates[0]
    log_probs = torch.log_softmax(logits[1], dim=-1).tolist()
    assert candidates == ((2, pytest.approx(log_probs[2])), (3, pytest.approx(log_probs[3])))


def test_equals_beyond_the_last_wanted_are_left_out_by_their_id() -> None:
    logits = torch.zeros(3, 50_000)
    rows = [row(candidates=4), row(candidates=1), row(candidates=9, banned=(2,))]
    got = sample_rows(logits, rows, KERNELS).candidates
    assert [[token for token, _ in got[index]] for index in range(3)] == [
        [0, 1, 2, 3],
        [0],
        [0, 1, 3, 4, 5, 6, 7, 8, 9],
    ]


def test_rows_that_draw_are_not_moved_by_rows_that_want_candidates() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    drawn = [SamplingRow(seed, 0, 0, 1.0, 0.9, 50) for seed in range(6)]
    alone = sample_rows(logits.clone(), drawn, KERNELS).token_ids
    mixed = [row(candidates=3) if index in (1, 4) else wish for index, wish in enumerate(drawn)]
    got = sample_rows(logits.clone(), mixed, KERNELS)
    for index in (0, 2, 3, 5):
        assert got.token_ids[index] == alone[index]
    assert all(got.candidates[index][0][0] == logits[index].argmax() for index in (1, 4))


def test_a_row_that_bans_all_it_could_choose_gives_no_token() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, -math.inf]])
    for wish in (row(candidates=2, banned=(1,)), row(banned=(1,))):
        assert sample_rows(logits, [wish], KERNELS).token_ids.tolist() == [-1]
