"""The one place where environment variables are read.

Ray, PyTorch and the Hugging Face libraries read variables of their own; those that Octavo itself looks at are here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from ..worker.errors import ConfigurationError

PREFIX = "OCTAVO_"
CACHE_DIR = "OCTAVO_CACHE_DIR"
API_KEY = "OCTAVO_API_KEY"

KNOWN_VARIABLES = frozenset({CACHE_DIR, API_KEY})
"""Every variable that begins with ``OCTAVO_``; another one is a mistake that is said, not ignored."""

_OF_PYTHON = ("LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "TZ")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the process was started with. None means that the variable is not set, or empty."""

    cache_dir: Path
    """Converted models and compiled CPU kernels; absolute."""
    api_key: str | None = field(default=None, repr=False)
    """``OCTAVO_API_KEY``: the key that clients must send, where no flag names others."""
    ray_address: str | None = None
    """``RAY_ADDRESS``: Ray joins this cluster when it is given no address."""
    ray_auth_mode: str | None = None
    """``RAY_AUTH_MODE``: ``token`` or ``disabled``. Left unset, Ray's processes may disagree about it."""
    ray_auth_token: str | None = field(default=None, repr=False)
    """``RAY_AUTH_TOKEN``."""
    ray_auth_token_path: str | None = None
    """``RAY_AUTH_TOKEN_PATH``: the file that holds the token."""


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """The variables that matter to Octavo. Raises ConfigurationError on an unknown ``OCTAVO_…``."""
    _refuse_unknown(environ)
    return Environment(
        cache_dir=_cache_dir(environ.get(CACHE_DIR)),
        api_key=environ.get(API_KEY) or None,
        ray_address=environ.get("RAY_ADDRESS") or None,
        ray_auth_mode=environ.get("RAY_AUTH_MODE") or None,
        ray_auth_token=environ.get("RAY_AUTH_TOKEN") or None,
        ray_auth_token_path=environ.get("RAY_AUTH_TOKEN_PATH") or None,
    )


def default_cache_dir() -> Path:
    """``OCTAVO_CACHE_DIR``, else the cache folder of the user, such as ``~/.cache/octavo``."""
    return read_environment().cache_dir


def default_api_keys() -> list[str]:
    """``OCTAVO_API_KEY``, if it is set."""
    key = read_environment().api_key
    return [] if key is None else [key]


def bare_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a Python of ours needs to start, for processes that must not hold what else is there, such as secrets."""
    return {name: environ[name] for name in _OF_PYTHON if name in environ}


def _cache_dir(value: str | None) -> Path:
    if not value:
        return Path(platformdirs.user_cache_dir("octavo", appauthor=False))
    return Path(value).expanduser().absolute()


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in KNOWN_VARIABLES)
    if unknown:
        raise ConfigurationError("; ".join(f"{name}: no such variable{_hint(name)}" for name in unknown))


def _hint(name: str) -> str:
    matches = difflib.get_close_matches(name, KNOWN_VARIABLES, n=1)
    return f", did you mean {matches[0]}?" if matches else f"; known: {', '.join(sorted(KNOWN_VARIABLES))}"
