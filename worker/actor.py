"""Worker: the Ray actor around one rank. Rank 0 leads its group: it has the group's ``Leader``.

What gateways ask of a leader comes by token lines, nothing of a step goes through Ray. What needs torch is imported
where a worker first needs it: the processes that only create workers do without, and start sooner.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray

from .grammar_desk import GrammarDesk
from .leader import Leader
from .lifeline import die_with_parent, process_start_s, write_stacks, write_stacks_on_signal
from .line_frames import LineAddress
from .line_tls import TlsFiles
from .listen import listen_on
from .logs import configure_logs
from .modesty import be_modest
from .pool_state import PoolState
from .profile_desk import PROFILES, ProfileDesk
from .rank_metrics import RankMetrics
from .reporter import PERIOD_S
from .spec import WorkerSpec

if TYPE_CHECKING:
    from .rank import LoadedRank


class Worker:
    """Wrapped by ``ray.remote`` where a worker group creates its ranks."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        configure_logs(spec.log_level, spec.log_format, {"role": "worker", "group": spec.group, "rank": rank})
        die_with_parent()
        write_stacks_on_signal()
        self._spec = spec
        self._rank = rank
        self._loaded: LoadedRank | None = None
        self._leader: Leader | None = None
        self._follower_end: asyncio.Future[BaseException | None] | None = None
        """Gives None when the leader has shut down."""
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics: RankMetrics | None = None

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
        from .rank import executor_of

        loaded, spec = self._get_loaded(), self._spec
        executor, profiles = executor_of(loaded), None
        if loaded.profiler is not None:
            folder, num_ranks = spec.cache_dir / PROFILES, spec.tensor_parallel_size
            profiles = ProfileDesk(executor, loaded.profiler, folder, spec.group, num_ranks)
        desk = GrammarDesk(loaded.grammars)
        await desk.load()
        self._leader = leader = Leader(spec, loaded, executor, desk, profiles)
        handle = ray.get_runtime_context().current_actor
        await leader.open(ray.util.get_node_ip_address(), handle, tls)
        self._tasks.append(asyncio.create_task(self._tell_metrics(leader)))

    async def watch(self) -> None:
        """Returns when this rank ended in order, raises when it failed; the worker group waits for that."""
        try:
            if self._leader is not None:
                await self._leader.watch()
            elif self._follower_end is not None and (failure := await self._follower_end) is not None:
                raise RuntimeError(failure)
        except RuntimeError as error:
            raise RuntimeError(f"rank {self._rank}: {error}") from None

    async def health(self) -> float:
        """Seconds since the engine's thread last came round. Raises when it hangs."""
        return 0.0 if self._leader is None else await self._leader.health()

    async def write_stacks(self) -> None:
        """What every thread of this rank does, into its log: the group is about to be given up."""
        write_stacks()

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, finish what is under way; whether all of it was finished in time."""
        return await self._get_leader().drain(timeout_s)

    async def retire(self, timeout_s: float) -> bool:
        """As ``drain``; then ``watch`` returns, and the worker group makes way for another one."""
        return await self._get_leader().retire(timeout_s)

    # ---- what gateways call ----

    async def line_address(self) -> LineAddress:
        """Where gateways submit requests and poll for tokens."""
        return await self._get_leader().line_address()

    # ---- what the group's owner calls ----

    async def reset_prefix_cache(self) -> int:
        """Forget what is cached and unused; how many blocks that was."""
        return await self._get_leader().reset_prefix_cache()

    async def metrics(self) -> str:
        """What this rank says of its process and its GPU, as Prometheus text."""
        return "" if self._metrics is None else await self._metrics.text()

    async def take_rank_metrics(self, texts: Mapping[str, str]) -> None:
        """``metrics`` of other ranks, by their number: the next reports carry them."""
        await self._get_leader().take_rank_metrics(texts)

    async def profile(self, num_steps: int, patience_s: float) -> dict[str, Any]:
        """See ``ProfileDesk.record``."""
        return await self._get_leader().profile(num_steps, patience_s)

    async def pool_state(self) -> PoolState:
        """What the group's block pool looks like now, for people."""
        return await self._get_leader().pool_state()

    # ---- what this rank does by itself ----

    async def _tell_metrics(self, leader: Leader) -> None:
        while True:
            await leader.take_rank_metrics({"0": await self.metrics()})
            await asyncio.sleep(PERIOD_S)

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

    def _get_loaded(self) -> LoadedRank:
        if self._loaded is None:
            raise RuntimeError(f"rank {self._rank} is not loaded")
        return self._loaded

    def _get_leader(self) -> Leader:
        if self._leader is None:
            raise RuntimeError(f"rank {self._rank} does not lead its group")
        return self._leader
