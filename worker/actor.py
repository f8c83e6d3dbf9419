"""Worker: the Ray actor around one rank. Rank 0 leads its group: it has the engine and speaks with the gateways.

What gateways ask of a leader comes by token lines, nothing of a step goes through Ray. What needs torch is imported
where a worker first needs it: the processes that only create workers do without, and start sooner.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from .admission import Refusal
from .engine import Engine
from .engine_loop import EngineLoop
from .grammar_desk import GrammarDesk
from .lifeline import die_with_parent, process_start_s, write_stacks, write_stacks_on_signal
from .line_frames import LineAddress
from .line_tls import TlsFiles, leader_context
from .listen import listen_on
from .logs import configure_logs
from .messages import Request, TokenFrame
from .metrics import metrics_text
from .modesty import be_modest
from .pool_state import PoolState, copy_pool, pool_state
from .profile_desk import PROFILES, ProfileDesk
from .rank_metrics import RankMetrics
from .report_book import GroupIdentity, ReportBook
from .shared_look import SharedLook
from .spec import WorkerSpec
from .token_line import TokenLineServer
from .wire import pack

if TYPE_CHECKING:
    from .rank import LoadedRank

REPORT_PERIOD_S = 1.0
"""The leader reports at least so often."""
REPORT_PAUSE_S = 0.01
"""And not more often than this."""
BLOCKS_PAUSE_S = 0.1
"""News that is only of blocks which running requests have filled waits so long: with many streams there is some in
every step, a report costs either side 2 ms of CPU, and who sends a conversation's next turn does so after its end."""
REPORT_TIMEOUT_S = 5.0
POOL_LOOK_S = 0.5
"""However many ask what the pool looks like, it is looked at no more often."""

logger = logging.getLogger(__name__)


