"""Greedy output of the real model equals transformers', however it is computed: whole or in chunks, alone or together,
cached or not, on one rank or several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers_reference import Reference, chat_prompts

from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.messages import Request, SamplingParams, SequenceUpdate
from octavo.worker.model.config import ModelConfig
from octavo.worker.routing_hash import RoutingHasher, pack_hashes
from octavo.worker.scheduler import Scheduler, SchedulerLimits

NUM_PROMPTS = 20
MAX_TOKENS = 64
LIMITS = {"block_size": 16, "max_num_seqs": 20, "max_num_batched_tokens": 512, "max_model_len": 2048}
NUM_BLOCKS = 1024


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    eos = ModelConfig.from_folder(model_dir).eos_token_ids
    return Reference(model_dir, chat_prompts(model_dir, NUM_PROMPTS), max_tokens=MAX_TOKENS, eos_token_ids=eos)


class Outputs:
    """Collects what an engine emits."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.num_cached_tokens: dict[str, int] = {}

    def emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        assert update.error is None
        self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
        self.num_cached_tokens[update.request_id] = update.num_cached_tokens or 0


class Harness:
    """An engine on the real model, in this process (and its ranks)."""

    def __init__(self, executor: Executor, model_dir: Path, **limits: int) -> None:
        self.outputs = Outputs()
        self._hasher = RoutingHasher(b"a key of the tests", LIMITS["block_size"])
        scheduler = Scheduler(SchedulerLimits(NUM_BLOCKS, **(LIMITS | limits)), self._hasher)
        self.engine = Engine(scheduler, executor, clock=time.monotonic, emit=self.outputs.emit)
        self._eos = ModelConfig.from_folder(model_dir).eos_token_ids

    def run(self, prompts: list[list[int]], *, at_once: int) -> list[list[int]]:
        """Greedy outputs, with ``at_once`` requests under way together. Requests are named by their number."""
        self.outputs.tokens.clear()
        waiting = iter(enumerate(prompts))
        for _ in range(at_once):
            self._submit_next(waiting)
        while self.engine.has_work:
            self.engine.step()
            while self.engine.num_requests < at_once and self._submit_next(waiting):
                pass
        self.engine.check()
        return [self.outputs.tokens[str(index)] for index in range(len(prompts))]

    def _submit_next(self, waiting: Iterator[tuple[int, list[int]]]) -> bool:
        index, prompt = next(waiting, (0, None))
        if prompt is None:
            return False
        sampling = SamplingParams(MAX_TOKENS, seed=0, temperature=0.0, stop_token_ids=self._eos)
        hashes = pack_hashes(self._hasher.hash_blocks(prompt))
        self.engine.submit(Request(str(index), "tests", "model", tuple(prompt), hashes, sampling))
        return True


def assert_equal(reference: Reference, outputs: list[list[int]]) -> None:
    wrong, excused = reference.differences(outputs)
    assert not wrong
    assert excused <= 2, f"{excused} of {len(outputs)} differ at near-ties: more than rounding explains"


@pytest.fixture(scope="module")
def single(model_dir: Path, start_group) -> Iterator[Executor]:
    with start_group(model_dir, 1, num_blocks=NUM_BLOCKS, limits=LIMITS) as (_, executor):
        yield executor


def test_one_after_the_other(reference, single, model_dir) -> None:
    """Six of them, since it takes long: the others run in company below."""
    assert_equal(reference, Harness(single, model_dir).run(reference.prompts[:6], at_once=1))


def test_sixteen_at_once_then_again_from_the_cache(reference, single, model_dir) -> None:
    harness = Harness(single, model_dir)
    assert_equal(reference, harness.run(reference.prompts, at_once=16))
    assert_equal(reference, harness.run(reference.prompts, at_once=16))
    lengths = [len(prompt) for prompt in reference.prompts]
    expected = {str(index): min(length // 16 * 16, length - 1) for index, length in enumerate(lengths)}
    assert harness.outputs.num_cached_tokens == expected


def test_a_budget_of_32_tokens_a_step(reference, single, model_dir) -> None:
    harness = Harness(single, model_dir, max_num_batched_tokens=32)
    assert_equal(reference, harness.run(reference.prompts, at_once=16))


@pytest.mark.parametrize("size", [2, 3])
def test_tensor_parallel(reference, model_dir, start_group, size) -> None:
    with start_group(model_dir, size, num_blocks=NUM_BLOCKS, limits=LIMITS) as (_, executor):
        assert_equal(reference, Harness(executor, model_dir).run(reference.prompts, at_once=16))
