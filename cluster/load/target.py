"""Target: where requests go, and what all of them say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import orjson

from .scripts import Talk

Endpoint: TypeAlias = Literal["/v1/completions", "/v1/chat/completions"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)


@dataclass(frozen=True, slots=True)
class Server:
    """``url`` without ``/v1``."""

    url: str
    headers: Mapping[str, str]
    is_insecure: bool = False
    """Its certificate is not looked at."""
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Target:
    server: Server
    model: str
    endpoint: Endpoint
    fields: Mapping[str, Any]
    """Sampling parameters and the extra body; they go before ours."""

    def body(self, talk: Talk, num_output_tokens: int) -> bytes:
        """Of the next turn's request."""
        is_chat = self.endpoint == "/v1/chat/completions"
        limit = {"max_completion_tokens" if is_chat else "max_tokens": num_output_tokens}
        common = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        return orjson.dumps({**common, **talk.fields(is_chat=is_chat), **limit, **self.fields})
