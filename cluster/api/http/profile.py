"""``POST /debug/profile``: a torch profile of the next steps of worker groups, as a trace on each rank's machine.

| query parameter | meaning |
|---|---|
| steps 1..200 | how many; 10 by default. Fewer, or none, where nothing is computed for half a minute |
| group | of this worker group alone; all by default |

The answer says for each group how many steps were recorded, and the path of each rank's trace, for chrome://tracing or
Perfetto. Streams go on meanwhile, a few times as slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import QueryParams

from ....worker.errors import InvalidRequest, Overloaded, Unavailable
from ....worker.profile_desk import MOST_STEPS
from ..service import GenerationService

DEFAULT_STEPS = 10
PATIENCE_S = 30.0
"""For so long a profile waits for its steps."""

_KNOWN = ("steps", "group")


async def profile(service: GenerationService, query: QueryParams) -> Mapping[str, Any]:
    """Group → ``steps`` and ``files``, or ``error``. Raises InvalidRequest for a wrong parameter; Overloaded or
    Unavailable where no group could be profiled."""
    for name in query:
        if name not in _KNOWN:
            raise InvalidRequest(f"Unknown query parameter; there are {', '.join(_KNOWN)}.", param=name[:64])
    results = await service.profile(_steps(query.get("steps")), query.get("group"), PATIENCE_S)
    failures = [result["error"] for result in results.values() if "error" in result]
    if len(failures) < len(results):
        return results
    if any(result.get("is_busy") for result in results.values()):
        raise Overloaded(failures[0], retry_after_s=PATIENCE_S)
    raise Unavailable(failures[0] if failures else "no worker group is ready")


def _steps(value: str | None) -> int:
    if value is None:
        return DEFAULT_STEPS
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and 1 <= int(value) <= MOST_STEPS):
        raise InvalidRequest(f"steps must be a whole number from 1 to {MOST_STEPS}, got {value[:32]!r}.", param="steps")
    return int(value)
