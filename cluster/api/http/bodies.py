"""Bodies from the first byte to the judged request, within a size and wherever they are judged."""

from __future__ import annotations

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request

from ..request.judges import Judges
from ..request.judging import Judging, T
from .body_worker import BodyWorker
from .caller import read_caller
from .transport import read_body

LARGE_BYTES = 256 * 1024
"""A body beyond it is judged in another process, if there is one: this many bytes take 2 to 5 ms here."""


class Bodies:
    """``worker`` None: all are judged in this process. ``timeout_s``: for how long a client may send nothing."""

    def __init__(self, judges: Judges, worker: BodyWorker | None, *, max_bytes: int, timeout_s: float) -> None:
        self._judges = judges
        self._worker = worker
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def read(self, request: Request) -> bytearray:
        """Raises HTTPException 408, 413 or 415, or ClientGone."""
        return await read_body(request, self._max_bytes, self._timeout_s)

    def model_named_in(self, raw: bytearray) -> str | None:
        """The served model that a body asks for which was refused, so that its refusal is counted there; None where
        that is not to be had at once."""
        if len(raw) > LARGE_BYTES:
            return None
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return None
        name = body.get("model") if isinstance(body, dict) else None
        return next((model.name for model in self._judges.models if model.name == name), None)

    async def judge(self, judging: Judging[T], raw: bytearray, headers: Headers) -> T:
        """Raises what ``judging`` does here, or what ``BodyWorker.judge`` does."""
        caller = read_caller(headers)
        if self._worker is None or len(raw) <= LARGE_BYTES:
            return await judging(self._judges, raw, caller)
        return await self._worker.judge(judging, raw, caller)