class Worker:
    """Wrapped by ``ray.remote`` where a worker group creates its ranks."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        configure_logs(spec.log_level, spec.log_format, {"role": "worker", "group": spec.group, "rank": rank})
        die_with_parent()
        write_stacks_on_signal()
        self._spec = spec
        self._rank = rank
        self._loaded: LoadedRank | None = None
        self._loop: EngineLoop | None = None
        self._desk: GrammarDesk | None = None
        self._follower_end: asyncio.Future[BaseException | None] | None = None
        """Gives None when the leader has shut down."""
        self._listener: socket.socket | None = None
        self._lines: TokenLineServer | None = None
        self._line_address: LineAddress | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._retired = asyncio.Event()
        self._metrics: RankMetrics | None = None
        self._rank_texts: dict[str, str] = {}
        """Metrics of the group's ranks by their number, as they were told last."""
        self._profiles: ProfileDesk | None = None
        self._pool = SharedLook(self._look_at_pool, POOL_LOOK_S)

    # ---- life cycle ----

    async def address(self) -> tuple[str, int]:
        """Rank 0 of several: where the ranks will meet; the port stays taken until they do."""
        host = ray.util.get_node_ip_address()
        self._listener = listen_on(host)
        return host, self._listener.getsockname()[1]

    async def load(self, host: str, port: int) -> dict[str, Any]:
        """Bring up this rank, together with the others of its group; what it has, for people."""
        event_loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, initializer=be_modest) as importer:
            await event_loop.run_in_executor(importer, importlib.import_module, f"{__package__}.rank")
        from .collectives import Rendezvous
        from .rank import load

        spec = self._spec
        listen_fd = None if self._listener is None else self._listener.detach()
        meeting = Rendezvous(
            host, port, self._rank, spec.tensor_parallel_size, timeout_s=spec.startup_timeout_s, listen_fd=listen_fd
        )
        with ThreadPoolExecutor(1) as loader:  # whose OpenMP threads end with it, see cpu_environment
            self._loaded = await event_loop.run_in_executor(loader, load, spec, meeting)
        self._metrics = RankMetrics(spec.served_model_name, spec.group, self._rank, self._loaded.gpu_uuid)
        self._tasks.append(asyncio.create_task(self._metrics.lag.run()))
        if self._rank > 0:
            self._start_following()
        return {
            "rank": self._rank,
            "num_blocks": self._loaded.num_blocks,
            "max_model_len": self._loaded.max_model_len,
            "ledger": self._loaded.ledger.table(),
        }

    async def process(self) -> tuple[str, int, float]:
        """Where this rank runs: Ray's name of the node, the process's number, its start (seconds since the epoch)."""
        return ray.get_runtime_context().get_node_id(), os.getpid(), process_start_s()

    async def lead(self, tls: TlsFiles | None = None) -> None:
        """Rank 0, when all ranks are up: start the engine, listen for gateways, with ``tls`` if given, and report to
        the routers."""
        from .rank import engine_of, executor_of

        loaded = self._get_loaded()
        spec = self._spec
        identity = GroupIdentity(
            spec.served_model_name,
            spec.group,
            spec.generation,
            spec.block_size,
            loaded.num_blocks,
            spec.max_num_seqs,
            loaded.weights,
        )
        executor = executor_of(loaded)
        if loaded.profiler is not None:
            folder, num_ranks = spec.cache_dir / PROFILES, spec.tensor_parallel_size
            self._profiles = ProfileDesk(executor, loaded.profiler, folder, spec.group, num_ranks)
        self._desk = GrammarDesk(loaded.grammars)
        await self._desk.load()
        self._loop = EngineLoop(
            lambda emit: engine_of(spec, loaded, executor, emit),
            executor,
            ReportBook(identity, self._metrics_text, spec.router_names),
            spec.generation,
            max_queued_requests=spec.max_queued_requests,
            max_queued_tokens=spec.max_queued_tokens,
            step_timeout_s=spec.step_timeout_s,
        )
        self._lines = TokenLineServer(_LineService(self._desk, self._loop))
        context = None if tls is None else leader_context(tls)
        self._line_address = await self._lines.open(ray.util.get_node_ip_address(), context)
        self._tasks += [asyncio.create_task(self._report(router_name)) for router_name in spec.router_names]
        self._tasks.append(asyncio.create_task(self._render_metrics()))

    async def watch(self) -> None:
        """Returns when this rank ended in order, raises when it failed; the worker group waits for that."""
        if self._loop is not None:
            await self._failed_or_retired(self._loop)
        elif self._follower_end is not None:
            failure = await self._follower_end
            if failure is not None:
                raise RuntimeError(f"rank {self._rank}: {failure}")

    async def health(self) -> float:
        """Seconds since the engine's thread last came round. Raises when it hangs."""
        if self._loop is None:
            return 0.0
        age_s, deadline_s = self._loop.heartbeat_age_s, self._loop.step_deadline_s
        if age_s > deadline_s:
            raise RuntimeError(f"no step has ended for {age_s:.0f} s, and none should take {deadline_s:.0f} s")
        return age_s

    async def write_stacks(self) -> None:
        """What every thread of this rank does, into its log: the group is about to be given up."""
        write_stacks()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, finish what is under way; whether all of it was finished in time."""
        loop = self._get_loop()
        loop.set_draining()
        drained = await loop.drained(timeout_s)
        await asyncio.to_thread(loop.stop, 5.0)
        if self._lines is not None:
            self._lines.close()
        return drained

    async def retire(self, timeout_s: float) -> bool:
        """As ``drain``; then ``watch`` returns, and the worker group makes way for another one."""
        try:
            return await self.drain(timeout_s)
        finally:
            self._retired.set()

    # ---- what gateways call ----

    async def line_address(self) -> LineAddress:
        """Where gateways submit requests and poll for tokens."""
        if self._line_address is None:
            raise RuntimeError(f"rank {self._rank} does not lead its group")
        return self._line_address

    # ---- what the group's owner calls ----

    async def reset_prefix_cache(self) -> int:
        """Forget what is cached and unused; how many blocks that was."""
        return await self._get_loop().ask(lambda engine: engine.reset_prefix_cache())

    async def metrics(self) -> str:
        """What this rank says of its process and its GPU, as Prometheus text."""
        return "" if self._metrics is None else await self._metrics.text()

    async def take_rank_metrics(self, texts: Mapping[str, str]) -> None:
        """``metrics`` of other ranks, by their number: the next reports carry them."""
        self._rank_texts.update(texts)

    async def profile(self, num_steps: int, patience_s: float) -> dict[str, Any]:
        """See ``ProfileDesk.record``."""
        if self._profiles is None:
            return {"error": "this worker group cannot be profiled"}
        return await self._profiles.record(num_steps, patience_s)

    async def pool_state(self) -> PoolState:
        """What the group's block pool looks like now, for people."""
        return await self._pool.get()

    # ---- what this rank does by itself ----

    async def _look_at_pool(self) -> PoolState:
        return await asyncio.to_thread(pool_state, await self._get_loop().ask(copy_pool))

    async def _failed_or_retired(self, loop: EngineLoop) -> None:
        """Returns when the leader was retired, raises when its engine has failed."""
        failed, retired = asyncio.ensure_future(loop.failed()), asyncio.ensure_future(self._retired.wait())
        await asyncio.wait({failed, retired}, return_when=asyncio.FIRST_COMPLETED)
        retired.cancel()
        if not failed.done():
            failed.cancel()
            return
        raise RuntimeError(f"rank {self._rank}: {failed.result()}")

    def _start_following(self) -> None:
        from .rank import run_follower

        event_loop = asyncio.get_running_loop()
        self._follower_end = end = event_loop.create_future()
        loaded = self._get_loaded()

        def report(failure: BaseException | None) -> None:
            if not end.done():
                end.set_result(failure)

        def run() -> None:
            try:
                run_follower(loaded, heard=lambda: None)
                failure: BaseException | None = None
            except BaseException as error:  # the thread's end is the rank's end
                failure = error
            event_loop.call_soon_threadsafe(report, failure)

        threading.Thread(target=run, name="follower", daemon=True).start()

    def _metrics_text(self, engine: Engine) -> str:
        """Called in the engine's thread, which may be ahead of ``lead``: nothing was refused then."""
        num_refused = {} if self._loop is None else self._loop.num_refused
        own = metrics_text(engine, self._spec.served_model_name, self._spec.group, num_refused)
        return "".join([own, *self._rank_texts.values()])

    async def _render_metrics(self) -> None:
        while True:
            self._rank_texts["0"] = await self.metrics()
            self._get_loop().render_metrics()
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _report(self, router_name: str) -> None:
        """Tell one router what changed, soon, and that we live, every second; find it again when it is replaced."""
        loop, due_s, blocks_due_s = self._get_loop(), 0.0, 0.0
        router: Any = None
        me = ray.get_runtime_context().current_actor
        while True:
            now = time.monotonic()
            has_news = loop.has_urgent_news(router_name) or (now >= blocks_due_s and loop.has_news(router_name))
            if has_news or now >= due_s:
                report = loop.take_report(router_name)
                try:
                    router = router or await asyncio.to_thread(ray.get_actor, router_name, self._spec.ray_namespace)
                    wants = await asyncio.wait_for(router.report.remote(pack(report), me), REPORT_TIMEOUT_S)
                    loop.report_arrived(router_name, report, wants_snapshot=bool(wants))
                    now = time.monotonic()
                    due_s, blocks_due_s = now + REPORT_PERIOD_S, now + BLOCKS_PAUSE_S
                except (RayError, ValueError, TimeoutError) as error:
                    router = None
                    logger.warning("%s does not answer: %s", router_name, type(error).__name__)
                    await asyncio.sleep(REPORT_PERIOD_S / 4)
                except Exception:  # a group that does not report leaves the registry for good
                    logger.exception("the report to %s failed", router_name)
                    await asyncio.sleep(REPORT_PERIOD_S)
            await asyncio.sleep(REPORT_PAUSE_S)

    def _get_loaded(self) -> LoadedRank:
        if self._loaded is None:
            raise RuntimeError(f"rank {self._rank} is not loaded")
        return self._loaded

    def _get_loop(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError(f"rank {self._rank} does not lead its group")
        return self._loop


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
