"""Beam search gives what transformers gives, and keeps its own promises where transformers makes none."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.worker.beam_search import Beam, BeamSearch, Output
from octavo.worker.messages import FinishReason, SamplingParams
from octavo.worker.sampling_row import Candidate

Row = Sequence[Candidate]
Model = Callable[[tuple[int, ...]], Row]
"""Output so far → all tokens with their log-probabilities, likeliest first; of equals the lowest id."""

VOCABULARY = 64


def params(width: int = 2, **changes: Any) -> SamplingParams:
    return replace(SamplingParams(max_tokens=8, seed=0, beam_width=width, stop_token_ids=(0,)), **changes)


def likeliest_first(log_probabilities: dict[int, float]) -> list[Candidate]:
    return sorted(log_probabilities.items(), key=lambda candidate: (-candidate[1], candidate[0]))


def random_model(seed: int, vocabulary: int) -> Model:
    """Each output has its own distribution, always the same. Some of its log-probabilities are equal."""

    def row(output: tuple[int, ...]) -> Row:
        draw = random.Random(f"{seed} {output}")
        weights = [draw.choice((1, 2, 3, 5, 9, 17)) for _ in range(vocabulary)]
        return likeliest_first({token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)})

    return row


def run(
    search: BeamSearch, model: Model, *, banned: Sequence[int] = (), num_candidates: int | None = None
) -> list[int]:
    """Search to the end, and check what holds in each step. Returns how many beams there were after each."""
    wanted = search.num_candidates if num_candidates is None else num_candidates
    sequences: list[tuple[int, ...]] = [()]
    widths = []
    while sequences:
        rows = [[candidate for candidate in model(output) if candidate[0] not in banned] for output in sequences]
        beams = search.advance([row[:wanted] for row in rows])
        assert list(beams) == sorted(beams, key=lambda beam: (-beam.log_probability, beam.parent, beam.token_id))
        sequences = [(*sequences[beam.parent], beam.token_id) for beam in beams]
        assert len(set(sequences)) == len(sequences)
        widths.append(len(sequences))
    return widths


def found(model: Model, sampling: SamplingParams, **how: Any) -> tuple[Output, ...]:
    search = BeamSearch(sampling)
    run(search, model, **how)
    return search.outputs(sampling.beam_width or 0)


# --- what transformers does ---


@dataclass(frozen=True)
class Case:
    """One search, drawn by a seed. At least two beams: with one, transformers does not search."""

    prompt: list[int]
    sampling: SamplingParams
    count: int

    @classmethod
    def draw(cls, seed: int) -> Case:
        draw = random.Random(seed)
        width = draw.choice((2, 3, 4, 8))
        max_tokens = draw.randint(1, 24)
        sampling = params(
            width,
            max_tokens=max_tokens,
            min_tokens=draw.choice((0, 0, min(3, max_tokens))),
            stop_token_ids=tuple(draw.sample(range(VOCABULARY), draw.choice((0, 1, 3, 6, 12)))),
            length_penalty=draw.choice((-1.0, 0.0, 0.6, 1.0, 2.0)),
            early_stopping=draw.random() < 0.4,
        )
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 6))]
        return cls(prompt, sampling, draw.randint(1, width))


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """Random weights, wide enough that some tokens are likely and some are not."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def transformers_outputs(llama: LlamaForCausalLM, case: Case) -> list[tuple[tuple[int, ...], float]]:
    sampling = case.sampling
    prompt = torch.tensor([case.prompt])
    result = llama.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=sampling.beam_width,
        num_return_sequences=case.count,
        do_sample=False,
        early_stopping=sampling.early_stopping,
        length_penalty=sampling.length_penalty,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [row[len(case.prompt) :].tolist() for row in result.sequences]
    outputs = [without_padding(row, sampling.stop_token_ids) for row in rows]
    return list(zip(outputs, result.sequences_scores.tolist(), strict=True))


