"""The one place where environment variables are read.

Ray, PyTorch and the Hugging Face libraries read variables of their own; those that Octavo itself looks at are here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from ..worker.errors import ConfigurationError
from ..worker.line_tls import TlsFiles

PREFIX = "OCTAVO_"
CACHE_DIR = "OCTAVO_CACHE_DIR"
API_KEY = "OCTAVO_API_KEY"

_SERVICE = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

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
    """The variables that matter before there is a configuration."""
    return Environment(
        cache_dir=_cache_dir(environ.get(CACHE_DIR)),
        api_key=environ.get(API_KEY) or None,
        ray_address=environ.get("RAY_ADDRESS") or None,
        ray_auth_mode=environ.get("RAY_AUTH_MODE") or None,
        ray_auth_token=environ.get("RAY_AUTH_TOKEN") or None,
        ray_auth_token_path=environ.get("RAY_AUTH_TOKEN_PATH") or None,
    )


def ray_tls(environ: Mapping[str, str] = os.environ) -> TlsFiles | None:
    """The certificates of Ray's own connections, where it encrypts them. Raises ConfigurationError when Ray is told to
    and not with what, or with files that are not there."""
    if environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    paths = {name: environ.get(name) for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")}
    for name, path in paths.items():
        if not path or not os.access(path, os.R_OK):
            what = f"is {path}, which cannot be read" if path else "is not"
            raise ConfigurationError(f"RAY_USE_TLS is set, and {name} {what}")
    return TlsFiles(*[Path(path) for path in paths.values() if path])


def default_cache_dir() -> Path:
    """``OCTAVO_CACHE_DIR``, else the cache folder of the user, such as ``~/.cache/octavo``."""
    return read_environment().cache_dir


def default_api_keys() -> list[str]:
    """``OCTAVO_API_KEY``, if it is set."""
    key = read_environment().api_key
    return [] if key is None else [key]


def setting_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All variables that begin with ``OCTAVO_`` and are not empty: one for each setting, and mistakes.

    Kubernetes sets variables for each Service of a namespace, which a Service named octavo or octavo-head would make
    look like ours; they are left out.
    """
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
    return {name: value for name, value in ours.items() if not _is_of_a_service(name, value)}


def _is_of_a_service(name: str, value: str) -> bool:
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and _SERVICE_URL.match(value) is not None)


def bare_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a Python of ours needs to start, for processes that must not hold what else is there, such as secrets."""
    return {name: environ[name] for name in _OF_PYTHON if name in environ}


def _cache_dir(value: str | None) -> Path:
    if not value:
        return Path(platformdirs.user_cache_dir("octavo", appauthor=False))
    return Path(value).expanduser().absolute()
