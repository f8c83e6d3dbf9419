"""FakeHost: the actor that holds a share of the fake groups. Each has a leader of its own, the same as a real one's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from ...worker.checkpoint.store import resolve_model
from ...worker.grammar import GrammarCompiler
from ...worker.grammar_desk import GrammarDesk
from ...worker.leader import Leader
from ...worker.lifeline import die_with_parent
from ...worker.line_tls import TlsFiles
from ...worker.logs import configure_logs
from ...worker.model.config import ModelConfig
from ..plan import ServePlan
from .engine import fake_engine_of
from .executor import Clockwork, FakeExecutor
from .words import words_of

REPORT_PAUSE_S = 0.05
"""Between two looks for news of a group; a real leader, which is alone in its process, looks more often."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _FakeModel:
    """What the groups are told of the model; a ``LoadedGroup``."""

    num_blocks: int
    max_model_len: int
    grammars: GrammarCompiler
    weights: str = "fake"


class LeaderHandle:
    """Stands for the actor's handle of one group's leader: its methods are called as those of an actor."""

    def __init__(self, host: Any, group: str) -> None:
        self._host = host
        self._group = group

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self._host, self._group, name)


@dataclass(frozen=True, slots=True)
class _Method:
    host: Any
    group: str
    name: str

    def remote(self, *args: Any) -> Any:
        return self.host.call.remote(self.group, self.name, args)


class FakeHost:
    """Wrapped by ``ray.remote``. ``groups`` are the names of its worker groups."""

    def __init__(self, plan: ServePlan, groups: Sequence[str], routers: tuple[str, ...]) -> None:
        config = plan.config
        configure_logs(config.log_level, config.log_format, {"role": "fake groups", "group": groups[0]})
        die_with_parent()
        self._plan = plan
        self._groups = groups
        self._routers = routers
        self._leaders: dict[str, Leader] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, tls: TlsFiles | None) -> None:
        """All groups are up and reported when it returns. Raises ConfigurationError."""
        config = self._plan.config
        fake = fake_engine_of(config)
        resolved = resolve_model(self._plan.model, cache_dir=config.cache_dir, report=logger.info)
        model = ModelConfig.from_folder(resolved.path)
        words = list((await asyncio.to_thread(words_of, resolved.path)).values())
        grammars = GrammarCompiler.of_model(resolved.path, model.vocab_size)
        length = config.max_model_len or model.max_position_embeddings
        self._model = _FakeModel(fake.num_blocks, length, grammars)
        self._desk = GrammarDesk(grammars)
        await self._desk.load()
        self._me = ray.get_runtime_context().current_actor
        clockwork = Clockwork()
        for group in self._groups:
            executor = FakeExecutor(clockwork, fake.step_times, words, model.hidden_size)
            await self._lead(group, executor, tls)
            self._tasks.append(asyncio.create_task(self._replace(group, executor, tls)))

    async def call(self, group: str, method: str, args: tuple[Any, ...]) -> Any:
        """Of the group's leader."""
        return await getattr(self._leaders[group], method)(*args)

    async def drain(self, timeout_s: float) -> None:
        """As each leader's."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*[leader.drain(timeout_s) for leader in self._leaders.values()])

    async def watch(self) -> None:
        """Never returns: who waits for it learns of this actor's end."""
        await asyncio.Event().wait()

    async def _lead(self, group: str, executor: FakeExecutor, tls: TlsFiles | None) -> None:
        spec = self._plan.worker_spec(group, time.time_ns(), self._routers)
        self._leaders[group] = leader = Leader(spec, self._model, executor, self._desk)
        handle = LeaderHandle(self._me, group)
        await leader.open(ray.util.get_node_ip_address(), handle, tls, pause_s=REPORT_PAUSE_S)

    async def _replace(self, group: str, executor: FakeExecutor, tls: TlsFiles | None) -> None:
        """A group that was drained or has failed comes up again, empty, as a real one would."""
        while True:
            try:
                await self._leaders[group].watch()
            except RuntimeError as error:
                logger.error("%s: %s", group, error)
            self._leaders[group].close()
            await self._lead(group, executor, tls)
