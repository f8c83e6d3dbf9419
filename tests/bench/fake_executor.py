"""An executor without a model: a step is over at once; on a clock of its own it takes what a cost model says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import Candidate, SamplingRow, StepResult
from octavo.worker.step_plan import StepPlan

ORDINARY_TOKEN, STOP_TOKEN = 7, 2
BLOCK_SIZE = 16


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: ``step_s`` + ``token_s`` for each token computed. By default those of a 7B model on a GPU."""

    step_s: float = 0.010
    token_s: float = 0.000_05

    def seconds(self, plan: StepPlan) -> float:
        return self.step_s + self.token_s * plan.token_ids.size


class FakeExecutor:
    """A sequence draws ``STOP_TOKEN`` as its output token number ``seed``, counted from 1; what it draws before is
    nothing special. So a request's seed says how long its output is, which the scheduler cannot know.

    ``observe`` is called with each plan, while the scheduler is as that plan has left it.
    """

    def __init__(self, cost: CostModel | None = None) -> None:
        self.now_s = 0.0
        self.observe: Callable[[StepPlan], None] = lambda plan: None
        self._cost = cost or CostModel()

    def clock(self) -> float:
        return self.now_s

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        self.observe(plan)
        self.now_s += self._cost.seconds(plan)
        future: Future[StepResult] = Future()
        candidates = {index: _candidates(row) for index, row in enumerate(rows) if row.num_candidates}
        future.set_result(StepResult([_draw(row) for row in rows], candidates))
        return future


def _draw(row: SamplingRow) -> int:
    return STOP_TOKEN if row.position + 1 >= row.seed else ORDINARY_TOKEN


def _candidates(row: SamplingRow) -> tuple[Candidate, ...]:
    """For a beam search: different at each position, so that beams part and meet the same as with a model."""
    first = 1_000 + 31 * row.position + row.branch
    return tuple((first + rank, -0.1 - 0.3 * rank - 0.01 * (first % 7)) for rank in range(row.num_candidates))


def hasher() -> RoutingHasher:
    return RoutingHasher(bytes(16), BLOCK_SIZE)
