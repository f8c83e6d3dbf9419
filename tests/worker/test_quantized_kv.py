"""``--kv-cache-dtype``: a quantised pool is shared, copied and preempted like any other, and the answers stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from worker_specs import worker_spec

from octavo.worker.engine import Engine
from octavo.worker.group_engine import engine_of
from octavo.worker.messages import Branch, Request, SamplingParams, SequenceUpdate
from octavo.worker.rank import LoadedRank, executor_of, load_alone
from octavo.worker.spec import WorkerSpec

SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "initializer_range": 0.1}
NEAR_TIE = {"int8": 0.1, "fp8_e4m3": 0.2}
"""Of logits whose standard deviation is 1.1: what K and V of 8 bits, and of 4, may turn around."""
MOST_EXCUSED = 0.1
"""Part of the tokens."""

DRAW = np.random.default_rng(0)
SHARED = tuple(DRAW.integers(0, 96, 40).tolist())
PROMPTS = [(*SHARED, *DRAW.integers(0, 96, size).tolist()) for size in (3, 9, 14, 5)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, max_position_embeddings=128, eos_token_id=None)).eval()
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=["int8", "fp8_e4m3"])
def loaded(
    request: Any, model: tuple[LlamaForCausalLM, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[WorkerSpec, LoadedRank]:
    spec = worker_spec(str(model[1]), tmp_path_factory.mktemp("cache"), kv_cache_dtype=request.param)
    return spec, load_alone(model[1], spec)


class Outputs:
    """An engine on a pool of ``num_blocks`` blocks, and the tokens of all branches."""

    def __init__(self, spec: WorkerSpec, loaded: LoadedRank, num_blocks: int) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        loaded.runner.allocate_kv(num_blocks)
        for tensor in loaded.runner.kv_pool.tensors():
            tensor.view(torch.uint8).fill_(0x7F)  # as scales, and as fp8, NaN: what is not written must not be read
        loaded = replace(loaded, num_blocks=num_blocks)
        self._executor = executor_of(loaded)
        self.engine: Engine = engine_of(spec, loaded, self._executor, self._emit)

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        assert update.error is None, update.error
        self.tokens.setdefault((update.request_id, update.branch), []).extend(update.token_ids)

    def of(self, requests: Iterable[Request]) -> dict[tuple[str, int], list[int]]:
        for request in requests:
            self.engine.submit(request)
        while self.engine.step():
            self.engine.check()
        self._executor.shut_down()
        return self.tokens


def request(name: str, prompt: tuple[int, ...], num_branches: int = 1, temperature: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=7)
    branches = tuple(Branch(index) for index in range(num_branches))
    return Request(name, "gateway", "model", prompt, b"", params, branches)


REQUESTS = [request(str(index), prompt) for index, prompt in enumerate(PROMPTS)]
SAMPLED = request("sampled", PROMPTS[0], num_branches=3, temperature=0.8)


@pytest.fixture(scope="module")
def alone(loaded: tuple[WorkerSpec, LoadedRank]) -> dict[tuple[str, int], list[int]]:
    """The tokens of each request, run by itself in a new engine: nothing is shared with another."""
    spec, rank = loaded
    tokens = {}
    for each in (*REQUESTS, SAMPLED):
        tokens |= Outputs(replace(spec, enable_prefix_caching=False), rank, 64).of([each])
    return tokens


def test_the_flag_decides_how_many_bytes_a_token_takes(loaded: tuple[WorkerSpec, LoadedRank]) -> None:
    """68 of 256: 64 numbers of a byte and a scale, where there were 64 float32."""
    spec, rank = loaded
    float32 = 2 * 2 * 1 * 16 * 64 * 4
    assert rank.ledger.bytes_per_block == rank.runner.kv_bytes_per_block == float32 * 68 // 256
    assert rank.ledger.table().count(f"KV pool, {spec.kv_cache_dtype}") == 1


def test_greedy_answers_are_those_of_the_float_model(
    loaded: tuple[WorkerSpec, LoadedRank],
    alone: dict[tuple[str, int], list[int]],
    model: tuple[LlamaForCausalLM, Path],
) -> None:
    """But where its two best logits are near to each other."""
    num_excused = 0
    for index, prompt in enumerate(PROMPTS):
        got = alone[str(index), 0]
        with torch.inference_mode():
            logits = model[0](torch.tensor([[*prompt, *got]])).logits[0, len(prompt) - 1 : -1]
        behind = logits.amax(dim=-1) - logits.gather(1, torch.tensor(got)[:, None])[:, 0]
        assert len(got) == NUM_TOKENS
        assert float(behind.max()) < NEAR_TIE[loaded[0].kv_cache_dtype]
        num_excused += int((behind > 0).sum())
    assert num_excused <= MOST_EXCUSED * NUM_TOKENS * len(PROMPTS)


def test_what_is_shared_copied_and_preempted_has_the_answers_of_a_run_alone(
    loaded: tuple[WorkerSpec, LoadedRank], alone: dict[tuple[str, int], list[int]]
) -> None:
    """One prefix for all, three branches that copy its last block when they write, and a pool for about two of the
    seven sequences."""
    tight = Outputs(*loaded, 11)
    assert tight.of([SAMPLED, *REQUESTS]) == alone
    counters = tight.engine.scheduler.counters
    assert min(counters.num_preemptions, counters.num_copied_blocks, counters.num_cached_prompt_tokens) > 0
