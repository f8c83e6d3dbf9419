"""Steps of decoding that are played back: which graph a step takes, when which is recorded, and that it computes what
the step computes without. On a CPU a graph is its run again, on the same buffers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from again import Again
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.kernels.backend import Kernels, reference_kernels, select_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.decode_graphs import context_classes, graph_sizes
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sampling_row import SamplingRow
from octavo.worker.step_plan import GraphKey, PlanKind, StepPlan

MAX_NUM_SEQS, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, VOCABULARY = 6, 4, 48, 40, 50
GREEDY = SamplingRow(temperature=0.0, top_k=None, top_p=1.0, seed=0, branch=0, position=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    shape: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": VOCABULARY}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=64)).save_pretrained(path)
    return path


def make_runner(folder: Path, kernels: Kernels, recorder: Again | None = None) -> ModelRunner:
    runner = ModelRunner.load(
        folder,
        rank=0,
        size=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        collectives=SingleProcess(),
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        kernels=kernels,
    )
    runner.allocate_kv(NUM_BLOCKS)
    if recorder is not None:
        runner.use_graphs(recorder)
    return runner


@pytest.fixture
def recorder() -> Again:
    return Again()


@pytest.fixture
def runner(folder: Path, recorder: Again) -> ModelRunner:
    return make_runner(folder, reference_kernels(), recorder)


def decode(num_seqs: int, seq_len: int = 3, **more: Any) -> StepPlan:
    """Each of the sequences computes its token number ``seq_len``."""
    rows = np.arange(num_seqs, dtype=np.int32)
    return StepPlan(
        PlanKind.STEP,
        slots=rows,
        num_new_tokens=np.ones_like(rows),
        num_computed_tokens=np.full_like(rows, seq_len - 1),
        token_ids=rows.copy(),
        logit_indices=rows,
        **more,
    )


def find(runner: ModelRunner, plan: StepPlan) -> GraphKey | None:
    assert runner.graphs is not None
    return runner.graphs.find(plan)


def capture(runner: ModelRunner, *keys: GraphKey, collectives: SingleProcess | None = None) -> None:
    for key in keys:
        runner.capture(key, collectives or SingleProcess())


# ---- which graph ----


def test_sizes_reach_up_to_the_sequences_that_may_run() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graph_sizes(300)[-5:] == [248, 256, 272, 288, 300]
    assert graph_sizes(4096)[-2:] == [496, 512]


def test_contexts_reach_up_to_the_longest() -> None:
    assert context_classes(512) == [512]
    assert context_classes(8192) == [2048, 8192]
    assert context_classes(131072) == [2048, 16384, 131072]


def test_a_step_takes_the_smallest_graph_that_holds_it(runner: ModelRunner) -> None:
    capture(runner, *(GraphKey(size, MAX_MODEL_LEN) for size in (1, 2, 4, 6)))
    taken = [find(runner, decode(num_seqs)) for num_seqs in range(1, 7)]
    assert [key.num_rows for key in taken if key] == [1, 2, 4, 4, 6, 6]


def test_until_its_own_is_recorded_a_step_takes_a_larger_one(runner: ModelRunner) -> None:
    capture(runner, GraphKey(6, MAX_MODEL_LEN), GraphKey(4, MAX_MODEL_LEN))
    assert find(runner, decode(1)) == GraphKey(4, MAX_MODEL_LEN)
    assert runner.next_graph(idle=False) == GraphKey(1, MAX_MODEL_LEN)


def test_a_step_with_a_prompt_takes_none(runner: ModelRunner) -> None:
    capture(runner, GraphKey(6, MAX_MODEL_LEN))
    prompt = np.array([1, 1, 3], np.int32)
    mixed = StepPlan(
        PlanKind.STEP,
        slots=np.arange(3, dtype=np.int32),
        num_new_tokens=prompt,
        num_computed_tokens=np.array([7, 8, 0], np.int32),
        token_ids=np.zeros(5, np.int32),
    )
    assert find(runner, mixed) is None


def test_a_longer_context_has_graphs_of_its_own(folder: Path, recorder: Again) -> None:
    graphs = make_runner(folder, reference_kernels(), recorder).graphs
    assert graphs is not None
    graphs.contexts = [16, MAX_MODEL_LEN]
    graphs.record(GraphKey(6, 16), lambda agreed: agreed)
    assert graphs.find(decode(2, seq_len=16)) == GraphKey(6, 16)
    assert graphs.find(decode(2, seq_len=17)) is None
    assert graphs.next_key(idle=False) == GraphKey(2, MAX_MODEL_LEN)


# ---- when which is recorded ----


def test_an_idle_group_records_the_largest_first_and_comes_to_an_end(runner: ModelRunner) -> None:
    recorded = []
    while (key := runner.next_graph(idle=True)) is not None:
        recorded.append(key.num_rows)
        capture(runner, key)
    assert recorded == [6, 4, 2, 1]


def test_under_load_only_what_was_missed_is_recorded(runner: ModelRunner) -> None:
    assert runner.next_graph(idle=False) is None
    find(runner, decode(3))
    assert runner.next_graph(idle=False) == GraphKey(4, MAX_MODEL_LEN)
    capture(runner, GraphKey(4, MAX_MODEL_LEN))
    assert runner.next_graph(idle=False) is None


def test_without_memory_none_is_recorded(runner: ModelRunner, recorder: Again) -> None:
    capture(runner, GraphKey(6, MAX_MODEL_LEN))
    recorder.is_full = True
    capture(runner, GraphKey(4, MAX_MODEL_LEN))
    assert find(runner, decode(1)) == GraphKey(6, MAX_MODEL_LEN), "what there is stays"
    assert runner.next_graph(idle=True) is None


def test_a_graph_that_cannot_be_recorded_leaves_the_way_without(runner: ModelRunner, recorder: Again) -> None:
    recorder.failure = torch.OutOfMemoryError("CUDA out of memory")
    capture(runner, GraphKey(6, MAX_MODEL_LEN))
    assert runner.next_graph(idle=True) is None
    assert runner.execute(decode(2)) is not None
    assert recorder.num_replays == 0


def test_a_graph_that_another_rank_could_not_record_is_not_used(runner: ModelRunner) -> None:
    class OtherFailed(SingleProcess):
        answers: ClassVar = [1, 0]

        def minimum(self, value: int) -> int:
            return min(value, self.answers.pop(0))

    capture(runner, GraphKey(6, MAX_MODEL_LEN), collectives=OtherFailed())
    assert find(runner, decode(2)) is None
    assert runner.next_graph(idle=True) is None


def test_graphs_are_forgotten_with_the_kv_cache_that_they_read(runner: ModelRunner) -> None:
    capture(runner, GraphKey(6, MAX_MODEL_LEN))
    runner.allocate_kv(NUM_BLOCKS)
    assert find(runner, decode(1)) is None


def test_recording_changes_nothing_of_a_sequence(runner: ModelRunner) -> None:
    pool = runner.kv_pool.data.fill_(0.5)
    before = pool.clone()
    capture(runner, GraphKey(6, MAX_MODEL_LEN))
    assert torch.equal(pool, before)


# ---- what is played back ----


@dataclass
class Run:
    """A sequence: its slot, its blocks, what it has computed, and its next token if it is known."""

    slot: int
    blocks: list[int]
    num_computed: int = 0
    pending: list[int] = field(default_factory=list)
    row: int | None = None
    """Of the step before, in which its next token was sampled."""


class Crowd:
    """Sequences that come, grow, fork and end, as plans."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runs: list[Run] = []
        self.slots = list(range(MAX_NUM_SEQS))
        self.blocks = self.random.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.step = 0

    def plan(self) -> StepPlan:
        """The next step: now and then a prompt; else a token for those that run, or most of them."""
        self.step += 1
        self._end_some()
        if not self.runs or (self.slots and self.random.random() < 0.3):
            self._start()
        chosen = [run for run in self.runs if run.pending or self.random.random() < 0.9] or self.runs[:1]
        self.random.shuffle(chosen)
        updates, blocks, tokens = [], [], []
        counts = [max(1, len(run.pending)) for run in chosen]
        copies = [
            self._copy_last(run) for run in chosen if self.random.random() < 0.1 and run.num_computed % BLOCK_SIZE
        ]
        for run, count in zip(chosen, counts, strict=True):
            first = 0 if run.num_computed == 0 or copies else len(run.blocks)
            while len(run.blocks) * BLOCK_SIZE < run.num_computed + count:
                run.blocks.append(self.blocks.pop())
            if first < len(run.blocks):
                updates.append((run.slot, first, len(run.blocks) - first))
                blocks += run.blocks[first:]
            tokens += run.pending or [self._next_token(run)]
        names = min(tokens) < 0
        plan = StepPlan(
            PlanKind.STEP,
            step=self.step,
            slots=np.array([run.slot for run in chosen], np.int32),
            num_new_tokens=np.array(counts, np.int32),
            num_computed_tokens=np.array([run.num_computed for run in chosen], np.int32),
            token_ids=np.array(tokens, np.int32),
            tokens_from_step=self.step - 1 if names else None,
            table_updates=np.array(updates, np.int32).reshape(-1, 3),
            table_blocks=np.array(blocks, np.int32),
            copies=np.array(copies, np.int32).reshape(-1, 2),
            logit_indices=(np.cumsum(counts) - 1).astype(np.int32),
        )
        for run in self.runs:
            run.row = None
        for row, (run, count) in enumerate(zip(chosen, counts, strict=True)):
            run.num_computed, run.pending, run.row = run.num_computed + count, [], row
        return plan

    def _next_token(self, run: Run) -> int:
        """Named by row where the step before sampled it."""
        return self.random.randrange(VOCABULARY) if run.row is None else -1 - run.row

    def _start(self) -> None:
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 9))]
        self.runs.append(Run(self.slots.pop(), [], pending=prompt))

    def _end_some(self) -> None:
        for run in list(self.runs):
            if run.num_computed >= MAX_MODEL_LEN - 1 or self.random.random() < 0.08:
                self.runs.remove(run)
                self.slots.append(run.slot)
                self.blocks = run.blocks + self.blocks

    def _copy_last(self, run: Run) -> tuple[int, int]:
        source, run.blocks[-1] = run.blocks[-1], self.blocks.pop()
        self.blocks.insert(0, source)
        return source, run.blocks[-1]


