"""The address that the public sees, where it is not the one that Serve listens on.

Serve, its proxy and the gateways behind it listen on the loopback interface alone, and HAProxy finds them there. For
another address, and for HTTPS, HAProxy gets a section of its own: it takes connections, decrypts them if need be, and
hands on what was in them. Serve has no setting for that; what it does put into HAProxy's configuration as it is, at the
end of ``defaults``, is the balance algorithm, and a section can follow there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .config import ServeConfig
from .haproxy import LOOPBACK
from .local_ray import free_ports


@dataclass(frozen=True, slots=True)
class Front:
    """``section`` is HAProxy's; ``port`` is where Serve listens behind it, on the loopback interface."""

    section: str
    port: int


def front_of(config: ServeConfig, scratch: Path) -> Front | None:
    """None where Serve itself listens on the public address. Writes certificate and key into ``scratch``, a folder that
    is the user's alone, in the one file that HAProxy wants; renewed ones are read at the next start."""
    if config.host == LOOPBACK and config.ssl_certfile is None:
        return None
    (port,) = free_ports(1, LOOPBACK)
    return Front(_section(config, _certificates(config, scratch), port), port)


def public_url(config: ServeConfig) -> str:
    """The base URL of the API at the address that was asked for."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{config.port}{config.route_prefix.rstrip('/')}"


def _certificates(config: ServeConfig, scratch: Path) -> str:
    """Words of ``bind``."""
    if config.ssl_certfile is None:
        return ""
    pem = scratch / "tls.pem"
    pem.touch(mode=0o600)
    files = dict.fromkeys([config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile])
    pem.write_text("\n".join(file.read_text() for file in files))
    words = f" ssl crt {pem} alpn http/1.1 ssl-min-ver TLSv1.2"
    if config.ssl_ca_certs is not None:
        words += f" ca-file {_quoted(config.ssl_ca_certs)} verify required"
    if config.ssl_ciphers is not None:
        words += f" ciphers {config.ssl_ciphers}"
    return words


def _section(config: ServeConfig, certificates: str, port: int) -> str:
    host = {"0.0.0.0": "*", "::": "[::]"}.get(config.host, f"[{config.host}]" if ":" in config.host else config.host)
    both = " v4v6" if config.host == "::" else ""
    bind = f"bind {host}:{config.port}{both}{certificates}"
    lines = ["listen octavo_front", "mode tcp", "no log", bind, f"server serve {LOOPBACK}:{port}"]
    return "\n    ".join(lines)


def _quoted(path: Path) -> str:
    """As a word of HAProxy's configuration, whatever is in it."""
    return "'" + str(path).replace("'", "'\\''") + "'"
