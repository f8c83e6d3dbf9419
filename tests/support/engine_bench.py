"""An engine with what a test turns and reads, over a model whose tokens a test can foretell."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from octavo.worker.engine import Engine
from octavo.worker.messages import FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import Candidate, SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan


def lower_is_likelier(row: SamplingRow) -> tuple[Candidate, ...]:
    """Token t has the log-probability −1 − t, at any place."""
    return tuple((token, -1.0 - token) for token in range(row.num_candidates))


class CountingModel:
    """Draws its output position as the token: 0, 1, 2, … Fails when told to."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.rows: list[SamplingRow] = []
        self.failure: Exception | None = None
        self.unsampled_seed: int | None = None
        """Rows with this seed cannot be sampled."""
        self.likely: Callable[[SamplingRow], tuple[Candidate, ...]] = lower_is_likelier
        """For beam searches."""

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        if self.failure:
            future.set_exception(self.failure)
            return future
        assert len(rows) == plan.logit_indices.size
        self.plans.append(plan)
        self.rows += rows
        candidates = {index: self.likely(row) for index, row in enumerate(rows) if row.num_candidates}
        future.set_result(StepResult([self._draw(row) for row in rows], candidates))
        return future

    def _draw(self, row: SamplingRow) -> int | None:
        return None if row.seed == self.unsampled_seed else row.position


class EngineBench:
    """Blocks of 4 tokens; steps take no time unless a test sets the clock."""

    def __init__(
        self, *, num_blocks: int = 32, max_num_seqs: int = 8, budget: int = 64, plans_ahead: bool = False
    ) -> None:
        self.now = 0.0
        self.model = CountingModel()
        self.updates: list[tuple[str, SequenceUpdate]] = []
        limits = SchedulerLimits(num_blocks, 4, max_num_seqs, budget, max_model_len=64, plans_ahead=plans_ahead)
        self.scheduler = Scheduler(limits, RoutingHasher(bytes(16), 4))
        self.engine = Engine(self.scheduler, self.model, clock=lambda: self.now, emit=self._emit)

    def _emit(self, gateway_id: str, update: SequenceUpdate) -> None:
        self.updates.append((gateway_id, update))

    def submit(self, request: Request) -> None:
        self.engine.submit(request)
        self.engine.check()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.engine.step()
            self.engine.check()

    def run(self) -> None:
        while self.engine.step():
            self.engine.check()

    def tokens(self, request_id: str = "r", branch: int = 0) -> list[int]:
        return [token for update in self.of(request_id, branch) for token in update.token_ids]

    def of(self, request_id: str = "r", branch: int = 0) -> list[SequenceUpdate]:
        return [u for _, u in self.updates if (u.request_id, u.branch) == (request_id, branch)]

    def reasons(self, request_id: str = "r", branch: int = 0) -> list[FinishReason]:
        """One, if the branch has ended."""
        return [update.finish_reason for update in self.of(request_id, branch) if update.finish_reason]


def request(
    request_id: str = "r", *, prompt: range = range(10, 16), max_tokens: int = 3, **sampling: object
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **({"seed": 5} | sampling))  # type: ignore[arg-type]
    return Request(request_id, "gateway", "model", tuple(prompt), b"", params)
