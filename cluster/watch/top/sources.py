"""Where ``octavo top`` has its numbers from: any gateway of a cluster, by HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from typing import Any, Protocol

from ....worker.errors import ConfigurationError, OctavoError

TIMEOUT_S = 10.0
PROFILE_TIMEOUT_S = 150.0


class NotWatched(OctavoError):
    """The cluster does not answer any more, or not as it should; one line says how."""


class Source(Protocol):
    name: str
    """For people."""

    def metrics(self) -> str:
        """Prometheus text of the whole cluster. Raises ConfigurationError or NotWatched."""
        ...


class HttpSource:
    """The gateway at ``url``; ``api_key`` if it asks for one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.name = url
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigurationError(f"URL: must be such as http://127.0.0.1:8000, got {url[:200]!r}")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def metrics(self) -> str:
        text = self._call("GET", "/metrics", TIMEOUT_S).decode(errors="replace")
        if "octavo_gateway_requests_in_flight" not in text:
            raise ConfigurationError(f"URL: {self._url}/metrics answers, but it is not Octavo's")
        return text

    def profile(self, num_steps: int, group: str | None) -> dict[str, Any]:
        """Group → its traces. Raises ConfigurationError or NotWatched, with what the server says."""
        query = urllib.parse.urlencode({"steps": num_steps} | ({} if group is None else {"group": group}))
        answer: dict[str, Any] = json.loads(self._call("POST", f"/debug/profile?{query}", PROFILE_TIMEOUT_S))["groups"]
        return answer

    def _call(self, method: str, path: str, timeout_s: float) -> bytes:
        request = urllib.request.Request(self._url + path, method=method, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigurationError(f"URL: {self._url} does not answer: {reason}") from None

    def _refused(self, error: urllib.error.HTTPError) -> OctavoError:
        if error.code == HTTPStatus.UNAUTHORIZED:
            return ConfigurationError("--api-key: the server asks for a key, or does not take this one")
        said = _message(error.read())
        kind = ConfigurationError if error.code < HTTPStatus.INTERNAL_SERVER_ERROR else NotWatched
        return kind(f"{self._url}: HTTP {error.code}{': ' if said else ''}{said}")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
