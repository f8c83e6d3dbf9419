"""``GET /debug/route``: the routers' last decisions, newest first, each candidate with the parts of its cost.

| query parameter | meaning |
|---|---|
| limit 1..256 | how many at the most; 20 by default |
| request_id | only decisions for ids that begin so: the ``id`` of a completion names all of its prompts |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import QueryParams

from ....worker.errors import InvalidRequest
from ..service import GenerationService

MAX_DECISIONS = 256
DEFAULT_DECISIONS = 20
_MAX_REQUEST_ID_CHARS = 128
_KNOWN = ("limit", "request_id")


async def last_decisions(service: GenerationService, query: QueryParams) -> Sequence[Mapping[str, Any]]:
    """Raises InvalidRequest for a wrong parameter, Unavailable when no router answers."""
    for name in query:
        if name not in _KNOWN:
            raise InvalidRequest(f"Unknown query parameter; there are {', '.join(_KNOWN)}.", param=name[:64])
    limit, request_id = _limit(query.get("limit")), _request_id(query.get("request_id"))
    if request_id is None:
        return await service.explain(limit)
    decisions = await service.explain(MAX_DECISIONS)
    return [decision for decision in decisions if str(decision["request_id"]).startswith(request_id)][:limit]


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_DECISIONS
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= MAX_DECISIONS):
        message = f"limit must be a whole number from 1 to {MAX_DECISIONS}, got {value[:32]!r}."
        raise InvalidRequest(message, param="limit")
    return int(value)


def _request_id(value: str | None) -> str | None:
    if value is not None and not 1 <= len(value) <= _MAX_REQUEST_ID_CHARS:
        message = f"request_id must have from 1 to {_MAX_REQUEST_ID_CHARS} characters, got {len(value)}."
        raise InvalidRequest(message, param="request_id")
    return value