def without_padding(tokens: list[int], stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    return tuple(tokens[:end])


class Llama:
    """The engine's part, by plain forward passes over whole sequences. Notes how near to a tie it came."""

    def __init__(self, llama: LlamaForCausalLM, case: Case) -> None:
        self.llama = llama
        self.prompt = case.prompt
        self.sampling = case.sampling
        self.search = BeamSearch(case.sampling)
        self.smallest_gap = math.inf

    def outputs(self, count: int) -> tuple[Output, ...]:
        sequences, sums = [list(self.prompt)], [0.0]
        while sequences:
            rows = self._candidates(sequences)
            self._note_gaps([total + value for total, row in zip(sums, rows, strict=True) for _, value in row])
            beams = self.search.advance(rows)
            sequences = [[*sequences[beam.parent], beam.token_id] for beam in beams]
            sums = [beam.log_probability for beam in beams]
        self._note_gaps([output.score for output in self.search.outputs(self.sampling.beam_width or 0)])
        return self.search.outputs(count)

    @torch.inference_mode()
    def _candidates(self, sequences: list[list[int]]) -> list[Row]:
        values = self.llama(torch.tensor(sequences)).logits[:, -1].float().log_softmax(-1)
        if len(sequences[0]) - len(self.prompt) < self.sampling.min_tokens:
            values[:, list(self.sampling.stop_token_ids)] = -math.inf
        top = values.topk(self.search.num_candidates)
        return [list(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]

    def _note_gaps(self, values: list[float]) -> None:
        gaps = [upper - lower for upper, lower in itertools.pairwise(sorted(values, reverse=True)[: 2 * VOCABULARY])]
        self.smallest_gap = min([self.smallest_gap, *gaps])


def test_outputs_and_scores_are_those_of_transformers(llama: LlamaForCausalLM) -> None:
    """But where two continuations are so near to each other that float32 sums may swap them: hardly ever."""
    near_ties, reasons = [], set()
    for seed in range(60):
        case = Case.draw(seed)
        ours = Llama(llama, case)
        outputs = ours.outputs(case.count)
        theirs = transformers_outputs(llama, case)
        if [output.token_ids for output in outputs] != [token_ids for token_ids, _ in theirs]:
            assert ours.smallest_gap < 1e-4, (case, outputs, theirs)
            near_ties.append(case)
            continue
        assert [output.score for output in outputs] == pytest.approx([score for _, score in theirs], rel=1e-5, abs=1e-5)
        reasons |= {output.reason for output in outputs}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert len(near_ties) <= 2, near_ties


# --- which beams go on ---


def test_beams_compete_over_all_parents() -> None:
    search = BeamSearch(params(2))
    assert search.advance([[(1, -0.5), (2, -1.0), (3, -3.0)]]) == (Beam(0, 1, -0.5), Beam(0, 2, -1.0))
    beams = search.advance([[(1, -2.0), (2, -2.5)], [(3, -0.5), (4, -0.75)]])
    assert beams == (Beam(1, 3, -1.5), Beam(1, 4, -1.75))


def test_of_equals_the_lower_parent_comes_first_then_the_lower_token() -> None:
    search = BeamSearch(params(3))
    assert [beam.token_id for beam in search.advance([[(1, -1.0), (2, -1.0), (5, -1.0), (7, -1.0)]])] == [1, 2, 5]
    beams = search.advance([[(4, -2.0), (9, -2.0)], [(3, -1.0), (8, -2.0)], [(2, -2.0)]])
    assert [(beam.parent, beam.token_id) for beam in beams] == [(1, 3), (0, 4), (0, 9)]


def test_a_stop_token_takes_no_beam_away() -> None:
    search = BeamSearch(params(2))
    beams = search.advance([[(0, -0.5), (1, -1.0), (2, -2.0)]])
    assert [beam.token_id for beam in beams] == [1, 2]


# --- which outputs are complete ---


def test_a_stop_token_below_the_best_width_completes_nothing() -> None:
    search = BeamSearch(params(2))
    search.advance([[(1, -0.5), (2, -1.0), (0, -1.5)]])
    assert all(output.reason is None for output in search.outputs(2))


def test_the_score_divides_by_the_length_with_its_stop_token() -> None:
    search = BeamSearch(params(2, length_penalty=2.0))
    search.advance([[(1, -1.0), (2, -8.0)]])
    search.advance([[(0, -3.0), (1, -5.0)], [(3, -9.0)]])
    assert search.outputs(1) == (Output((1, 0), -4.0 / 2**2, FinishReason.STOP),)


def test_at_max_tokens_the_best_are_complete_whatever_they_end_with() -> None:
    search = BeamSearch(params(3, max_tokens=1, length_penalty=0.0))
    assert search.advance([[(4, -1.0), (0, -2.0), (5, -3.0), (6, -4.0)]]) == ()
    assert search.outputs(3) == (
        Output((4,), -1.0, FinishReason.LENGTH),
        Output((0,), -2.0, FinishReason.STOP),
        Output((5,), -3.0, FinishReason.LENGTH),
    )


def test_a_better_output_takes_the_place_of_the_worst_complete_one() -> None:
    search = BeamSearch(params(2, length_penalty=1.0))
    search.advance([[(1, -1.0), (0, -4.0), (2, -5.0)]])
    search.advance([[(0, -5.0), (3, -5.5)], [(0, -9.0), (3, -9.5)]])
    assert [output.score for output in search.outputs(2)] == [-3.0, -4.0]
    beams = search.advance([[(0, -0.25), (4, -3.0)], [(4, -1.0)]])
    assert [output.score for output in search.outputs(2)] == [-2.25, -3.0]
    assert beams == (), "(-6.5 - 3.0) / 3 beats the one that went only"


# --- when it is over ---


def test_it_goes_on_while_a_running_beam_beats_the_worst_complete_output() -> None:
    search = BeamSearch(params(1, length_penalty=0.0))
    assert search.advance([[(0, -1.0), (1, -2.0)]]) == ()
    search = BeamSearch(params(1, length_penalty=0.0))
    search.advance([[(1, -1.0), (0, -1.0)]])
    assert search.advance([[(0, -1.0), (1, -1.0)]]) == (), "an equal one does not beat it"


@pytest.mark.parametrize(("early_stopping", "beams"), [(True, 0), (False, 2)])
def test_early_stopping_ends_with_as_many_complete_outputs_as_beams(early_stopping: bool, beams: int) -> None:
    search = BeamSearch(params(2, stop_token_ids=(0, 9), early_stopping=early_stopping))
    search.advance([[(1, -0.1), (0, -9.0), (2, -10.0)]])
    assert len(search.advance([[(9, -0.5), (3, -0.6), (4, -0.7)], [(3, -1.0)]])) == beams
    assert [output.token_ids for output in search.outputs(2)] == [(1, 9), (0,)]


def test_a_finished_search_stays_finished() -> None:
    search = BeamSearch(params(1, max_tokens=1))
    search.advance([[(4, -1.0)]])
    assert search.advance([]) == ()
    assert search.outputs(1) == (Output((4,), -1.0, FinishReason.LENGTH),)


# --- fewer candidates, and an early end ---


def test_a_short_row_gives_as_many_beams_as_it_has() -> None:
    search = BeamSearch(params(4))
    assert len(search.advance([[(1, -1.0), (2, -2.0)]])) == 2
    assert len(search.advance([[(1, -1.0), (2, -2.0)], [(1, -1.0)]])) == 3
    assert [beam.parent for beam in search.advance([[], [(1, -1.0)], []])] == [1]


def test_where_no_token_can_follow_the_search_is_over_and_shows_what_it_has() -> None:
    search = BeamSearch(params(2))
    assert search.advance([[]]) == ()
    assert search.outputs(2) == (Output((), 0.0, None),)
    search = BeamSearch(params(2))
    search.advance([[(1, -1.0), (0, -2.0), (2, -3.0)]])
    assert search.advance([[], []]) == ()
    assert [output.token_ids for output in search.outputs(2)] == [(0,), (1,)]


def test_when_only_stop_tokens_can_follow_the_search_is_over() -> None:
    search = BeamSearch(params(3))
    assert search.advance([[(0, -0.5)]]) == ()
    assert search.outputs(3) == (Output((0,), -0.5, FinishReason.STOP),)


def test_before_the_end_running_beams_follow_the_complete_outputs() -> None:
    search = BeamSearch(params(2))
    search.advance([[(1, -1.0), (0, -4.0), (2, -6.0)]])
    search.advance([[(3, -1.0), (4, -2.0)], [(5, -9.0)]])
    assert search.outputs(9) == (
        Output((0,), -4.0, FinishReason.STOP),
        Output((1, 3), -1.0, None),
        Output((1, 4), -1.5, None),
    )
    assert search.outputs(2) == search.outputs(9)[:2]
    assert search.outputs(0) == ()


def test_what_is_not_a_beam_search_or_not_its_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="beam_width"):
        BeamSearch(params(beam_width=None))
    with pytest.raises(ValueError, match="shorter"):
        BeamSearch(params()).advance([])


# --- properties ---

models = st.builds(random_model, seed=st.integers(0, 999), vocabulary=st.integers(1, 6))
searches = st.builds(
    params,
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
    stop_token_ids=st.sampled_from([(), (0,), (1,), (0, 2), (3, 3)]),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.booleans(),
)


@given(model=models, sampling=searches)
def test_never_more_beams_than_the_width_nor_steps_than_tokens(model: Model, sampling: SamplingParams) -> None:
    search = BeamSearch(sampling)
    widths = run(search, model)
    assert max(widths) <= (sampling.beam_width or 0)
    assert len(widths) <= sampling.max_tokens


@given(model=models, sampling=searches)
def test_outputs_are_complete_distinct_and_sorted(model: Model, sampling: SamplingParams) -> None:
    outputs = found(model, sampling)
    assert 1 <= len(outputs) <= (sampling.beam_width or 0)
    assert [output.score for output in outputs] == sorted((output.score for output in outputs), reverse=True)
    assert len({output.token_ids for output in outputs}) == len(outputs)
    for output in outputs:
        *before, last = output.token_ids
        assert not set(before) & set(sampling.stop_token_ids)
        is_stop = last in sampling.stop_token_ids
        assert output.reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
        assert is_stop or len(output.token_ids) == sampling.max_tokens


@given(model=models, sampling=searches)
def test_width_one_is_greedy(model: Model, sampling: SamplingParams) -> None:
    """Whatever the length penalty: when the likeliest token stops, the others have the same length."""
    greedy: tuple[int, ...] = ()
    while len(greedy) < sampling.max_tokens and not set(greedy) & set(sampling.stop_token_ids):
        greedy = (*greedy, model(greedy)[0][0])
    assert [output.token_ids for output in found(model, replace(sampling, beam_width=1))] == [greedy]


@given(model=models, sampling=searches)
def test_more_candidates_than_wanted_change_nothing(model: Model, sampling: SamplingParams) -> None:
    assert found(model, sampling) == found(model, sampling, num_candidates=1000)


@given(model=models, sampling=searches)
def test_without_stop_tokens_among_the_candidates_every_output_has_all_its_tokens(
    model: Model, sampling: SamplingParams
) -> None:
    """As under ``min_tokens``."""
    outputs = found(model, sampling, banned=sampling.stop_token_ids)
    assert all(len(output.token_ids) == sampling.max_tokens or output.reason is None for output in outputs)


@given(seed=st.integers(0, 999), penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
def test_a_search_wider_than_there_are_outputs_finds_them_all(seed: int, penalty: float) -> None:
    model = random_model(seed, vocabulary=3)
    sampling = params(64, max_tokens=4, length_penalty=penalty)
    assert {output.token_ids: pytest.approx(output.score) for output in found(model, sampling)} == {
        tokens: log_probability(model, tokens) / len(tokens) ** penalty for tokens in all_outputs(3, 4)
    }


def all_outputs(vocabulary: int, max_tokens: int) -> set[tuple[int, ...]]:
    """Those that end with token 0, which stops, or have ``max_tokens``."""
    full = itertools.product(range(vocabulary), repeat=max_tokens)
    return {without_padding(list(tokens), (0,)) for tokens in full}


def log_probability(model: Model, tokens: tuple[int, ...]) -> float:
    return sum(dict(model(tokens[:index]))[token] for index, token in enumerate(tokens))
