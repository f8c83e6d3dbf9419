"""What the runner keeps between plans: block tables, sampled tokens; and what a plan does besides computing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.kernels.backend import reference_kernels
from octavo.worker.collectives import FIRST_MESSAGE_LENGTH, SingleProcess
from octavo.worker.errors import ConfigurationError
from octavo.worker.executor import Executor
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.step_plan import PlanKind, StepPlan

SHAPE: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
"""Two blocks of four and one token."""
GREEDY = [SamplingRow(temperature=0.0, top_k=None, top_p=1.0, seed=0, branch=0, position=0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**SHAPE, num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def leader(folder: Path, start_group: Any) -> Iterator[tuple[ModelRunner, Executor]]:
    with start_group(folder) as group:
        yield group


@pytest.fixture(scope="module", params=[1, 3])
def of_each_size(request: pytest.FixtureRequest, folder: Path, start_group: Any) -> Iterator[Executor]:
    """Several tests share the ranks: to start three takes seconds."""
    with start_group(folder, request.param) as (_, executor):
        yield executor


def plan(tokens: Sequence[int | None], computed: int = 0, *, table: list[int] | None = None, **more: Any) -> StepPlan:
    """One sequence in slot 2; the logits of its last token."""
    blocks = [] if table is None else table
    return StepPlan(
        PlanKind.STEP,
        slots=np.array([2], np.int32),
        num_new_tokens=np.array([len(tokens)], np.int32),
        num_computed_tokens=np.array([computed], np.int32),
        token_ids=np.array(tokens, np.int32),
        table_updates=np.array([[2, 0, len(blocks)]] if blocks else np.empty((0, 3)), np.int32),
        table_blocks=np.array(blocks, np.int32),
        logit_indices=np.array([len(tokens) - 1], np.int32),
        **more,
    )


def run(runner: ModelRunner, step: StepPlan) -> torch.Tensor:
    logits = runner.execute(step)
    assert logits is not None
    return logits.clone()


def sampled(executor: Executor, step: StepPlan, rows: list[SamplingRow]) -> list[int | None]:
    return executor.launch(step, rows).result().token_ids


def test_tables_stay_between_plans(leader: tuple[ModelRunner, Executor]) -> None:
    runner, _ = leader
    whole = run(runner, plan(PROMPT, table=[7, 3, 5]))
    run(runner, plan(PROMPT[:6], table=[9, 8, 6]))
    assert torch.allclose(run(runner, plan(PROMPT[6:], 6)), whole, atol=1e-5)


def test_an_update_may_cover_a_part_of_the_table(leader: tuple[ModelRunner, Executor]) -> None:
    runner, _ = leader
    whole = run(runner, plan(PROMPT, table=[7, 3, 5]))
    run(runner, plan(PROMPT[:8], table=[11, 12, 0]))
    update = {"table_updates": np.array([[2, 2, 1]], np.int32), "table_blocks": np.array([13], np.int32)}
    last = dataclasses.replace(plan(PROMPT[8:], 8), **update)
    assert torch.allclose(run(runner, last), whole, atol=1e-5)


def test_copies_come_before_the_forward_pass(leader: tuple[ModelRunner, Executor]) -> None:
    runner, _ = leader
    whole = run(runner, plan(PROMPT, table=[7, 3, 5]))
    run(runner, plan(PROMPT[:6], table=[1, 2, 4]))
    copies = np.array([[1, 20], [2, 21]], np.int32)
    assert torch.allclose(run(runner, plan(PROMPT[6:], 6, table=[20, 21, 22], copies=copies)), whole, atol=1e-5)


def test_a_token_may_be_named_by_the_step_that_sampled_it(leader: tuple[ModelRunner, Executor]) -> None:
    runner, _ = leader
    expected = run(runner, plan([*PROMPT, 17], table=[7, 3, 5]))
    run(runner, plan(PROMPT, table=[7, 3, 5]))
    runner.remember(40, torch.tensor([11, 17]))
    runner.remember(41, torch.tensor([0, 0]))
    assert torch.allclose(run(runner, plan([-2], 9, tokens_from_step=40)), expected, atol=1e-5)


def test_two_steps_are_remembered(leader: tuple[ModelRunner, Executor]) -> None:
    runner, _ = leader
    for step in (1, 2, 3):
        runner.remember(step, torch.tensor([step]))
    run(runner, plan([-1], table=[7], tokens_from_step=2))
    with pytest.raises(KeyError):
        runner.execute(plan([-1], table=[7], tokens_from_step=1))


def test_a_chunk_without_logits(leader: tuple[ModelRunner, Executor]) -> None:
    runner, _ = leader
    step = dataclasses.replace(plan(PROMPT, table=[7, 3, 5]), logit_indices=np.empty(0, np.int32))
    assert run(runner, step).shape == (0, SHAPE["vocab_size"])


def test_steps_are_remembered_in_their_order_when_their_numbers_start_again(
    leader: tuple[ModelRunner, Executor],
) -> None:
    runner, _ = leader
    last = 2**31 - 1
    for step in (last - 1, last, 0):
        runner.remember(step, torch.tensor([step % 50]))
    run(runner, plan([-1], table=[7], tokens_from_step=0))
    with pytest.raises(KeyError):
        runner.execute(plan([-1], table=[7], tokens_from_step=last - 1))


def test_logits_that_several_rows_want_are_computed_once(
    leader: tuple[ModelRunner, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows keep their order, and memory of their own: what one bans is not banned for another."""
    runner, _ = leader
    step = plan(PROMPT, table=[7, 3, 5])
    wanted = [8, 2, 8, 8, 0, 2]
    each = [run(runner, dataclasses.replace(step, logit_indices=np.array([index], np.int32))) for index in wanted]
    computed = []
    project = runner.model.logits

    def count(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        computed.append(len(x))
        return project(x, residual)

    monkeypatch.setattr(runner.model, "logits", count)
    logits = runner.execute(dataclasses.replace(step, logit_indices=np.array(wanted, np.int32)))
    assert logits is not None
    assert torch.allclose(logits, torch.cat(each), atol=1e-5)
    assert computed == [3]
    with torch.inference_mode():
        logits[0] = 0.0
    assert torch.allclose(logits[2:3], each[2], atol=1e-5)


def test_rows_of_one_token_reach_the_leader_from_every_rank(of_each_size: Executor) -> None:
    step = dataclasses.replace(plan(PROMPT, table=[7, 3, 5]), logit_indices=np.array([8, 8, 3], np.int32))
    token_ids = sampled(of_each_size, step, GREEDY * 3)
    single = sampled(of_each_size, plan(PROMPT, table=[7, 3, 5]), GREEDY)
    assert token_ids[:2] == single * 2


def test_sampled_tokens_reach_every_rank(of_each_size: Executor) -> None:
    """A follow-up, launched before the token is known, gives what one with the token itself gives."""
    of_each_size.heartbeat()
    first = of_each_size.launch(plan(PROMPT, table=[7, 3, 5], step=1, share_sampled=True), GREEDY)
    named = of_each_size.launch(plan([-1], 9, tokens_from_step=1, step=2), GREEDY)
    tokens = first.result().token_ids
    given = sampled(of_each_size, plan(tokens, 9, step=3), GREEDY)
    assert named.result().token_ids == given


def test_a_token_that_could_not_be_sampled_is_0_for_every_rank(of_each_size: Executor) -> None:
    unsampleable = dataclasses.replace(GREEDY[0], temperature=1.0, seed=-1)
    first = of_each_size.launch(plan(PROMPT, table=[7, 3, 5], step=4, share_sampled=True), [unsampleable])
    named = of_each_size.launch(plan([-1], 9, tokens_from_step=4, step=5), GREEDY)
    assert first.result().token_ids == [None]
    assert named.result().token_ids == sampled(of_each_size, plan([0], 9, step=6), GREEDY)


def test_a_model_that_cannot_be_divided_is_refused(folder: Path) -> None:
    class FourRanks(SingleProcess):
        size = 4

    with pytest.raises(ConfigurationError, match="--tensor-parallel-size is 4, but the model has 3 query heads"):
        ModelRunner.load(
            folder,
            rank=0,
            size=4,
            device=torch.device("cpu"),
            dtype=torch.float32,
            collectives=FourRanks(),
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=64,
            kernels=reference_kernels(),
        )


def test_a_plan_longer_than_the_first_message_arrives(folder: Path, start_group: Any) -> None:
    blocks = list(range(FIRST_MESSAGE_LENGTH))
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 4 * len(blocks)}
    with start_group(folder) as (_, executor):
        expected = sampled(executor, plan(PROMPT, table=[7, 3, 5]), GREEDY)
    with start_group(folder, 2, limits=limits, num_blocks=len(blocks)) as (_, executor):
        assert sampled(executor, plan(PROMPT, table=blocks), GREEDY) == expected
