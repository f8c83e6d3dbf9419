"""Worker: the Ray actor around one rank. Rank 0 leads its group: it has the engine and speaks with the gateways.

Everything that is asked of a leader often is one message in msgpack; nothing of a step goes through Ray. What needs
torch is imported where a worker first needs it: the processes that only create workers do without, and start sooner.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from .engine import Engine
from .engine_loop import EngineLoop
from .grammar_desk import GrammarDesk
from .messages import Request
from .metrics import metrics_text
from .report_book import GroupIdentity, ReportBook
from .spec import WorkerSpec
from .wire import pack, unpack

if TYPE_CHECKING:
    from .rank import LoadedRank

REPORT_PERIOD_S = 1.0
"""The leader reports at least so often."""
REPORT_PAUSE_S = 0.01
"""And not more often than this."""
REPORT_TIMEOUT_S = 5.0

HANG_S = 600.0
"""An engine whose thread has not come round for so long is taken for hung."""

logger = logging.getLogger(__name__)


class Worker:
    """Wrapped by ``ray.remote`` where a worker group creates its ranks."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        logging.basicConfig(level=spec.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._spec = spec
        self._rank = rank
        self._loaded: LoadedRank | None = None
        self._loop: EngineLoop | None = None
        self._desk: GrammarDesk | None = None
        self._follower_failure: asyncio.Future[BaseException] | None = None
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life cycle ----

    async def address(self) -> tuple[str, int]:
        """Rank 0 of several: where the ranks will meet; the port stays taken until they do."""
        self._listener = socket.socket()
        self._listener.bind(("", 0))
        self._listener.listen()
        return ray.util.get_node_ip_address(), self._listener.getsockname()[1]

    async def load(self, host: str, port: int) -> dict[str, Any]:
        """Bring up this rank, together with the others of its group; what it has, for people."""
        from .collectives import Rendezvous
        from .rank import load

        spec = self._spec
        listen_fd = None if self._listener is None else self._listener.detach()
        meeting = Rendezvous(
            host, port, self._rank, spec.tensor_parallel_size, timeout_s=spec.startup_timeout_s, listen_fd=listen_fd
        )
        with ThreadPoolExecutor(1) as loader:  # whose OpenMP threads end with it, see cpu_environment
            self._loaded = await asyncio.get_running_loop().run_in_executor(loader, load, spec, meeting)
        if self._rank > 0:
            self._start_following()
        return {
            "rank": self._rank,
            "num_blocks": self._loaded.num_blocks,
            "max_model_len": self._loaded.max_model_len,
            "ledger": self._loaded.ledger.table(),
        }

    async def lead(self) -> None:
        """Rank 0, when all ranks are up: start the engine and report to the routers."""
        from .rank import engine_of, executor_of

        loaded = self._get_loaded()
        spec = self._spec
        identity = GroupIdentity(
            spec.served_model_name, spec.group, spec.generation, spec.block_size, loaded.num_blocks, spec.max_num_seqs
        )
        executor = executor_of(loaded)
        self._desk = GrammarDesk(loaded.grammars)
        await self._desk.load()
        self._loop = EngineLoop(
            lambda emit: engine_of(spec, loaded, executor, emit),
            executor,
            ReportBook(identity, self._metrics_text, spec.router_names),
            spec.generation,
            max_queued_requests=spec.max_queued_requests,
            max_queued_tokens=spec.max_queued_tokens,
        )
        self._tasks += [asyncio.create_task(self._report(router_name)) for router_name in spec.router_names]
        self._tasks.append(asyncio.create_task(self._render_metrics()))

    async def watch(self) -> None:
        """Returns when this rank ended in order, raises when it failed; the worker group waits for that."""
        if self._loop is not None:
            raise RuntimeError(f"rank {self._rank}: {await self._loop.failed()}")
        if self._follower_failure is not None:
            raise RuntimeError(f"rank {self._rank}: {await self._follower_failure}")

    async def health(self) -> float:
        """Seconds since the engine's thread last came round. Raises when it hangs."""
        age_s = 0.0 if self._loop is None else self._loop.heartbeat_age_s
        if age_s > HANG_S:
            raise RuntimeError(f"the engine has not finished a step for {age_s:.0f} s")
        return age_s

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, finish what is under way; whether all of it was finished in time."""
        loop = self._get_loop()
        loop.set_draining()
        drained = await loop.drained(timeout_s)
        await asyncio.to_thread(loop.stop, 5.0)
        return drained

    # ---- what gateways call ----

    async def submit(self, packed: bytes) -> tuple[str, float] | None:
        """A packed Request. Its tokens come by ``poll`` of its gateway; when too much waits already, none do, and the
        answer says why and after how many seconds to try again."""
        refusal = self._get_desk().submit(unpack(packed, Request), self._get_loop())
        return None if refusal is None else (refusal.message, refusal.retry_after_s)

    async def abort(self, request_ids: tuple[str, ...], branch: int | None = None) -> None:
        """End requests, or only this branch of each."""
        self._get_desk().abort(request_ids, branch, self._get_loop())

    async def poll(self, gateway_id: str, acknowledged: int, timeout_s: float) -> bytes:
        """A packed TokenFrame with everything that the gateway has not acknowledged."""
        return pack(await self._get_loop().poll(gateway_id, acknowledged, timeout_s))

    # ---- what the group's owner calls ----

    async def reset_prefix_cache(self) -> int:
        """Forget what is cached and unused; how many blocks that was."""
        return await self._get_loop().ask(lambda engine: engine.reset_prefix_cache())

    # ---- what this rank does by itself ----

    def _start_following(self) -> None:
        from .rank import run_follower

        event_loop = asyncio.get_running_loop()
        self._follower_failure = failure = event_loop.create_future()
        loaded = self._get_loaded()

        def report(ended: BaseException) -> None:
            if not failure.done():
                failure.set_result(ended)

        def run() -> None:
            try:
                run_follower(loaded, heard=lambda: None)
                ended: BaseException = RuntimeError("the leader shut down")
            except BaseException as error:  # the thread's end is the rank's end
                ended = error
            event_loop.call_soon_threadsafe(report, ended)

        threading.Thread(target=run, name="follower", daemon=True).start()

    def _metrics_text(self, engine: Engine) -> str:
        """Called in the engine's thread, which may be ahead of ``lead``: nothing was refused then."""
        num_refused = {} if self._loop is None else self._loop.num_refused
        return metrics_text(engine, self._spec.served_model_name, self._spec.group, num_refused)

    async def _render_metrics(self) -> None:
        while True:
            self._get_loop().render_metrics()
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _report(self, router_name: str) -> None:
        """Tell one router what changed, at once, and that we live, every second; find it again when it is replaced."""
        loop, due_s = self._get_loop(), 0.0
        router: Any = None
        me = ray.get_runtime_context().current_actor
        while True:
            if loop.has_news(router_name) or time.monotonic() >= due_s:
                report = loop.take_report(router_name)
                try:
                    router = router or await asyncio.to_thread(ray.get_actor, router_name, self._spec.ray_namespace)
                    wants = await asyncio.wait_for(router.report.remote(pack(report), me), REPORT_TIMEOUT_S)
                    loop.report_arrived(router_name, report, wants_snapshot=bool(wants))
                    due_s = time.monotonic() + REPORT_PERIOD_S
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

    def _get_desk(self) -> GrammarDesk:
        if self._desk is None:
            raise RuntimeError(f"rank {self._rank} does not lead its group")
        return self._desk
