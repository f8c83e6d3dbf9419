"""LocalService: one engine in this process behind the seam that the API has to a cluster. No Ray, no HTTP.

Requests and their ends are those of a cluster of one worker group, but for the ways between processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from ...worker.engine_loop import EngineLoop
from ...worker.errors import Unavailable
from ...worker.grammar_desk import GrammarDesk
from ...worker.group_engine import engine_of
from ...worker.messages import Request, RouteDecision
from ...worker.metrics import metrics_text
from ...worker.pool_state import PoolState, copy_pool, pool_state
from ...worker.report_book import GroupIdentity, ReportBook
from ...worker.spec import WorkerSpec
from ..api.model_metrics import ModelsMetrics
from ..api.service import GenerationRequest, Readiness, RouteWishes
from ..generation import ClusterGeneration, Past, Placement, wire_request
from ..group_line import GroupLine
from ..token_stream import TokenStream

if TYPE_CHECKING:
    from ...worker.rank import LoadedRank

GROUP = "local"
"""The one group, its only gateway, and why requests go there."""

POLL_S = 10.0
STOP_S = 10.0


class LocalLine(GroupLine):
    """To an engine of this process. Belongs to the event loop that it is made in."""

    def __init__(self, loop: EngineLoop, desk: GrammarDesk, generation: int) -> None:
        super().__init__(generation)
        self.failure: str | None = None
        """Why the engine takes nothing more."""
        self._loop = loop
        self._desk = desk
        self._poller = asyncio.create_task(self._poll())

    async def submit(self, request: Request) -> TokenStream:
        """Raises RuntimeError when the engine is over."""
        self._desk.submit(request, self._loop)  # its queue has no bound: nothing is refused
        return self._open(request)

    def _send_abort(self, request_id: str, branch: int | None) -> None:
        self._desk.abort((request_id,), branch, self._loop)

    async def close(self) -> None:
        """No token comes any more."""
        self._desk.close()
        self._poller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._poller

    async def _poll(self) -> None:
        acknowledged = 0
        while True:
            try:
                frame = await self._loop.poll(GROUP, acknowledged, POLL_S)
            except RuntimeError as error:  # the engine's end
                self._lose(error)
                return
            acknowledged = frame.last_number
            for update in frame.updates:
                self._deliver(update)

    def _lose(self, error: RuntimeError) -> None:
        self.failure = str(error)
        self._lose_streams(is_dead=True)


class LocalService:
    """A ``GenerationService``, and who places its requests (``Placer``)."""

    def __init__(self, loop: EngineLoop, desk: GrammarDesk, model: str, generation: int) -> None:
        """In the running event loop, where all else is to be called. ``model`` is its name in metrics."""
        self.metrics = ModelsMetrics([model], GROUP)
        self._loop = loop
        self._model = model
        self._line = LocalLine(loop, desk, generation)

    @classmethod
    def start_engine(cls, spec: WorkerSpec, loaded: LoadedRank) -> Self:
        """Over a new engine."""
        from ...worker.rank import executor_of

        identity = GroupIdentity(
            spec.served_model_name, GROUP, spec.generation, spec.block_size, loaded.num_blocks, spec.max_num_seqs
        )
        executor = executor_of(loaded)
        loop = EngineLoop(
            lambda emit: engine_of(spec, loaded, executor, emit),
            executor,
            ReportBook(identity, lambda engine: "", ()),
            spec.generation,
            gateway_silence_s=math.inf,  # a process that was stopped for a while goes on
        )
        return cls(loop, GrammarDesk(loaded.grammars), spec.served_model_name, spec.generation)

    @property
    def failure(self) -> str | None:
        """Why the engine is over; None while it is well."""
        return self._line.failure

    async def close(self) -> None:
        """End the engine after the step under way, and what is left of its requests."""
        await self._line.close()
        await asyncio.to_thread(self._loop.stop, STOP_S)

    # ---- GenerationService ----

    async def start(self, request: GenerationRequest) -> ClusterGeneration:
        """Raises Unavailable when the engine is over."""
        now = asyncio.get_running_loop().time()
        end = None if request.timeout_s is None else now + request.timeout_s
        generation = ClusterGeneration(self, wire_request(request, GROUP, b""), request.wishes, end, now)
        await generation.place()
        return generation

    async def readiness(self) -> Readiness:
        return Readiness(self.failure is None, self.failure or "the engine is up")

    async def metrics_text(self) -> str:
        return await self._loop.ask(lambda engine: metrics_text(engine, self._model, GROUP, {}))

    async def explain(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """Nothing: there is nothing to decide."""
        return ()

    async def reset_prefix_cache(self) -> Mapping[str, int | None]:
        return {GROUP: await self._loop.ask(lambda engine: engine.reset_prefix_cache())}

    async def pools(self, most: int) -> Mapping[str, PoolState | None]:
        return {GROUP: pool_state(await self._loop.ask(copy_pool))}

    async def profile(self, num_steps: int, group: str | None, patience_s: float) -> Mapping[str, Mapping[str, Any]]:
        """Nothing: a program can profile itself."""
        return {}

    # ---- Placer ----

    async def submit(self, request: Request, wishes: RouteWishes, past: Past, patience_s: float) -> Placement:
        try:
            stream = await self._line.submit(request)
        except RuntimeError as error:
            raise Unavailable(str(error)) from error
        decision = RouteDecision(request.request_id, GROUP, self._line.generation, 0, GROUP)
        return Placement(decision, self._line, stream, 0.0)

    def is_draining(self, generation: int) -> bool:
        return False

    def acquit(self, request_id: str) -> None:
        """There is no group that it could be kept apart in."""

    def ended(self, generation: ClusterGeneration) -> None:
        """Nobody keeps a record."""
