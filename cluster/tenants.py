"""``--tenants``: what each tenant may have of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MOST_NAME_CHARS = 1024
"""As for the fields of a request that name one."""


class TenantSettings(BaseModel):
    """One tenant's share and limits."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """Its share of the service, beside those of the other tenants that wait."""
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    """None: any number."""
    max_queued_requests: Annotated[int, Field(ge=0)] | None = None
    """In the router's queue; 0: none may wait, None: any number."""


def _parsed(value: Any) -> Any:
    """The mapping that a command line gives as JSON, or as ``@FILE`` that holds it."""
    if not isinstance(value, str):
        return value
    text = _contents(Path(value[1:]).expanduser()) if value.startswith("@") else value
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        where = f"in {value[1:]}" if value.startswith("@") else "given"
        raise PydanticCustomError(
            "tenants",
            "must be a JSON object or @FILE; what is {where} is none ({reason})",
            {"where": where, "reason": str(error)},
        ) from error


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PydanticCustomError("tenants", "cannot be read ({reason})", {"reason": reason}) from error


TenantName = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)]
Tenants = Annotated[dict[TenantName, TenantSettings], BeforeValidator(_parsed)]
