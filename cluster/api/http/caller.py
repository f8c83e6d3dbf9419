"""What the headers of an HTTP request say of its sender, and of where it shall go.

| header | meaning |
|---|---|
| x-octavo-group | only these worker groups may serve the request: one or more names, with commas between |
| x-octavo-exclude-groups | none of these |
| x-octavo-prefer-groups | these, where it costs little |
| x-octavo-session-id | requests of one session go to one group, where it costs little; before the body's session_id |
| x-octavo-tenant | whom the request counts for; before the body's user, since a proxy that sets it knows better |
| x-octavo-priority | the priority of a request whose body names none |
| authorization | the tenant where nothing else names one, by a digest of the API key |

A header of ours that is unknown, empty, given twice or too long is refused by name (HTTP 400), as a field would be.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from ....worker.errors import InvalidRequest
from ..request.fields import MAX_ID_CHARS
from ..service import RouteWishes

MAX_GROUPS = 16
MAX_GROUP_CHARS = 128

_PREFIX = "x-octavo-"
_GROUP = "x-octavo-group"
_EXCLUDED = "x-octavo-exclude-groups"
_PREFERRED = "x-octavo-prefer-groups"
_SESSION = "x-octavo-session-id"
_TENANT = "x-octavo-tenant"
_PRIORITY = "x-octavo-priority"
_KNOWN = (_GROUP, _EXCLUDED, _PREFERRED, _SESSION, _TENANT, _PRIORITY)

_SHOWN_CHARS = 64
_INT64_DIGITS = 19
_KEY_DIGEST_BYTES = 8
"""Enough that no two keys of a server are the same tenant."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What the headers say; None and empty where they say nothing."""

    wishes: RouteWishes
    tenant: str | None = None
    api_key_tenant: str | None = None
    """A name for who holds the API key: a digest, because tenants are seen in logs and at the worker groups."""
    priority: int | None = None


def read_caller(headers: Headers) -> Caller:
    """Raises InvalidRequest, its ``param`` the header's name."""
    _check_names(headers)
    wishes = RouteWishes(
        _identifier(headers, _SESSION),
        _groups(headers, _GROUP),
        _groups(headers, _EXCLUDED),
        _groups(headers, _PREFERRED),
    )
    if wishes.allowed_groups and set(wishes.allowed_groups) <= set(wishes.excluded_groups):
        raise InvalidRequest(f"The headers {_GROUP} and {_EXCLUDED} leave no worker group to serve it.", param=_GROUP)
    return Caller(wishes, _identifier(headers, _TENANT), _api_key_tenant(headers), _priority(headers))


def _check_names(headers: Headers) -> None:
    names = [name for name in headers if name.startswith(_PREFIX)]
    for name in names:
        if name not in _KNOWN:
            raise InvalidRequest(f"Unknown header {_shown(name)}; there are {', '.join(_KNOWN)}.", param=_shown(name))
        if names.count(name) > 1:
            raise InvalidRequest(f"The header {name} is given {names.count(name)} times.", param=name)
        if not headers[name].strip():
            raise InvalidRequest(f"The header {name} is empty; leave it out instead.", param=name)


def _identifier(headers: Headers, name: str) -> str | None:
    value = headers.get(name)
    if value is not None and len(value) > MAX_ID_CHARS:
        message = f"The header {name} has {len(value)} characters, at most {MAX_ID_CHARS} are allowed."
        raise InvalidRequest(message, param=name)
    return value


def _groups(headers: Headers, name: str) -> tuple[str, ...]:
    if (value := headers.get(name)) is None:
        return ()
    groups = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    if len(groups) > MAX_GROUPS:
        message = f"The header {name} names {len(groups)} worker groups, at most {MAX_GROUPS} are allowed."
        raise InvalidRequest(message, param=name)
    for group in groups:
        _check_group(name, group)
    return groups


def _check_group(name: str, group: str) -> None:
    if not group:
        raise InvalidRequest(f"The header {name} has a name too few beside a comma.", param=name)
    if len(group) > MAX_GROUP_CHARS:
        message = f"The header {name} has a name of {len(group)} characters, at most {MAX_GROUP_CHARS} are allowed."
        raise InvalidRequest(message, param=name)


def _priority(headers: Headers) -> int | None:
    if (value := headers.get(_PRIORITY)) is None:
        return None
    is_short = re.fullmatch(rf"[+-]?[0-9]{{1,{_INT64_DIGITS}}}", value) is not None
    if is_short and -(2**63) <= int(value) < 2**63:
        return int(value)
    message = f"The header {_PRIORITY} must be a whole number of 64 bits, got {_shown(value)!r}."
    raise InvalidRequest(message, param=_PRIORITY)


def _api_key_tenant(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return None
    return f"api-key:{hashlib.blake2b(key.strip().encode(), digest_size=_KEY_DIGEST_BYTES).hexdigest()}"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
