"""Leader: what speaks for a worker group that is up: its engine, gateways' token lines, reports to routers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from .admission import Bound, Refusal
from .engine import Engine, StepExecutor
from .engine_loop import EngineLoop, Heart
from .grammar_desk import GrammarDesk
from .group_engine import LoadedGroup, engine_of
from .line_frames import LineAddress
from .line_tls import TlsFiles, leader_context
from .messages import Request, TokenFrame
from .metrics import metrics_text
from .pool_state import PoolState, copy_pool, pool_state
from .profile_desk import ProfileDesk
from .report_book import GroupIdentity, ReportBook
from .reporter import PAUSE_S, PERIOD_S, Reporter
from .shared_look import SharedLook
from .spec import WorkerSpec
from .token_line import TokenLineServer

POOL_LOOK_S = 0.5
"""However many ask what the pool looks like, it is looked at no more often."""
STOP_S = 5.0


class LeaderExecutor(StepExecutor, Heart, Protocol):
    """Carries out the group's steps; see ``Executor``."""


class Leader:
    """Create it within the event loop that calls it; the engine runs from then on. ``desk`` has its grammars loaded."""

    def __init__(
        self,
        spec: WorkerSpec,
        loaded: LoadedGroup,
        executor: LeaderExecutor,
        desk: GrammarDesk,
        profiles: ProfileDesk | None = None,
    ) -> None:
        self._spec = spec
        self._desk = desk
        self._profiles = profiles
        self._rank_texts: dict[str, str] = {}
        """Metrics of the group's ranks by their number, as they were told last."""
        self._num_refused: Mapping[Bound, int] = {}
        identity = GroupIdentity(
            spec.served_model_name,
            spec.group,
            spec.generation,
            spec.block_size,
            loaded.num_blocks,
            spec.max_num_seqs,
            loaded.weights,
        )
        self.loop = EngineLoop(
            lambda emit: engine_of(spec, loaded, executor, emit),
            executor,
            ReportBook(identity, self._metrics_text, spec.router_names),
            spec.generation,
            max_queued_requests=spec.max_queued_requests,
            max_queued_tokens=spec.max_queued_tokens,
            step_timeout_s=spec.step_timeout_s,
        )
        self._num_refused = self.loop.num_refused
        self._lines = TokenLineServer(_LineService(desk, self.loop))
        self._line_address: LineAddress | None = None
        self._retired = asyncio.Event()
        self._pool = SharedLook(self._look_at_pool, POOL_LOOK_S)
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, host: str, handle: Any, tls: TlsFiles | None = None, *, pause_s: float = PAUSE_S) -> None:
        """Listen for gateways at ``host``, with ``tls`` if given, and report to the routers. Gateways will call the
        leader by ``handle``."""
        context = None if tls is None else leader_context(tls)
        self._line_address = await self._lines.open(host, context)
        names, namespace = self._spec.router_names, self._spec.ray_namespace
        reporters = [Reporter(self.loop, name, namespace, handle, pause_s=pause_s) for name in names]
        self._tasks += [asyncio.create_task(reporter.run()) for reporter in reporters]
        self._tasks.append(asyncio.create_task(self._render_metrics()))

    async def watch(self) -> None:
        """Returns when the leader was retired, raises RuntimeError when its engine has failed."""
        failed, retired = asyncio.ensure_future(self.loop.failed()), asyncio.ensure_future(self._retired.wait())
        await asyncio.wait({failed, retired}, return_when=asyncio.FIRST_COMPLETED)
        retired.cancel()
        if failed.done():
            raise RuntimeError(failed.result())
        failed.cancel()

    async def health(self) -> float:
        """Seconds since the engine's thread last came round. Raises RuntimeError when it hangs."""
        age_s, deadline_s = self.loop.heartbeat_age_s, self.loop.step_deadline_s
        if age_s > deadline_s:
            raise RuntimeError(f"no step has ended for {age_s:.0f} s, and none should take {deadline_s:.0f} s")
        return age_s

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, finish what is under way; whether all of it was finished in time."""
        self.loop.set_draining()
        drained = await self.loop.drained(timeout_s)
        await asyncio.to_thread(self.loop.stop, STOP_S)
        self._lines.close()
        return drained

    async def retire(self, timeout_s: float) -> bool:
        """As ``drain``; then ``watch`` returns."""
        try:
            return await self.drain(timeout_s)
        finally:
            self._retired.set()

    def close(self) -> None:
        """Report no more; of one that was drained or has failed."""
        self._lines.close()
        for task in self._tasks:
            task.cancel()

    async def line_address(self) -> LineAddress:
        """Where gateways submit requests and poll for tokens."""
        if self._line_address is None:
            raise RuntimeError(f"{self._spec.group} is not open yet")
        return self._line_address

    async def reset_prefix_cache(self) -> int:
        """Forget what is cached and unused; how many blocks that was."""
        return await self.loop.ask(lambda engine: engine.reset_prefix_cache())

    async def take_rank_metrics(self, texts: Mapping[str, str]) -> None:
        """``Worker.metrics`` of ranks, by their number: the next reports carry them."""
        self._rank_texts.update(texts)

    async def profile(self, num_steps: int, patience_s: float) -> dict[str, Any]:
        """See ``ProfileDesk.record``."""
        if self._profiles is None:
            return {"error": "this worker group cannot be profiled"}
        return await self._profiles.record(num_steps, patience_s)

    async def pool_state(self) -> PoolState:
        """What the group's block pool looks like now, for people."""
        return await self._pool.get()

    async def _look_at_pool(self) -> PoolState:
        return await asyncio.to_thread(pool_state, await self.loop.ask(copy_pool))

    def _metrics_text(self, engine: Engine) -> str:
        """Called in the engine's thread."""
        own = metrics_text(engine, self._spec.served_model_name, self._spec.group, self._num_refused)
        return "".join([own, *self._rank_texts.values()])

    async def _render_metrics(self) -> None:
        while True:
            self.loop.render_metrics()
            await asyncio.sleep(PERIOD_S)


class _LineService:
    """What gateways ask of this leader by their lines."""

    def __init__(self, desk: GrammarDesk, loop: EngineLoop) -> None:
        self._desk = desk
        self._loop = loop

    def submit(self, request: Request) -> Refusal | None:
        return self._desk.submit(request, self._loop)

    def abort(self, request_ids: tuple[str, ...], branch: int | None) -> None:
        self._desk.abort(request_ids, branch, self._loop)

    async def poll(self, mailbox: str, acknowledged: int, wait_s: float) -> TokenFrame:
        return await self._loop.poll(mailbox, acknowledged, wait_s)
