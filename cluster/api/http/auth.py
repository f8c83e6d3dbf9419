"""Who may use the API: keys by their digests, from the configuration and from a file that may change."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ....worker.errors import ConfigurationError
from ...http_config import digest, key_digest
from ...page.files import PAGE_PATHS

OPEN_PATHS = PAGE_PATHS | {"/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"}
"""What needs no key, as in vLLM: probes, scrapers, documentation; and the page's files. Every other path does, also one
that is unknown."""

LOOK_S = 1.0
"""How often the file is looked at, at the most."""

_COMMENT = re.compile(r"(^|\s)#.*")
_Version = tuple[int, int, int]

logger = logging.getLogger(__name__)


class ApiKeys:
    """The keys that are good now. ``digests`` are of the form ``sha256:…``; ``file`` may bring more.

    A file that changes is read again; one that cannot be read leaves the keys as they were, is logged once, and is
    tried again until it can. One that is empty is no fault: its keys are gone. Raises ConfigurationError when the file
    cannot be read at first, or there is no key at all.
    """

    def __init__(
        self, digests: Iterable[str], file: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._own = frozenset(digests)
        self._file = file
        self._clock = clock
        self._looked_at_s = clock()
        self._version: _Version | None = None
        """Of the file as it was read last."""
        self._complained_of: _Version | str = ""
        self._digests = self._own
        if file is not None:
            try:
                self._version = _version(file)
                self._digests = self._own | read_keys(file)
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"--api-key-file: {file} cannot be used: {error}") from error
            if not self._digests:
                raise ConfigurationError(f"--api-key-file: {file} holds no key")

    def accept(self, key: str) -> bool:
        """Whether the key is good; takes as long for a key that nearly is."""
        self._look()
        sent = digest(key)
        return sum(hmac.compare_digest(sent, known) for known in self._digests) > 0

    def _look(self) -> None:
        if self._file is None or self._clock() - self._looked_at_s < LOOK_S:
            return
        self._looked_at_s = self._clock()
        version: _Version | str = "none"
        try:
            version = _version(self._file)
            if version != self._version:
                self._digests = self._own | read_keys(self._file)
                self._version = version
                logger.info("%s was read again", self._file)
            self._complained_of = ""
        except (OSError, ValueError) as error:
            self._complain(version, error)

    def _complain(self, version: _Version | str, error: Exception) -> None:
        if version != self._complained_of:
            logger.error("%s cannot be read, the API keys stay as they were: %s", self._file, error)
        self._complained_of = version


def read_keys(file: Path) -> frozenset[str]:
    """Digests of the keys in a file: one key, or its digest, a line; ``#`` at its start or after a blank begins a
    comment.

    Raises OSError, or ValueError that names the line and not what is in it.
    """
    digests = set()
    for number, line in enumerate(file.read_bytes().decode(errors="replace").splitlines(), 1):
        key = _COMMENT.sub("", line).strip()
        try:
            digests.update([key_digest(key)] if key else [])
        except ValueError as error:
            raise ValueError(f"line {number}: a key {error}") from None
    return frozenset(digests)


def _version(file: Path) -> _Version:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class RequireKey:
    """Answers 401 to whoever sends no good key, before anything of the body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope):
            self._check(Headers(scope=scope).get("authorization", ""))
        await self._app(scope, receive, send)

    def _check(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("No API key was sent: it belongs into the header 'Authorization: Bearer KEY'.")
        if not self._keys.accept(key.strip()):
            raise _unauthorized("The API key is not one of this server's.")


def is_open(scope: Scope) -> bool:
    """Whether the request is for one of ``OPEN_PATHS``."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) in OPEN_PATHS


def _unauthorized(message: str) -> HTTPException:
    return HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})
