"""Sampling: stateless, the same on every backend, from the right distribution, and filtered as documented."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import noise
from octavo.kernels.backend import Kernels, reference_kernels


@dataclass
class Rows:
    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    branches: Tensor
    positions: Tensor

    def draw(self, kernels: Kernels) -> Tensor:
        return kernels.sample(*(getattr(self, field.name) for field in fields(self)))

    def pick(self, index: Tensor) -> Rows:
        return Rows(*(getattr(self, field.name)[index].contiguous() for field in fields(self)))


def rows(logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Rows:
    """A row of parameters for each row of logits; the rows are successive positions of one sequence."""
    num_rows, vocab_size = logits.shape
    return Rows(
        logits,
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), vocab_size if top_k is None else top_k, dtype=torch.int32),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), 42, dtype=torch.int64),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.arange(num_rows, dtype=torch.int32),
    )


def random_rows(num_rows: int, vocab_size: int, seed: int) -> Rows:
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)

    def integers(low: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator, dtype=dtype)

    spread = torch.rand(num_rows, 1, generator=generator) * 6
    top_k = integers(1, vocab_size + 1)
    top_p = torch.rand(num_rows, generator=generator)
    temperature = torch.rand(num_rows, generator=generator) * 2
    temperature[integers(0, 5) == 0] = 0.0
    top_k[integers(0, 2) == 0] = vocab_size
    top_p[integers(0, 2) == 0] = 1.0
    return Rows(
        torch.randn(num_rows, vocab_size, generator=generator) * spread,
        temperature,
        top_k,
        top_p,
        integers(-(2**63), 2**63 - 1, torch.int64),
        integers(0, 4),
        integers(0, 10_000),
    )


@settings(settings.get_profile("kernels"))
@given(vocab_size=st.sampled_from([1, 2, 17, 512, 1000, 9000]), seed=st.integers(0, 10_000))
def test_every_backend_draws_the_same(kernels: Kernels, vocab_size: int, seed: int) -> None:
    batch = random_rows(8, vocab_size, seed)
    assert torch.equal(batch.draw(kernels), batch.draw(reference_kernels()))


def test_a_draw_depends_on_its_row_alone(kernels: Kernels) -> None:
    batch = random_rows(12, 700, seed=3)
    together = batch.draw(kernels)
    order = torch.randperm(12, generator=torch.Generator(device=torch.get_default_device()).manual_seed(0))
    assert torch.equal(batch.pick(order).draw(kernels), together[order])
    alone = torch.cat([batch.pick(torch.tensor([row])).draw(kernels) for row in range(12)])
    assert torch.equal(alone, together)


def test_two_threads_draw_the_same(kernels: Kernels) -> None:
    batch = random_rows(12, 700, seed=3)
    alone = batch.draw(kernels)
    torch.set_num_threads(2)
    assert torch.equal(batch.draw(kernels), alone)


@pytest.mark.parametrize("field", ["seeds", "branches", "positions"])
def test_seed_branch_and_position_each_change_the_draw(kernels: Kernels, field: str) -> None:
    batch = rows(torch.zeros(1, 1000).expand(20, -1).contiguous())
    batch.positions = torch.zeros_like(batch.positions)
    setattr(batch, field, torch.arange(20).to(getattr(batch, field).dtype))
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
    """The tokens that are ever drawn in 60 positions."""
    batch = rows(torch.tensor([logits]).expand(60, -1).contiguous(), **parameters)  # type: ignore[arg-type]
    return set(batch.draw(kernels).tolist())


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


def test_temperature_comes_before_top_p(kernels: Kernels) -> None:
    """At temperature 0.5 probabilities 0.6 and 0.4 become 0.69 and 0.31."""
    assert kept(kernels, log(0.6, 0.4), top_p=0.65) == {0, 1}
    assert kept(kernels, log(0.6, 0.4), top_p=0.65, temperature=0.5) == {0}


@pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_a_token_at_minus_infinity_is_never_drawn(kernels: Kernels, parameters: dict[str, float]) -> None:
    assert kept(kernels, [-torch.inf, 0.0, -torch.inf, 0.0], **parameters) <= {1, 3}


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
