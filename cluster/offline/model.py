"""LocalModel: a model brought up in this process: its text side, its judge and its engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from ...worker.grammar import GrammarCompiler
from ...worker.spec import WorkerSpec
from ..api.answer.run import Run
from ..api.request.judged import JudgedRequest, RequestJudge
from ..api.request.judging import JudgeRecipe
from ..api.text.processor import TextProcessor
from ..plan import compile_cache, served_model
from .config import LocalPlan
from .engine import GROUP, LocalService
from .loop_thread import LoopThread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalModel:
    judge: RequestJudge
    name: str
    """What bodies call it."""
    service: LocalService
    _thread: LoopThread
    """Where the service lives."""

    @classmethod
    def load(cls, plan: LocalPlan) -> Self:
        """Raises ConfigurationError in one sentence for what cannot work."""
        info = served_model(plan.serve, plan.folder)
        judge = JudgeRecipe(plan.folder, info, plan.serve.chat_template, plan.serve.chat_options).judge()
        thread = LoopThread("octavo")
        try:
            service = thread.run(_bring_up(plan.worker_spec(GROUP), plan.folder, judge.text.grammars))
        except BaseException:
            thread.close()
            _close(judge)
            raise
        return cls(judge, info.name, service, thread)

    @property
    def text(self) -> TextProcessor:
        return self.judge.text

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """See ``LoopThread.run``."""
        return self._thread.run(coroutine)

    async def start(self, judged: JudgedRequest) -> Run:
        """Raises as ``Run.start``."""
        return await Run.start(judged, self.service, self.text, self.service.metrics[self.name], time.perf_counter())

    def close(self) -> None:
        """Harmless when repeated."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._thread.run(self.service.close())
        self._thread.close()
        _close(self.judge)


def _close(judge: RequestJudge) -> None:
    judge.close()
    judge.text.close()


async def _bring_up(spec: WorkerSpec, folder: Path, grammars: GrammarCompiler) -> LocalService:
    """Blocks the event loop, on purpose: what is computed here gives its thread OpenMP threads, which live as it does.

    How OpenMP's threads wait for work is read when torch is loaded, which may have been long ago. Those of a process
    that has more of them than processors hardly spin; others spin for milliseconds, and a step takes many times as long
    on a busy machine (see ``kernels/cpu_environment.py``).
    """
    from ...worker.rank import load_alone

    with _kernel_settings(compile_cache(spec.cache_dir)):
        loaded = replace(load_alone(folder, spec), grammars=grammars)  # what a judge has compiled is there
        return LocalService.start_engine(spec, loaded)


@contextlib.contextmanager
def _kernel_settings(cache_dir: Path) -> Iterator[None]:
    """Compiled kernels come from the cache folder and share torch's threads, unless numba was told otherwise."""
    from numba import config

    known = config.CACHE_DIR, config.THREADING_LAYER
    config.CACHE_DIR = config.CACHE_DIR or str(cache_dir)
    config.THREADING_LAYER = "omp" if config.THREADING_LAYER == "default" else config.THREADING_LAYER
    try:
        yield
    finally:
        config.CACHE_DIR, config.THREADING_LAYER = known
