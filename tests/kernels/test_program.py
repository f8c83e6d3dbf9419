"""Kernels that were recorded compute what they compute one by one, for any number of rows; see cpu_program.py."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import carray
from torch import Tensor

from octavo.kernels import cpu_linear, cpu_linear_int8, cpu_team
from octavo.kernels.backend import Kernels, cpu_kernels
from octavo.kernels.cpu_numba import claim_threads, fingerprint, pointer
from octavo.kernels.cpu_program import BatchSizes, Launch, Memory, NotRecordable, Program, Team
from octavo.kernels.cpu_team import await_done, compile_work, note_done, take, words
from octavo.kernels.kv_cache import KVPool
from octavo.kernels.quantized import Int4Weight, quantize_int8

CAPACITY = 300
"""Rows that are recorded for."""
NO_BATCH = BatchSizes(0, 0, 0, 0, 0)


def team_of(kernels: Kernels) -> Team:
    assert kernels.team is not None
    return kernels.team


def int4_weight(permutation: Tensor | None = None) -> Int4Weight:
    scales, minimums = torch.rand(2, 150, 3)
    return Int4Weight(torch.randint(256, (150, 48)).to(torch.uint8), scales, -8 * minimums, permutation)


WEIGHTS: dict[str, Callable[[], Any]] = {
    "float32": lambda: torch.randn(150, 96),
    "bfloat16": lambda: torch.randn(150, 96).bfloat16(),
    "int8": lambda: quantize_int8(torch.randn(150, 96)),
    "int8 two digits": lambda: quantize_int8(torch.randn(150, 96), input_digits=2),
    "int4": int4_weight,
    "int4 permuted": lambda: int4_weight(torch.randperm(96)),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_product(kind: str, has_amx: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(num_threads)
    if not has_amx:
        monkeypatch.setattr(cpu_linear, "has_amx", lambda dtype: False)
    kernels = cpu_kernels()
    product, x = kernels.prepare_linear(WEIGHTS[kind](), torch.randn(150)), torch.empty(CAPACITY, 96)
    program, out = team_of(kernels).record(lambda: product(x))
    for num_rows in (1, 2, 16, CAPACITY, 5):
        x[:num_rows] = torch.randn(num_rows, 96)
        program.play(num_rows, NO_BATCH)
        assert torch.equal(out[:num_rows], product(x[:num_rows]))


def test_an_int8_product_whose_kernel_follows_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles or by oneDNN, where it has byte products."""
    monkeypatch.setattr(cpu_linear, "has_amx", lambda dtype: False)
    monkeypatch.setattr(cpu_linear_int8, "has_byte_products", lambda: True)
    kernels = cpu_kernels()
    product, x = kernels.prepare_linear(WEIGHTS["int8 two digits"](), torch.randn(150)), torch.randn(CAPACITY, 96)
    program, out = team_of(kernels).record(lambda: product(x))
    for num_rows in (1, 100):
        program.play(num_rows, NO_BATCH)
        assert torch.equal(out[:num_rows], product(x[:num_rows]))


class Layer:
    """One with everything: ``x [T, 48] -> (x, residual)``."""

    def __init__(self, kernels: Kernels, kv_dtype: torch.dtype, soft_cap: float | None) -> None:
        self._kernels = kernels
        self._soft_cap = soft_cap
        self._qkv, self._out, self._down = (
            kernels.prepare_linear(torch.randn(*shape)) for shape in ((6 * 16, 48), (48, 4 * 16), (48, 100))
        )
        self._gate_up = [kernels.prepare_linear(torch.randn(100, 48)) for _ in range(2)]
        self._norm, self._cos_sin = torch.randn(48), torch.randn(CAPACITY, 16)
        (self.cache,) = KVPool.allocate(1, 40, 1, 16, 16, kv_dtype, torch.device("cpu")).layers()

    def __call__(self, x: Tensor, positions: Tensor, slots: Tensor, batch: list[Tensor], **limits: int) -> Any:
        kernels = self._kernels
        normed, residual = kernels.rms_norm(x, self._norm, 1e-5)
        heads = self._qkv(normed).view(-1, 6, 16)
        query, key, value = heads.split_with_sizes([4, 1, 1], dim=1)
        query, key = kernels.rotary(query, key, positions, self._cos_sin)
        kernels.write_kv(key, value, self.cache, slots)
        attended = kernels.paged_attention(query, self.cache, *batch, scale=0.25, soft_cap=self._soft_cap, **limits)
        x = kernels.between(lambda rows: rows.mul_(0.5), self._out(attended.flatten(1)))
        x, residual = kernels.rms_norm(x, self._norm, 1e-5, residual)
        return self._down(kernels.silu_mul(kernels.join_columns([part(x) for part in self._gate_up]))), residual


