"""NaN never becomes a token: the request whose logits hold it ends with an error, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from engine_bench import request
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from octavo.kernels.backend import select_kernels
from octavo.worker.collectives import Collectives, SingleProcess
from octavo.worker.engine import Engine
from octavo.worker.executor import Executor
from octavo.worker.messages import FinishReason, SequenceUpdate
from octavo.worker.metrics import metrics_text
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import GraphKey, StepPlan

VOCABULARY = 8
KERNELS = select_kernels(torch.device("cpu"))


@dataclass
class Runner:
    """Token 3 is the likeliest, everywhere; but one sequence gets NaN for its second token."""

    broken_slot: int | None = None
    num_broken: int = 0
    remembered: list[int] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> Tensor:
        sequence_of_token = np.repeat(plan.slots, plan.num_new_tokens)
        logits = torch.zeros(plan.logit_indices.size, VOCABULARY)
        logits[:, 3] = 1.0
        is_broken = torch.from_numpy(sequence_of_token[plan.logit_indices] == self.broken_slot)
        is_broken &= bool((plan.num_new_tokens == 1).all())
        logits[is_broken, 5] = torch.nan
        self.num_broken += int(is_broken.sum())
        return logits

    def remember(self, step: int, token_ids: Tensor) -> None:
        self.remembered += token_ids.tolist()

    def next_graph(self, *, idle: bool) -> GraphKey | None:
        return None

    def capture(self, key: GraphKey, collectives: Collectives) -> None:
        raise AssertionError("none is wanted")


class Bench:
    """An engine with a real executor and sampler."""

    def __init__(self, *, plans_ahead: bool) -> None:
        self.runner = Runner()
        self.executor = Executor(self.runner, SingleProcess(), KERNELS)
        self.updates: list[SequenceUpdate] = []
        limits = SchedulerLimits(32, 4, 8, 64, max_model_len=64, plans_ahead=plans_ahead)
        self.engine = Engine(
            Scheduler(limits, RoutingHasher(bytes(16), 4)),
            self.executor,
            clock=lambda: 0.0,
            emit=lambda gateway, update: self.updates.append(update),
        )

    def run(self) -> None:
        while self.engine.step():
            self.engine.check()

    def last(self, request_id: str) -> SequenceUpdate:
        return [update for update in self.updates if update.request_id == request_id][-1]

    def tokens(self, request_id: str) -> list[int]:
        return [t for update in self.updates if update.request_id == request_id for t in update.token_ids]


@pytest.fixture(params=[False, True], ids=["", "planning ahead"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(plans_ahead=request.param)
    yield bench
    bench.executor.shut_down()


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.0, "beam_width": 2}]
)
def test_the_request_ends_with_an_error_and_the_others_go_on(bench: Bench, sampling: dict[str, float]) -> None:
    bench.engine.submit(request("broken", max_tokens=9, **sampling))
    bench.engine.submit(request("sound", prompt=range(20, 26), max_tokens=9, temperature=0.0))
    bench.engine.step()
    bench.runner.broken_slot = 0
    bench.run()
    last = bench.last("broken")
    assert last.finish_reason is FinishReason.ERROR
    assert "the model gave no number" in (last.error or "")
    assert all(0 <= token < VOCABULARY for token in bench.tokens("broken"))
    assert bench.last("sound").finish_reason is FinishReason.LENGTH
    assert bench.tokens("sound") == [3] * 9
    assert all(token >= 0 for token in bench.runner.remembered)
    assert bench.engine.counters.num_nan_rows == bench.runner.num_broken > 0


def test_rows_of_nan_are_counted_in_a_metric(bench: Bench) -> None:
    bench.runner.broken_slot = 0
    bench.engine.submit(request(prompt=range(1), temperature=0.0))
    bench.run()
    metrics = text_string_to_metric_families(metrics_text(bench.engine, "model", "group", {}))
    values = {sample.name: sample.value for family in metrics for sample in family.samples}
    assert values["octavo_nan_logits_rows_total"] == bench.runner.num_broken > 0
