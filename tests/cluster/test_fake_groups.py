"""Worker groups without a model: what their executor answers, what can be set, how their leaders are called."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from worker_specs import worker_spec

from octavo.cluster.config import ServeConfig
from octavo.cluster.demands import model_demand
from octavo.cluster.fake.engine import fake_engine_of
from octavo.cluster.fake.executor import Clockwork, FakeExecutor
from octavo.cluster.fake.host import LeaderHandle
from octavo.router.simulator.hardware import SETUPS
from octavo.router.simulator.step_times import StepTimes
from octavo.worker.engine import Engine
from octavo.worker.errors import ConfigurationError
from octavo.worker.grammar import GrammarCompiler
from octavo.worker.group_engine import engine_of
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.step_plan import PlanKind, StepPlan

STEP_S = 0.002
TIMES = StepTimes(STEP_S, 0.0, 0.0, 0.0, 0.0)
WORDS = (11, 12, 13)


class Loaded(NamedTuple):
    num_blocks: int
    max_model_len: int
    grammars: GrammarCompiler
    weights: str = ""


class Group:
    """An engine over a fake executor, and all that it emitted."""

    def __init__(self, folder: Path) -> None:
        executor = FakeExecutor(Clockwork(), TIMES, WORDS, hidden_size=4)
        loaded = Loaded(64, 96, GrammarCompiler.of_model(folder, 96))
        self.updates: list[SequenceUpdate] = []
        self.engine: Engine = engine_of(worker_spec(None, folder), loaded, executor, self._emit)

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        assert update.error is None, update.error
        self.updates.append(update)

    def answer(self, **fields: Any) -> list[SequenceUpdate]:
        """To a prompt of 40 tokens, all branches."""
        begin = len(self.updates)
        branches = tuple(map(Branch, range(fields.pop("n", 1))))
        params = SamplingParams(**{"max_tokens": 5, "seed": 3} | fields)
        name = f"request {begin}"
        self.engine.submit(Request(name, "gateway", "model", tuple(range(40)), b"", params, branches))
        while self.engine.step():
            pass
        return self.updates[begin:]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    return Group(tmp_path)


def tokens(updates: list[SequenceUpdate], branch: int = 0) -> list[int]:
    return [token for update in updates if update.branch == branch for token in update.token_ids]


def test_a_request_gets_words_as_many_as_it_may_have_and_the_same_for_a_seed(group: Group) -> None:
    first, again, other = (group.answer(max_tokens=20, seed=seed) for seed in (3, 3, 4))
    assert len(tokens(first)) == 20
    assert set(tokens(first)) <= set(WORDS)
    assert tokens(first) == tokens(again) != tokens(other)
    assert first[-1].finish_reason is FinishReason.LENGTH


def test_choices_differ_and_the_prompt_is_found_again(group: Group) -> None:
    updates = group.answer(n=2, max_tokens=20)
    assert tokens(updates, 0) != tokens(updates, 1)
    before = group.engine.counters.num_computed_tokens
    group.answer()
    assert group.engine.counters.num_computed_tokens - before < 40, "the real prefix cache has it"


def test_who_wants_probabilities_gets_some(group: Group) -> None:
    updates = group.answer(num_logprobs=2, num_prompt_logprobs=1)
    assert [len(update.prompt_logprobs) for update in updates if update.prompt_logprobs] == [39]
    assert sum(len(update.logprobs or ()) for update in updates) == 5


def test_steps_take_their_time_one_after_the_other() -> None:
    executor = FakeExecutor(Clockwork(), TIMES, WORDS, hidden_size=4)
    rows = [SamplingRow(1, 0, 0, 1.0, 1.0, None)]
    begin = time.monotonic()
    steps = [executor.launch(StepPlan(PlanKind.STEP, step), rows) for step in range(5)]
    assert [step.result(10).token_ids for step in steps] == [steps[0].result().token_ids] * 5
    assert time.monotonic() - begin >= 5 * STEP_S


def test_a_setup_says_how_much_a_group_holds_and_a_number_of_blocks_says_otherwise() -> None:
    setup = SETUPS["h200-8b"]
    assert fake_engine_of(ServeConfig(fake_engine="h200-8b")).num_blocks == setup.num_kv_tokens() // 16
    assert fake_engine_of(ServeConfig(fake_engine="h200-8b", num_gpu_blocks_override=100)).num_blocks == 100


def test_hundreds_of_groups_have_their_place_on_a_small_machine() -> None:
    demand = model_demand(ServeConfig(fake_engine="h100-8b", replicas=200), "cuda")
    assert demand.num_groups == 200
    assert set(demand.rank) == {"CPU"}
    assert 200 * demand.rank["CPU"] < 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fake_engine": "h100"}, "--fake-engine: .*h100 is neither a file nor one of h100-8b, h100-70b-tp4"),
        ({"fake_engine": __file__}, "--fake-engine: .*: the last line is not JSON"),
        ({"fake_engine": "h100-8b", "tensor_parallel_size": 2}, "--tensor-parallel-size says nothing with --fake"),
        ({"fake_engine": "h100-8b", "kv_cache_dtype": "int8"}, "--kv-cache-dtype says nothing with --fake-engine"),
        ({"fake_engine": "h100-8b", "max_replicas": 3}, "--max-replicas says nothing with --fake-engine"),
    ],
)
def test_what_cannot_be_is_refused_by_its_flag(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fake_engine_of(ServeConfig.parse(fields))


class Host:
    """Stands for the actor's handle."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.call = self

    def remote(self, group: str, method: str, args: tuple[Any, ...]) -> str:
        self.calls.append((group, method, args))
        return f"{group}: {method}"


def test_a_leader_is_called_like_an_actor_by_who_has_its_handle() -> None:
    handle = LeaderHandle(Host(), "group-7")
    assert handle.retire.remote(3.0) == "group-7: retire"
    copy = pickle.loads(pickle.dumps(handle))
    assert copy.line_address.remote() == "group-7: line_address"
