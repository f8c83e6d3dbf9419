"""The progress bar of a call: requests done, and tokens a second, read and written."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tqdm.auto import tqdm

REFRESH_S = 0.25


class Progress:
    """``shows`` None: where stderr is a terminal."""

    def __init__(self, num_requests: int, shows: bool | None) -> None:
        hidden = not (sys.stderr.isatty() if shows is None else shows)
        self._bar: Any = tqdm(total=num_requests, desc="requests", unit="req", disable=hidden, dynamic_ncols=True)
        self._begin_s = time.monotonic()
        self._num_in = self._num_out = 0

    def prompt(self, num_tokens: int) -> None:
        """A prompt is computed."""
        self._num_in += num_tokens

    def output(self, num_tokens: int) -> None:
        self._num_out += num_tokens

    def done(self) -> None:
        """A request has ended."""
        self._bar.update(1)

    @contextlib.asynccontextmanager
    async def refreshed(self) -> AsyncIterator[None]:
        """The bar says what it knows a few times a second, and once more in the end; then it is closed."""
        refresher = asyncio.create_task(self._refresh())
        try:
            yield
        finally:
            refresher.cancel()
            self._show()
            self._bar.close()

    async def _refresh(self) -> None:
        while not self._bar.disable:
            await asyncio.sleep(REFRESH_S)
            self._show()

    def _show(self) -> None:
        seconds = max(time.monotonic() - self._begin_s, 1e-9)
        rates = f"in {self._num_in / seconds:,.0f} tok/s, out {self._num_out / seconds:,.0f} tok/s"
        self._bar.set_postfix_str(rates)
