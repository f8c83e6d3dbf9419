"""HTTPS for ``octavo serve``: certificates and keys are judged before anything is started; ``front.py`` uses them."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..worker.errors import ConfigurationError
from ..worker.line_tls import leader_context
from .config import ServeConfig
from .environment import ray_tls


def check_tls(config: ServeConfig) -> None:
    """Raises ConfigurationError for certificates and keys that cannot be used, before anything is started: the API's,
    and those of Ray's own connections, which the token lines use too."""
    _check_lines()
    if config.ssl_certfile is None:
        return
    if config.address is not None:
        raise ConfigurationError(
            "--ssl-certfile: where a Ray is joined (--address), HTTPS is a matter of the Serve on it; start it with"
            " ssl_certfile and ssl_keyfile in its http_options"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    flag = "--ssl-keyfile" if config.ssl_keyfile else "--ssl-certfile"
    _pem_text("--ssl-certfile", config.ssl_certfile)
    key = config.ssl_keyfile or config.ssl_certfile
    if "ENCRYPTED" in _pem_text(flag, key):
        raise ConfigurationError(f"{flag}: {key} needs a password; give a key without one, readable by you alone")
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{flag}: {config.ssl_certfile} and its key cannot be used: {error}") from error
    _check_others(config, context)


def _check_lines() -> None:
    if (files := ray_tls()) is None:
        return
    try:
        leader_context(files)
    except OSError as error:
        paths = f"{files.certificate}, {files.key} and {files.authority}"
        raise ConfigurationError(f"RAY_USE_TLS is set, and {paths} cannot be used together: {error}") from error


def _check_others(config: ServeConfig, context: ssl.SSLContext) -> None:
    if config.ssl_ca_certs is not None:
        _pem_text("--ssl-ca-certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--ssl-ca-certs: {config.ssl_ca_certs} cannot be used: {error}") from error
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigurationError(f"--ssl-ciphers: OpenSSL knows none of {config.ssl_ciphers}") from error


def _pem_text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{flag}: {path} cannot be read: {error.strerror}") from error
