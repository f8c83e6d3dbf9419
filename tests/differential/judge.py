"""Judge: is an output what the same request gives when it runs alone?

"The same" means: equal, unless at the first difference the two best values lie within ``NEAR_TIE``. The value of a
token is its logit, or logit / temperature + noise where tokens are drawn. Where top_k or top_p cut, a token whose place
relative to the cut is a near-tie counts as kept and as cut. For a beam search: unless one of its choices was a
near-tie, or what it found has the score that it would have alone.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from lab import ROOMY, Delivered, Lab
from oracle import Oracle, Tokens
from torch import Tensor

from octavo.kernels.noise import gumbel_noise, signed
from octavo.kernels.reference import filter_top_k, filter_top_p
from octavo.worker.beam_search import BeamSearch
from octavo.worker.candidates import likeliest
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams
from octavo.worker.sampler import sample_rows
from octavo.worker.sampling_row import SamplingRow

NEAR_TIE = 1e-3

Outputs = dict[int, tuple[Tokens, FinishReason]]


class Verdict(enum.Enum):
    EQUAL = "equal"
    NEAR_TIE = "near-tie"
    WRONG = "wrong"


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    why: str = ""


EQUAL = Judgement(Verdict.EQUAL)


class Judge:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._oracle = Oracle(lab)
        self._stack = ExitStack()
        self._roomy = self._stack.enter_context(lab.session(ROOMY))
        self._alone: dict[object, Outputs] = {}
        self.num_run_alone = 0

    def close(self) -> None:
        self._stack.close()

    # ---- alone ----

    def alone(self, request: Request) -> Outputs:
        """What the whole request gives, from its beginning, with nobody beside it and nothing cached. Remembered."""
        branches = tuple(Branch(branch.index) for branch in request.branches)
        key = request.prompt_token_ids, request.sampling, branches
        if key not in self._alone:
            self._alone[key] = self._run_alone(Request("alone", "", "model", key[0], b"", key[1], branches))
            self.num_run_alone += 1
        return self._alone[key]

    def _run_alone(self, request: Request) -> Outputs:
        self._roomy.submit(request)
        self._roomy.run()
        delivered = [self._roomy.delivered.pop((request.request_id, branch.index)) for branch in request.branches]
        return {each.branch: (tuple(each.token_ids), _ended(each.reason)) for each in delivered}

    def compare_with_alone(self, delivered: Delivered) -> Judgement:
        tokens, reason = self.alone(delivered.request)[delivered.branch]
        got = tuple(delivered.token_ids)
        if delivered.reason is FinishReason.ABORT and got == tokens[: len(got)]:
            return EQUAL
        if (got, delivered.reason) == (tokens, reason):
            return EQUAL
        at = next((i for i, (a, b) in enumerate(zip(got, tokens, strict=False)) if a != b), None)
        if delivered.request.sampling.beam_width is not None and got != tokens:
            return self._explain_search(delivered.request, delivered.branch, got)
        if at is None:
            return Judgement(
                Verdict.WRONG, f"it gave {got} and ended with {delivered.reason}; alone {tokens}, {reason}"
            )
        logits = next(self._oracle.logits(delivered.request.prompt_token_ids, [got[:at]]))[-1]
        row = sampling_row(delivered.request.sampling, delivered.branch, at)
        if all(is_near_best(logits, row, token) for token in (got[at], tokens[at])):
            return Judgement(Verdict.NEAR_TIE, f"token {at}")
        return Judgement(Verdict.WRONG, f"token {at} is {got[at]}, alone {tokens[at]}; it gave {got}, alone {tokens}")

    # ---- teacher-forced ----

    def follow(self, prompt: Tokens, delivered: Sequence[Delivered]) -> Iterator[Judgement]:
        """Whether each token of these outputs of one prompt follows from those before it. Not for beam searches."""
        known = [tuple(each.token_ids) for each in delivered]
        with_tokens = [tokens[:-1] for tokens in known if tokens]
        logits = self._oracle.logits(prompt, with_tokens)
        for each, tokens in zip(delivered, known, strict=True):
            judgement = self._follow_one(each, tokens, next(logits)) if tokens else EQUAL
            yield judgement if judgement.verdict is Verdict.WRONG or _ends_rightly(each) else _wrong_end(each)

    def _follow_one(self, delivered: Delivered, tokens: Tokens, logits: Tensor) -> Judgement:
        rows = [sampling_row(delivered.request.sampling, delivered.branch, i) for i in range(len(tokens))]
        expected = sample_rows(logits.clone(), rows, self._lab.kernels).token_ids.tolist()
        differing = [at for at, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]]
        for at in differing:
            if not is_near_best(logits[at], rows[at], tokens[at]):
                return Judgement(Verdict.WRONG, f"token {at} is {tokens[at]}, not {expected[at]}; it gave {tokens}")
        return Judgement(Verdict.NEAR_TIE, f"tokens {differing}") if differing else EQUAL

    # ---- beam searches ----

    def _explain_search(self, request: Request, branch: int, got: Tokens) -> Judgement:
        sampling = request.sampling
        margin, found = self.search(request.prompt_token_ids, sampling, len(request.branches))
        if margin <= NEAR_TIE:
            return Judgement(Verdict.NEAR_TIE, f"a choice of the search had a margin of {margin:.1e}")
        score = self.score(request.prompt_token_ids, sampling, got)
        expected = found[branch] if branch < len(found) else math.nan
        if abs(score - expected) <= NEAR_TIE:
            return Judgement(Verdict.NEAR_TIE, f"scores {score:.6f} and {expected:.6f}")
        return Judgement(Verdict.WRONG, f"it found {got} with score {score:.5f}; the best there is has {expected:.5f}")

    def search(self, prompt: Tokens, sampling: SamplingParams, count: int) -> tuple[float, list[float]]:
        """The same search on teacher-forced logits: the least margin of its choices, and the best scores."""
        search, margin = BeamSearch(sampling), math.inf
        beams: list[Tokens] = [()]
        sums = [0.0]
        while beams:
            ends = torch.stack([logits[-1] for logits in self._oracle.logits(prompt, beams)])
            log_probs = torch.log_softmax(ends, dim=-1)
            if len(beams[0]) < sampling.min_tokens:
                log_probs[:, list(sampling.stop_token_ids)] = -math.inf
            rows = likeliest(log_probs, [search.num_candidates + 1] * len(beams))
            margin = min(margin, margin_of(rows, sums, sampling))
            chosen = search.advance(rows)
            beams = [(*beams[beam.parent], beam.token_id) for beam in chosen]
            sums = [beam.log_probability for beam in chosen]
        return margin, [output.score for output in search.outputs(count)]

    def score(self, prompt: Tokens, sampling: SamplingParams, output: Tokens) -> float:
        """What a beam search ranks ``output`` by."""
        log_probs = torch.log_softmax(next(self._oracle.logits(prompt, [output[:-1]])), dim=-1)
        total = log_probs.gather(1, torch.tensor(output)[:, None]).double().sum()
        return float(total) / math.pow(len(output), sampling.length_penalty)


def margin_of(rows: Sequence[Sequence[tuple[int, float]]], sums: Sequence[float], sampling: SamplingParams) -> float:
    """How far the last continuation chosen is from the first that is not: of all, and of those that do not stop."""
    assert sampling.beam_width is not None
    rated = sorted(((sums[i] + p, token) for i, row in enumerate(rows) for token, p in row), reverse=True)
    going_on = [each for each in rated if each[1] not in sampling.stop_token_ids]
    gaps = [
        ordered[sampling.beam_width - 1][0] - ordered[sampling.beam_width][0]
        for ordered in (rated, going_on)
        if len(ordered) > sampling.beam_width
    ]
    return min(gaps, default=math.inf)


def sampling_row(sampling: SamplingParams, branch: int, position: int) -> SamplingRow:
    return SamplingRow(
        seed=sampling.seed,
        branch=branch,
        position=position,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        banned_token_ids=sampling.stop_token_ids if position < sampling.min_tokens else (),
    )


def is_near_best(logits: Tensor, row: SamplingRow, token: int) -> bool:
    """Whether rounding explains that ``token`` was taken: ``logits`` float32 ``[vocabulary]``."""
    scaled = logits.double().clone()[None]
    scaled[0, list(row.banned_token_ids)] = -math.inf
    if row.temperature == 0.0:
        return bool(scaled[0, token] >= scaled.max() - NEAR_TIE)
    scaled /= row.temperature
    surely, perhaps = _kept(scaled, row)
    one = torch.tensor([signed(row.seed)]), torch.tensor([row.branch]), torch.tensor([row.position])
    values = scaled + gumbel_noise(*one, vocab_size=scaled.shape[-1])
    best = values.masked_fill(~surely, -math.inf).max()
    return bool(perhaps[0, token]) and bool(values[0, token] >= best - NEAR_TIE)


def _kept(scaled: Tensor, row: SamplingRow) -> tuple[Tensor, Tensor]:
    """Tokens that top_k and top_p leave however the numbers round, and those that they may leave."""
    vocab_size = scaled.shape[-1]
    top_k = torch.tensor([min(row.top_k or vocab_size, vocab_size)])
    left = [
        filter_top_p(filter_top_k(scaled, top_k), torch.tensor([row.top_p + slack], dtype=torch.float64))
        for slack in ((-NEAR_TIE, NEAR_TIE) if row.top_p < 1.0 else (0.0, 0.0))
    ]
    surely, perhaps = (each > -math.inf for each in left)
    cut = scaled.masked_fill(perhaps, -math.inf).max()
    least = scaled.masked_fill(~perhaps, math.inf).min()
    surely &= (scaled > cut + NEAR_TIE) | (scaled == scaled.max())
    return surely, scaled >= least - NEAR_TIE


def _ends_rightly(delivered: Delivered) -> bool:
    """It stops at its first stop token, or has all its tokens; an aborted one has neither."""
    sampling, tokens = delivered.request.sampling, delivered.token_ids
    stops = (i for i, t in enumerate(tokens) if t in sampling.stop_token_ids and i >= sampling.min_tokens)
    stop = next(stops, None)
    if stop is not None:
        return stop == len(tokens) - 1 and delivered.reason is FinishReason.STOP
    if len(tokens) >= sampling.max_tokens:
        return len(tokens) == sampling.max_tokens and delivered.reason is FinishReason.LENGTH
    return delivered.reason is FinishReason.ABORT


def _wrong_end(delivered: Delivered) -> Judgement:
    return Judgement(Verdict.WRONG, f"it gave {delivered.token_ids} and ended with {delivered.reason}")


def _ended(reason: FinishReason | None) -> FinishReason:
    assert reason is not None
    return reason
