"""Sampling: stateless, the same on every backend, from the right distribution, and filtered as documented."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import cpu_sample_filter, noise
from octavo.kernels.backend import Kernels, reference_kernels
from octavo.kernels.sampling import GREEDY_TEMPERATURE, LogitBias, Penalties, SamplingTensors, TokenRuns

EDITS = ("penalties", "bias", "banned", "allowed")


@dataclass(frozen=True)
class Rows:
    logits: Tensor
    how: SamplingTensors

    def draw(self, kernels: Kernels) -> Tensor:
        return kernels.sample(self.logits, self.how)

    def change(self, **tensors: Any) -> Rows:
        return Rows(self.logits, replace(self.how, **tensors))

    def pick(self, index: Tensor) -> Rows:
        """Rows without runs of tokens."""
        tensors = {field.name: getattr(self.how, field.name) for field in fields(self.how)}
        picked: dict[str, Any] = {name: x[index].contiguous() for name, x in tensors.items() if isinstance(x, Tensor)}
        return Rows(self.logits[index].contiguous(), SamplingTensors(**picked))


def rows(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> Rows:
    """A row of parameters for each row of logits; the rows are successive positions of one sequence."""
    num_rows, vocab_size = logits.shape
    how = SamplingTensors(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), vocab_size if top_k is None else top_k, dtype=torch.int32),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        torch.full((num_rows,), 42, dtype=torch.int64),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.arange(num_rows, dtype=torch.int32),
        filters=top_k is not None or top_p < 1.0 or min_p > 0.0,
    )
    return Rows(logits, how)


def decisive_rows(logits: Tensor, *, temperature: float = 1.0, **parameters: Any) -> Rows:
    """A row for each token of ``logits`` [V], at the position of the stream where it wins by most, if it is kept."""
    batch = rows(logits.expand(len(logits), -1).contiguous(), temperature=temperature, **parameters)
    positions = torch.arange(4000)
    stream = noise.gumbel_noise(torch.full_like(positions, 42), torch.zeros_like(positions), positions, len(logits))
    perturbed = logits.double() / temperature + stream
    others = [perturbed.index_fill(1, token, -torch.inf).amax(1) for token in torch.arange(len(logits))[:, None]]
    lead = perturbed - torch.stack(others, dim=1)
    return batch.change(positions=lead.argmax(dim=0).int())


class Dice:
    """Random tensors of a seed."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)

    def integers(self, low: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, (self.num_rows,), generator=self.generator, dtype=dtype)

    def floats(self, *shape: int) -> Tensor:
        return torch.rand(*(shape or (self.num_rows,)), generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def often(self, x: Tensor, value: float) -> Tensor:
        """In half of the rows."""
        return torch.where(self.integers(0, 2) == 0, value, x).to(x.dtype)

    def runs(self, vocab_size: int) -> TokenRuns:
        lens = self.integers(0, min(vocab_size, 40))
        tokens = [torch.randperm(vocab_size, generator=self.generator)[:n] for n in lens.tolist()]
        return TokenRuns(torch.cat(tokens).int(), torch.cat((torch.zeros(1), lens.cumsum(0))).int())

    def penalties(self, vocab_size: int) -> Penalties:
        seen = self.runs(vocab_size)
        counts = torch.randint(0, 4, seen.tokens.shape, generator=self.generator, dtype=torch.int32)
        repetition = self.often(0.5 + self.floats(), 1.0)
        return Penalties(seen, counts, repetition, 2 * self.floats() - 1, 2 * self.floats() - 1)

    def bias(self, vocab_size: int) -> LogitBias:
        runs = self.runs(vocab_size)
        values = self.normal(*runs.tokens.shape) * 3
        return LogitBias(runs, torch.where(values < -3, -100.0, values))

    def allowed(self, vocab_size: int) -> Tensor:
        """Rows that allow everything, the most, a few tokens, or nothing; what is past the vocabulary is random."""
        share = torch.tensor([2.0, 0.9, 0.05, 0.0])[self.integers(0, 4).long()]
        bits = self.floats(self.num_rows, -(-vocab_size // 32) * 32) < share[:, None]
        return packed(bits)

    def edit(self, name: str, vocab_size: int) -> Any:
        return self.runs(vocab_size) if name == "banned" else getattr(self, name)(vocab_size)


def packed(bits: Tensor) -> Tensor:
    """bool ``[R, n * 32]`` → int32 ``[R, n]``."""
    weights = 1 << torch.arange(32, dtype=torch.int64)
    return (bits.unflatten(1, (-1, 32)) * weights).sum(dim=-1).to(torch.int32)


def random_rows(num_rows: int, vocab_size: int, seed: int, *, edits: Iterable[str] = ()) -> Rows:
    """Of every third batch the logits are bfloat16's: there are many equals. Some temperatures are tiny."""
    dice = Dice(num_rows, seed)
    logits = dice.normal(num_rows, vocab_size) * dice.floats(num_rows, 1) * 6
    how = SamplingTensors(
        torch.where(dice.integers(0, 3) == 0, dice.often(10 ** (-9 * dice.floats()), 0.0), 2 * dice.floats()),
        dice.often(dice.integers(1, vocab_size + 1), vocab_size),
        dice.often(dice.floats(), 1.0),
        dice.often(dice.floats() ** 4, 0.0),
        dice.integers(-(2**63), 2**63 - 1, torch.int64),
        dice.integers(0, 4),
        dice.integers(0, 10_000),
        **{name: dice.edit(name, vocab_size) for name in edits},
    )
    return Rows(logits.bfloat16().float() if seed % 3 == 0 else logits, how)


@settings(settings.get_profile("kernels"))
@given(
    vocab_size=st.sampled_from([1, 2, 17, 512, 1000, 9000]),
    seed=st.integers(0, 10_000),
    edits=st.sets(st.sampled_from(EDITS)),
)
def test_every_backend_draws_the_same(
    kernels: Kernels, vocab_size: int, seed: int, edits: set[str], interpreted: bool
) -> None:
    batch = random_rows(4 if interpreted else 8, vocab_size, seed, edits=sorted(edits))
    before = batch.logits.clone()
    assert torch.equal(batch.draw(kernels), batch.draw(reference_kernels()))
    assert torch.equal(batch.logits, before)


@settings(settings.get_profile("kernels"))
@given(
    spread=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 4, 11]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 10_000),
)
def test_every_backend_keeps_the_same_tokens(
    kernels: Kernels, spread: float, top_k: int | None, top_p: float, min_p: float, seed: int, interpreted: bool
) -> None:
    logits = spread * Dice(1, seed).normal(5 if interpreted else 12)
    batch = decisive_rows(logits, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(batch.draw(kernels), batch.draw(reference_kernels()))


def test_a_row_without_filters_is_the_same_beside_rows_with_them(kernels: Kernels) -> None:
    batch = rows(Dice(1, 0).normal(4, 3000))
    beside = batch.change(top_k=torch.tensor([3000, 5, 3000, 7], dtype=torch.int32), filters=True)
    assert torch.equal(batch.draw(kernels)[::2], beside.draw(kernels)[::2])


def test_a_draw_depends_on_its_row_alone(kernels: Kernels) -> None:
    batch = random_rows(12, 700, seed=3)
    together = batch.draw(kernels)
    order = torch.randperm(12, generator=torch.Generator(device=torch.get_default_device()).manual_seed(0))
    assert torch.equal(batch.pick(order).draw(kernels), together[order])
    alone = torch.cat([batch.pick(torch.tensor([row])).draw(kernels) for row in range(12)])
    assert torch.equal(alone, together)


def test_two_threads_draw_the_same(kernels: Kernels) -> None:
    batch = random_rows(12, 700, seed=3, edits=EDITS)
    alone = batch.draw(kernels)
    torch.set_num_threads(2)
    assert torch.equal(batch.draw(kernels), alone)


@pytest.mark.parametrize("field", ["seeds", "branches", "positions"])
def test_seed_branch_and_position_each_change_the_draw(kernels: Kernels, field: str) -> None:
    batch = rows(torch.zeros(1, 1000).expand(20, -1).contiguous())
    batch = batch.change(positions=torch.zeros_like(batch.how.positions))
    batch = batch.change(**{field: torch.arange(20).to(getattr(batch.how, field).dtype)})
    assert len(set(batch.draw(kernels).tolist())) > 15


def test_draws_follow_the_softmax(kernels: Kernels, interpreted: bool) -> None:
    """Pearson's chi-square over 5 tokens: 18.5 is passed once in a thousand sets of draws, and these never change."""
    num_draws = 200 if interpreted else 20_000
    logits = torch.tensor([0.0, 1.0, -0.8, 1.5, 0.5])
    drawn = rows(logits.expand(num_draws, -1).contiguous(), temperature=0.8).draw(kernels)
    observed = torch.bincount(drawn, minlength=5).double()
    expected = (logits / 0.8).double().softmax(0) * num_draws
    assert ((observed - expected) ** 2 / expected).sum() < 18.5


def test_temperature_zero_is_the_best_token_the_lowest_of_equals(kernels: Kernels) -> None:
    logits = torch.randn(6, 3000)
    logits[:, 700] = logits[:, 2900] = 9.0
    assert rows(logits, temperature=0.0, top_k=3, top_p=0.1).draw(kernels).tolist() == [700] * 6


def kept(kernels: Kernels, logits: list[float], **parameters: float) -> set[int]:
    """The tokens that are drawn where each would be."""
    return set(decisive_rows(torch.tensor(logits), **parameters).draw(kernels).tolist())


def log(*probabilities: float) -> list[float]:
    return torch.tensor(probabilities).log().tolist()


def test_top_k_keeps_the_k_best(kernels: Kernels) -> None:
    assert kept(kernels, [0.0, 0.3, 0.1, 0.2], top_k=2) == {1, 3}


def test_top_k_keeps_equals_of_the_kth(kernels: Kernels) -> None:
    assert kept(kernels, [0.0, 0.3, 0.2, 0.2], top_k=2) == {1, 2, 3}


def test_top_p_keeps_the_fewest_tokens_that_reach_it(kernels: Kernels) -> None:
    assert kept(kernels, log(0.1, 0.4, 0.2, 0.3), top_p=0.65) == {1, 3}


def test_top_p_keeps_equals_of_its_last(kernels: Kernels) -> None:
    assert kept(kernels, log(0.2, 0.4, 0.2, 0.2), top_p=0.5) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [1e-9, 0.0])
def test_top_p_keeps_at_least_one(kernels: Kernels, top_p: float) -> None:
    assert kept(kernels, log(0.26, 0.25, 0.25, 0.24), top_p=top_p) == {0}


def test_top_k_comes_before_top_p(kernels: Kernels) -> None:
    """Of the two that top_k leaves, the first holds 0.4 / 0.7 = 0.57 and so reaches top_p by itself."""
    assert kept(kernels, log(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == {0}
    assert kept(kernels, log(0.4, 0.3, 0.2, 0.1), top_p=0.5) == {0, 1}


def test_min_p_keeps_what_has_its_share_of_the_best_probability(kernels: Kernels) -> None:
    assert kept(kernels, log(0.5, 0.26, 0.24), min_p=0.5) == {0, 1}
    assert kept(kernels, log(0.3, 0.4, 0.3), min_p=1.0) == {1}


def test_min_p_comes_before_top_p(kernels: Kernels) -> None:
    """Of the two that min_p leaves, the first holds 0.4 / 0.7 = 0.57 and so reaches top_p by itself."""
    assert kept(kernels, log(0.4, 0.3, 0.2, 0.1), min_p=0.7, top_p=0.5) == {0}


def test_temperature_comes_before_min_p(kernels: Kernels) -> None:
    """At temperature 0.5 the ratio 2 / 3 becomes 4 / 9."""
    assert kept(kernels, log(0.6, 0.4), min_p=0.6) == {0, 1}
    assert kept(kernels, log(0.6, 0.4), min_p=0.6, temperature=0.5) == {0}


def test_temperature_comes_before_top_p(kernels: Kernels) -> None:
    """At temperature 0.5 probabilities 0.6 and 0.4 become 0.69 and 0.31."""
    assert kept(kernels, log(0.6, 0.4), top_p=0.65) == {0, 1}
    assert kept(kernels, log(0.6, 0.4), top_p=0.65, temperature=0.5) == {0}


@pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_a_token_at_minus_infinity_is_never_drawn(kernels: Kernels, parameters: dict[str, float]) -> None:
    assert kept(kernels, [-torch.inf, 0.0, -torch.inf, 0.0], **parameters) <= {1, 3}


# ---- bans and penalties ----


def one_run(*tokens: int) -> TokenRuns:
    return TokenRuns(torch.tensor(tokens, dtype=torch.int32), torch.tensor([0, len(tokens)], dtype=torch.int32))


def best(kernels: Kernels, logits: list[float], **edits: Any) -> int:
    return int(rows(torch.tensor([logits]), temperature=0.0).change(**edits).draw(kernels))


def penalise(
    counts: dict[int, int], *, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0
) -> Penalties:
    """Of one row: the tokens that are there, and how often in the output."""
    strengths = (torch.tensor([strength]) for strength in (repetition, frequency, presence))
    return Penalties(one_run(*counts), torch.tensor(list(counts.values()), dtype=torch.int32), *strengths)


def test_banned_tokens_are_not_drawn(kernels: Kernels) -> None:
    logits = [3.0, 2.0, 1.0]
    assert best(kernels, logits, banned=one_run(0, 1)) == 2
    assert best(kernels, logits, banned=one_run(0), penalties=penalise({0: 1}, presence=-9.0)) == 1
    assert best(kernels, logits, banned=one_run(0, 1, 2)) == -1


def test_repetition_divides_what_is_positive_and_multiplies_the_rest(kernels: Kernels) -> None:
    """In the prompt as in the output."""
    for counts in ({0: 0}, {0: 3}):
        assert best(kernels, [3.0, 2.0], penalties=penalise(counts, repetition=1.4)) == 0
        assert best(kernels, [3.0, 2.0], penalties=penalise(counts, repetition=1.6)) == 1
        assert best(kernels, [-2.0, -3.0], penalties=penalise(counts, repetition=1.4)) == 0
        assert best(kernels, [-2.0, -3.0], penalties=penalise(counts, repetition=1.6)) == 1


def test_frequency_is_taken_off_for_each_time_in_the_output(kernels: Kernels) -> None:
    assert best(kernels, [3.0, 2.0], penalties=penalise({0: 2}, frequency=0.45)) == 0
    assert best(kernels, [3.0, 2.0], penalties=penalise({0: 2}, frequency=0.55)) == 1
    assert best(kernels, [3.0, 2.0], penalties=penalise({0: 0}, frequency=9.0)) == 0


def test_presence_is_taken_off_once_for_what_is_in_the_output(kernels: Kernels) -> None:
    assert best(kernels, [3.0, 2.0], penalties=penalise({0: 9}, presence=0.9)) == 0
    assert best(kernels, [3.0, 2.0], penalties=penalise({0: 9}, presence=1.1)) == 1
    assert best(kernels, [3.0, 2.0], penalties=penalise({0: 0}, presence=9.0)) == 0


def test_repetition_comes_before_frequency(kernels: Kernels) -> None:
    """4 / 2 - 1 = 1, not (4 - 1) / 2."""
    assert best(kernels, [4.0, 1.25], penalties=penalise({0: 1}, repetition=2.0, frequency=1.0)) == 1


# ---- bias and the allow-mask ----


def bias(values: dict[int, float]) -> LogitBias:
    """Of one row."""
    return LogitBias(one_run(*values), torch.tensor(list(values.values())))


def allow(*tokens: int, vocab_size: int) -> Tensor:
    """Of one row: these alone."""
    bits = torch.zeros(1, -(-vocab_size // 32) * 32, dtype=torch.bool)
    bits[0, list(tokens)] = True
    return packed(bits)


def test_a_bias_is_added(kernels: Kernels) -> None:
    assert best(kernels, [3.0, 2.0, 1.0], bias=bias({0: -1.5, 2: 1.5})) == 2
    assert best(kernels, [3.0, 2.0, 1.0], bias=bias({0: -100.0, 1: -100.0, 2: -100.0})) == 0


def test_a_bias_is_the_same_whatever_was_penalised(kernels: Kernels) -> None:
    """4 / 2 + 1 = 3, not (4 + 1) / 2."""
    assert best(kernels, [4.0, 2.75], bias=bias({0: 1.0}), penalties=penalise({0: 1}, repetition=2.0)) == 0


def test_a_bias_brings_nothing_back_that_is_banned_or_not_allowed(kernels: Kernels) -> None:
    assert best(kernels, [1.0, 2.0], bias=bias({0: 100.0}), banned=one_run(0)) == 1
    assert best(kernels, [1.0, 2.0], bias=bias({0: 100.0}), allowed=allow(1, vocab_size=2)) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_only_what_is_allowed_is_drawn(
    kernels: Kernels, temperature: float, filters: dict[str, Any], interpreted: bool
) -> None:
    """Fewer than top_k, at both ends of words, in the last word that is not whole."""
    vocab_size, tokens, num_rows = 1009, (0, 31, 32, 1008), 8 if interpreted else 40
    logits = Dice(1, 4).normal(1, vocab_size).expand(num_rows, -1).contiguous()
    mask = allow(*tokens, vocab_size=vocab_size).expand(num_rows, -1).contiguous()
    drawn = rows(logits, temperature=temperature, **filters).change(allowed=mask).draw(kernels).tolist()
    assert set(drawn) <= set(tokens)
    assert len(set(drawn)) == 1 if temperature == 0.0 else len(set(drawn)) > 1


def test_a_row_that_allows_nothing_has_no_token_and_others_go_on(kernels: Kernels) -> None:
    mask = torch.cat((allow(vocab_size=40), allow(39, vocab_size=40), torch.full((1, 2), -1, dtype=torch.int32)))
    logits = torch.arange(40.0).flip(0).expand(3, -1).contiguous()
    assert rows(logits, temperature=0.0).change(allowed=mask).draw(kernels).tolist() == [-1, 39, 0]
    assert rows(logits, top_p=0.5).change(allowed=mask).draw(kernels).tolist()[:2] == [-1, 39]


@pytest.mark.parametrize("temperature", [1e-9, GREEDY_TEMPERATURE])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("edits", [(), EDITS])
def test_a_tiny_temperature_is_zero(
    kernels: Kernels, temperature: float, filters: dict[str, Any], edits: tuple[str, ...]
) -> None:
    """BUG-045: never NaN, and the lowest of equals, also where the best are not allowed or have a bias of -100."""
    dice = Dice(6, 5)
    logits = dice.normal(6, 700).bfloat16().float() * 10
    changes = {name: dice.edit(name, 700) for name in edits}
    greedy, tiny = (rows(logits, temperature=t, **filters).change(**changes) for t in (0.0, temperature))
    assert torch.equal(tiny.draw(kernels), greedy.draw(kernels))


def test_the_greedy_token_is_its_own_first_alternative(kernels: Kernels) -> None:
    """BUG-043, where many are equal and 0 is -0 as well."""
    logits = (Dice(8, 2).normal(8, 700) * 2).round()
    logits[:4] = -logits[:4].abs()
    token_ids = rows(logits, temperature=0.0).draw(kernels)
    found = kernels.logprobs(logits, token_ids, 1)
    assert torch.equal(found.top_token_ids[:, 0], token_ids.int())
    assert torch.equal(found.top_logprobs[:, 0], found.logprobs)
    assert found.ranks.tolist() == [1] * 8


# ---- logits that are no numbers ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("parameters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_nan_never_becomes_a_token(kernels: Kernels, temperature: float, parameters: dict[str, Any]) -> None:
    """Wherever it stands, whatever its sign; nor does a row without a finite number. The other rows go on."""
    logits = Dice(1, 0).normal(7, 1500)
    logits[0, 0] = logits[1, 1499] = torch.nan
    logits[2, 700] = -torch.tensor(torch.nan)
    logits[3] = torch.nan
    logits[4] = -torch.inf
    logits[5, 3] = torch.inf
    drawn = rows(logits, temperature=temperature, **parameters).draw(kernels)
    assert drawn[:6].tolist() == [-1] * 6
    assert 0 <= int(drawn[6]) < 1500


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
def test_what_is_no_number_counts_also_where_it_is_banned(kernels: Kernels, logit: float) -> None:
    assert best(kernels, [3.0, logit, 1.0], banned=one_run(1)) == -1


def test_minus_infinity_has_a_bucket_of_top_ps_histogram() -> None:
    """Written beyond it, a compiled kernel would spoil somebody else's memory."""
    values = np.array([0.0, -1.0, -np.inf], np.float32)
    threshold = cpu_sample_filter._top_p_threshold.py_func(values, np.empty_like(values), np.float32(0), 1.0, 1.2)
    assert threshold == -1.0


# ---- noise ----


def mixed(x: int) -> int:
    """SplitMix64's finaliser in Python's integers."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@settings(settings.get_profile("kernels"))
@given(
    seed=st.integers(0, 2**64 - 1),
    branch=st.integers(0, 2**31 - 1),
    position=st.integers(0, 2**31 - 1),
    token=st.integers(0, 300),
)
def test_noise_is_the_documented_hash(seed: int, branch: int, position: int, token: int) -> None:
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15
    key = mixed((mixed((seed + gamma) & mask) + (branch << 32 | position)) & mask)
    bits = mixed((key + token * gamma) & mask)
    uniform = noise.uniform_noise(
        torch.tensor([noise.signed(seed)]), torch.tensor([branch]), torch.tensor([position]), token + 1
    )
    assert uniform[0, token].item() == ((bits >> 12) + 0.5) / 2**52
    assert 0.0 < uniform[0, token].item() < 1.0


def test_the_noise_never_changes() -> None:
    """A stream that is taken over by another version must go on as it began."""
    seed = torch.tensor([noise.signed(2**63 + 5)])
    uniform = noise.uniform_noise(seed, torch.tensor([1]), torch.tensor([7]), 3)
    assert uniform[0].tolist() == [0.40034684403783716, 0.051068194537089995, 0.3244691586310914]


def test_the_finaliser_is_splitmix64s() -> None:
    """The generator's first number from seed 0, as published with it."""
    assert noise.mix(torch.tensor([noise.signed(noise.GAMMA)])).item() == noise.signed(0xE220A8397B1DCDAF)