@pytest.mark.parametrize("kernels", [reference_kernels(), select_kernels(torch.device("cpu"))], ids=lambda k: k.name)
def test_steps_that_are_played_back_give_what_they_give_without(kernels: Kernels, folder: Path) -> None:
    recorder = Again()
    eager, played = make_runner(folder, kernels), make_runner(folder, kernels, recorder)
    crowd, num_decodes = Crowd(seed=1), 0
    for number in range(70):
        if number == 8:  # in the midst of it; all later steps of decoding fit into this one
            capture(played, GraphKey(MAX_NUM_SEQS, MAX_MODEL_LEN))
        if number % 16 == 8 and (key := played.next_graph(idle=False)) is not None:
            capture(played, key)
        plan = crowd.plan()
        expected, actual = eager.execute(plan), played.execute(plan)
        assert expected is not None
        assert actual is not None
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        token_ids = expected.argmax(dim=-1)
        for runner in (eager, played):
            runner.remember(plan.step, token_ids)
        num_decodes += number >= 8 and plan.token_ids.size == plan.slots.size
    assert recorder.num_replays == num_decodes > 30


@pytest.mark.parametrize("indices", [[2, 0], [1, 1, 0, 2], []])
def test_rows_of_a_played_step_come_as_the_plan_wants_them(indices: list[int], runner: ModelRunner) -> None:
    wanted = {"logit_indices": np.array(indices, np.int32)}
    plan = decode(3, table_updates=np.array([[0, 0, 1], [1, 0, 1], [2, 0, 1]]), table_blocks=np.array([3, 4, 5]))
    runner.kv_pool.data.zero_()
    plan = StepPlan(**{name: getattr(plan, name) for name in StepPlan.__dataclass_fields__} | wanted)
    expected = runner.execute(plan)
    capture(runner, GraphKey(4, MAX_MODEL_LEN))
    torch.testing.assert_close(runner.execute(plan), expected)


def test_all_ranks_play_back_the_same(folder: Path, start_group: Any) -> None:
    """Named tokens too: those of step 1 are not known when step 2 is launched."""
    limits = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 40}
    tables = np.array([[0, 0, 2], [1, 0, 2]], np.int32)
    more = {"table_updates": tables, "table_blocks": np.array([7, 3, 5, 6], np.int32)}
    outputs = []
    for graphs in (False, True):
        with start_group(folder, 2, limits=limits, graphs=graphs) as (runner, executor):
            runner.kv_pool.data.zero_()
            executor.heartbeat()
            executor.heartbeat()
            first = executor.launch(decode(2, 1, step=1, share_sampled=True, **more), [GREEDY] * 2)
            named = decode(2, 2, step=2, tokens_from_step=1)
            named.token_ids[:] = [-2, -1]
            second = executor.launch(named, [GREEDY] * 2)
            outputs.append((first.result().token_ids, second.result().token_ids))
            assert graphs == (runner.next_graph(idle=True) == GraphKey(1, 40))
    assert outputs[0] == outputs[1]