@pytest.fixture(scope="module", params=[(torch.float32, None), (torch.float32, 2.0), (torch.int8, 2.0)], ids=str)
def recorded(request: pytest.FixtureRequest) -> tuple[Layer, Program, list[Tensor], Any]:
    kernels = cpu_kernels()
    layer = Layer(kernels, *request.param)
    x, ints = torch.empty(CAPACITY, 48), torch.zeros(5, CAPACITY, dtype=torch.int32)
    tables = torch.zeros(9, 20, dtype=torch.int32)
    positions, slots, lens, starts = ints[0], ints[1], ints[2, :9], ints[3, :10]
    program, result = team_of(kernels).record(
        lambda: layer(x, positions, slots, [tables, lens, starts], max_query_len=CAPACITY, max_seq_len=CAPACITY)
    )
    return layer, program, [x, positions, slots, tables, lens, starts], result


@settings(settings.get_profile("kernels"))
@given(
    news=st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=1, max_size=4),
    old=st.integers(0, 30),
    num_threads=st.sampled_from([1, 2]),
)
def test_a_layer(
    recorded: tuple[Layer, Program, list[Tensor], Any], news: list[int], old: int, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    layer, program, inputs, result = recorded
    num_tokens, num_seqs = sum(news), len(news)
    tables = torch.arange(10 * num_seqs, dtype=torch.int32).view(num_seqs, 10)
    places = [old + i for new in news for i in range(new)]
    slots = [160 * seq + old + i for seq, new in enumerate(news) for i in range(new)]
    numbers = [places, slots, [old + new for new in news], np.cumsum([0, *news]).tolist()]
    positions, slot_mapping, lens, starts = (torch.tensor(of, dtype=torch.int32) for of in numbers)
    x = torch.randn(num_tokens, 48)
    longest = max(news), old + max(news)
    expected = layer(
        x.clone(), positions, slot_mapping, [tables, lens, starts], max_query_len=longest[0], max_seq_len=longest[1]
    )
    for buffer, value in zip(inputs, [x, positions, slot_mapping, tables, lens, starts], strict=True):
        buffer.view(-1)[: value.numel()] = value.reshape(-1)
    program.play(num_tokens, BatchSizes(num_tokens, num_seqs, *longest, 10))
    for got, wanted in zip(result, expected, strict=True):
        assert torch.equal(got[:num_tokens], wanted)


@pytest.mark.parametrize("kind", [*WEIGHTS, "int8 by oneDNN", "joined", "between"])
def test_many_layers_take_no_more_memory_than_some(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where something that is no kernel is called between them."""
    monkeypatch.setattr(cpu_linear, "has_amx", lambda dtype: False)
    monkeypatch.setattr(cpu_linear_int8, "has_byte_products", lambda: kind == "int8 by oneDNN")
    kernels = cpu_kernels()
    weight = WEIGHTS.get(kind, WEIGHTS["int8" if "int8" in kind else "float32"])()
    product = kernels.prepare_linear(weight)

    def layer(x: Tensor) -> Tensor:
        out = product(x)
        if kind == "between":
            out = kernels.between(lambda rows: rows.mul_(2), out)
        return kernels.join_columns([out, out])[:, :96] if kind == "joined" else out[:, :96]

    def layers(x: Tensor, num_layers: int) -> Tensor:
        for _ in range(num_layers):
            x = layer(x)
        return x

    start = torch.randn(CAPACITY, 96)
    used = []
    for num_layers in (3, 12):
        program, out = team_of(kernels).record(lambda num_layers=num_layers: layers(start, num_layers))  # type: ignore[misc]
        used.append(program.memory.num_bytes)
        program.play(7, NO_BATCH)
        assert torch.equal(out[:7], layers(start[:7], num_layers))
    assert used[0] == used[1]


@pytest.mark.parametrize(
    "build",
    [
        lambda kernels: kernels.rms_norm(torch.ones(4, 8).half(), torch.ones(8).half(), 1e-5),
        lambda kernels: kernels.silu_mul(torch.ones(4, 8).double()),
        lambda kernels: kernels.prepare_linear(torch.ones(8, 8))(torch.ones(8, 4).t()),
    ],
    ids=["norm", "activation", "product"],
)
def test_what_has_no_kernel_is_not_recorded(build: Callable[[Kernels], Any]) -> None:
    """And the team goes on."""
    kernels = cpu_kernels()
    with pytest.raises(NotRecordable):
        team_of(kernels).record(lambda: build(kernels))
    assert build(kernels) is not None


def test_one_program_at_a_time() -> None:
    team = Team()
    with pytest.raises(RuntimeError, match="already"):
        team.record(lambda: team.record(lambda: None))


def test_a_call_that_fails_ends_the_run() -> None:
    team = Team()
    program, _ = team.record(lambda: team.call(lambda rows: 1 // (rows - 1), 5))
    program.play(2, NO_BATCH)
    with pytest.raises(ZeroDivisionError):
        program.play(1, NO_BATCH)


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    memory = Memory()
    first = memory.empty((100, 10), torch.float32)
    first_at, kept = first.data_ptr(), first[:, 3:5].t()
    del first
    gc.collect()
    second = memory.empty((100, 10), torch.float32)
    assert second.data_ptr() != first_at  # of which there is a view
    del kept
    gc.collect()
    assert memory.empty((50, 10), torch.int32).data_ptr() == first_at
    assert memory.num_bytes == 2 * 4000


@given(sizes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 5)), max_size=30))
def test_tensors_that_live_never_share_memory(sizes: list[tuple[int, int]]) -> None:
    memory, living = Memory(), []
    for size, dropped in sizes:
        del living[:dropped]
        living.append(memory.empty((size,), torch.int8))
        assert living[-1].data_ptr() % 64 == 0
        places = sorted((tensor.data_ptr(), tensor.numel()) for tensor in living if tensor.numel())
        assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(places))


def build_count() -> Any:
    sources = fingerprint(cpu_team.__file__)

    def count(words_at: Any, call_at: Any, tally_at: Any, member: Any, team: Any) -> Any:
        """Adds the member's number + 1 to each row's count. Member 0 is held up in its first row by all the others."""
        _ = sources  # for the cache's key
        (counts_at,) = words(words_at, 1)
        (rows,) = words(call_at, 1)
        counts = carray(pointer(counts_at), (rows,), np.int64)
        row, _last = take(tally_at, rows, 1)
        while row < rows:
            if member == 0:
                await_done(tally_at, rows - 1)
            counts[row] += member + 1
            note_done(tally_at, row, row + 1)
            row, _last = take(tally_at, rows, 1)
        return rows

    return compile_work(count)


def test_each_task_is_done_once_and_others_go_on_where_a_member_is_held_up() -> None:
    torch.set_num_threads(2)
    if claim_threads() < 2:
        pytest.skip("one thread is a team of one")
    work, team = build_count(), Team()
    counts = torch.zeros(40, 101, dtype=torch.int64)
    for _ in range(5):
        counts.zero_()
        team.run([Launch(work.address, (row.data_ptr(),)) for row in counts], 101)
        assert ((counts == 1).sum(1) <= 1).all()
        assert ((counts == 1) | (counts == 2)).all()
