"""Engines over a tiny model with random weights: real kernels, runner, executor and sampler, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from packed_model import tiny_llama
from transformers import LlamaForCausalLM

from octavo.kernels.backend import Kernels, select_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.messages import FinishReason, Request, SequenceUpdate, TokenLogprobs
from octavo.worker.model_runner import ModelRunner
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_state import MatcherOf
from octavo.worker.scheduler import Scheduler, SchedulerLimits

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 8, 64


@dataclass
class Given:
    """What a gateway got of one branch."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    updates: list[SequenceUpdate] = field(default_factory=list)

    @property
    def last(self) -> SequenceUpdate:
        return self.updates[-1]

    @property
    def reason(self) -> FinishReason | None:
        return self.last.finish_reason


class TinyEngine:
    """An engine, and all that it gave, by request and branch."""

    def __init__(self, executor: Executor, limits: SchedulerLimits, matcher_of: MatcherOf | None) -> None:
        self.given: dict[tuple[str, int], Given] = {}
        self.engine = Engine(
            Scheduler(limits, RoutingHasher(bytes(16), BLOCK_SIZE)),
            executor,
            clock=lambda: 0.0,
            emit=lambda gateway, update: self._take(update),
            matcher_of=matcher_of,
        )

    def _take(self, update: SequenceUpdate) -> None:
        given = self.given.setdefault((update.request_id, update.branch), Given())
        given.updates.append(update)
        given.token_ids += update.token_ids
        given.logprobs += update.logprobs

    def run(self, *requests: Request) -> dict[tuple[str, int], Given]:
        """What these requests got, sent together."""
        self.given = {}
        for request in requests:
            self.engine.submit(request)
        while self.engine.step():
            self.engine.check()
        return self.given


class TinyModel:
    """A random Llama, in transformers and here."""

    def __init__(self, folder: Path) -> None:
        self.reference: LlamaForCausalLM = tiny_llama()
        self.reference.save_pretrained(folder)
        self.kernels: Kernels = select_kernels(CPU)
        self.runner = ModelRunner.load(
            folder,
            rank=0,
            size=1,
            device=CPU,
            dtype=torch.float32,
            collectives=SingleProcess(),
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=256,
            max_model_len=MAX_MODEL_LEN,
            kernels=self.kernels,
        )

    @contextmanager
    def engine(
        self,
        *,
        num_blocks: int = 128,
        budget: int = 256,
        plans_ahead: bool = True,
        overlaps: bool = False,
        matcher_of: MatcherOf | None = None,
    ) -> Iterator[TinyEngine]:
        """``overlaps``: tokens are waited for in another thread, as on a GPU."""
        self.runner.allocate_kv(num_blocks)
        executor = Executor(self.runner, SingleProcess(), self.kernels, overlaps=overlaps)
        limits = SchedulerLimits(num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, budget, MAX_MODEL_LEN, plans_ahead=plans_ahead)
        try:
            yield TinyEngine(executor, limits, matcher_of)
        finally:
            executor.shut_down()
