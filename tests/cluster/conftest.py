"""A scripted cluster behind the HTTP API, and the API over it in-process and on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from one_model import one_model

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import GenerationRequest, Readiness, Route, ServedModel, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.http_config import HttpConfig
from octavo.worker.messages import FinishReason, TokenLogprobs
from octavo.worker.pool_state import PoolState

MODEL = "smollm2"
MAX_MODEL_LEN = 256
VOCAB_SIZE = 49_152
IM_END = 2
"""The end-of-sequence id of SmolLM2, <|im_end|>."""

Step = TokenDelta | Callable[[], Awaitable[object]] | Exception
Script = Callable[[GenerationRequest], Sequence[Step]]


class ScriptedGeneration:
    """Plays its steps: deltas are given one at a time, callables awaited, exceptions raised; then it is silent."""

    def __init__(self, steps: Sequence[Step], route: Route) -> None:
        self.route = route
        self.aborted = asyncio.Event()
        self.num_aborts = 0
        self.ended: list[int] = []
        """Branches that were stopped alone."""
        self._steps = deque(steps)
        self._wake: Callable[[], None] = lambda: None
        self._waiting: asyncio.Task[None] | None = None

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        wake()

    def take(self) -> Sequence[TokenDelta]:
        if not self._steps or (self._waiting is not None and not self._waiting.done()):
            return ()
        step = self._steps.popleft()
        if isinstance(step, Exception):
            raise step
        if isinstance(step, TokenDelta):
            asyncio.get_running_loop().call_soon(self._wake)
            return (step,)
        self._waiting = asyncio.ensure_future(step())
        self._waiting.add_done_callback(lambda _: self._wake())
        return ()

    def end(self, branch: int) -> None:
        self.ended.append(branch)

    def abort(self) -> None:
        self.num_aborts += 1
        if self._waiting is not None:
            self._waiting.cancel()
        self.aborted.set()


class ScriptedService:
    """A GenerationService that answers from a script; by default it says the prompt again."""

    def __init__(self, echo: Script) -> None:
        self.script: Script = echo
        self.start_error: Exception | None = None
        self.ready = Readiness(True, "2 worker groups")
        self.cluster_metrics = ""
        self.decisions: list[dict[str, Any]] | Exception = []
        self.forgotten: dict[str, int | None] | Exception = {"group-1": 7, "group-2": None}
        self.profiles: list[tuple[int, str | None]] = []
        self.profiled: dict[str, dict[str, Any]] = {"group-1": {"steps": 10, "files": {"0": "a trace"}}}
        self.pool_states: dict[str, PoolState | None] = {}
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []

    async def start(self, request: GenerationRequest) -> ScriptedGeneration:
        if self.start_error is not None:
            raise self.start_error
        self.requests.append(request)
        route = Route("group-1", len(request.prompt_token_ids) // 16 * 16, "prefix")
        self.generations.append(ScriptedGeneration(self.script(request), route))
        return self.generations[-1]

    async def readiness(self) -> Readiness:
        return self.ready

    async def metrics_text(self) -> str:
        return self.cluster_metrics

    async def explain(self, limit: int) -> list[dict[str, Any]]:
        if isinstance(self.decisions, Exception):
            raise self.decisions
        return self.decisions[:limit]

    async def pools(self, most: int) -> dict[str, PoolState | None]:
        return dict(list(self.pool_states.items())[:most])

    async def profile(self, num_steps: int, group: str | None, patience_s: float) -> dict[str, dict[str, Any]]:
        self.profiles.append((num_steps, group))
        return self.profiled

    async def reset_prefix_cache(self) -> dict[str, int | None]:
        if isinstance(self.forgotten, Exception):
            raise self.forgotten
        return self.forgotten


def deltas(
    token_ids: Sequence[int],
    reason: FinishReason | None,
    *,
    cached: int | None = 0,
    sizes: Sequence[int] = (1, 3, 2),
    branch: int = 0,
) -> list[TokenDelta]:
    """``token_ids`` of a branch in deltas of changing sizes; the last carries ``reason``."""
    parts: list[Sequence[int]] = []
    while token_ids:
        size = sizes[len(parts) % len(sizes)]
        parts.append(token_ids[:size])
        token_ids = token_ids[size:]
    parts = parts or [()]
    return [
        TokenDelta(
            tuple(part),
            finish_reason=reason if index == len(parts) - 1 else None,
            num_cached_tokens=cached if index == 0 else None,
            branch=branch,
        )
        for index, part in enumerate(parts)
    ]


def echo(request: GenerationRequest) -> list[TokenDelta]:
    """Every branch says the prompt without its special tokens, then an end-of-sequence token, within ``max_tokens``."""
    output = [token_id for token_id in request.prompt_token_ids if token_id > IM_END]
    if IM_END in request.sampling.stop_token_ids:
        output.append(IM_END)
    limit = request.sampling.max_tokens
    reason = FinishReason.STOP if len(output) <= limit else FinishReason.LENGTH
    branches = [
        deltas(output[:limit], reason, cached=None if branch else 16, branch=branch)
        for branch in range(request.num_branches)
    ]
    first, *others = [delta for step in zip(*branches, strict=True) for delta in step]
    prompt_logprobs = _logprobs(request.prompt_token_ids[1:], request.sampling.num_prompt_logprobs)
    return [
        delta._replace(logprobs=_logprobs(delta.token_ids, request.sampling.num_logprobs))
        for delta in (first._replace(prompt_logprobs=prompt_logprobs), *others)
    ]


def _logprobs(token_ids: Sequence[int], num: int | None) -> tuple[TokenLogprobs, ...]:
    """Each token is the likeliest one; those after it in the vocabulary come next."""
    if num is None:
        return ()
    tops = ([(token_id + place) % VOCAB_SIZE for place in range(num)] for token_id in token_ids)
    logprobs = tuple(-0.5 - place for place in range(num))
    return tuple(TokenLogprobs(-0.5, 1, tuple(top), logprobs) for top in tops)


@pytest.fixture(scope="session")
def text(model_dir: Path) -> Iterator[TextProcessor]:
    processor = TextProcessor.load(model_dir)
    yield processor
    processor.close()


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService(echo)


@pytest.fixture
def say(service: ScriptedService, text: TextProcessor) -> Callable[..., None]:
    """Make the model answer with the given text."""

    def set_answer(answer: str, reason: FinishReason = FinishReason.LENGTH, sizes: Sequence[int] = (1,)) -> None:
        token_ids = text._backend.encode(answer, add_special_tokens=False).ids
        service.script = lambda _: deltas(token_ids, reason, sizes=sizes)

    return set_answer


@pytest.fixture
def info() -> ServedModel:
    return ServedModel(MODEL, MAX_MODEL_LEN, created=1_700_000_000, max_num_seqs=32)


@pytest.fixture
async def client(service: ScriptedService, text: TextProcessor, info: ServedModel) -> AsyncIterator[httpx2.AsyncClient]:
    """The application without a socket. It answers whole streams only."""
    transport = httpx2.ASGITransport(build_app(service, one_model(text, info)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://octavo") as http:
        yield http


@contextlib.asynccontextmanager
async def served(app: object) -> AsyncIterator[str]:
    """``app`` under uvicorn on a free port of the loopback interface; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, lifespan="off")  # type: ignore[arg-type]
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@pytest.fixture
async def address(service: ScriptedService, text: TextProcessor, info: ServedModel) -> AsyncIterator[str]:
    """The application on a real port, with comments on streams that are silent for 50 ms."""
    async with served(build_app(service, one_model(text, info), http=HttpConfig(keepalive_s=0.05))) as url:
        yield url
