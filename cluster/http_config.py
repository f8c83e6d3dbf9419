"""HttpConfig: what can be set about the HTTP server: who may use it, from where, how encrypted, and how much at once.

Its fields are flags of ``octavo serve`` as those of ServeConfig, which has them too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..worker.errors import ConfigurationError
from .config_fields import AbsolutePath, Count, Settings, Text
from .environment import default_api_keys
from .watch.tracing import check_tracing

_ALL = ("*",)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KEY = re.compile(r"[\x21-\x7e]{1,1024}")


def key_digest(key: str) -> str:
    """``sha256:…`` of an API key, or the digest itself. Raises ValueError, without the key in it."""
    if _DIGEST.fullmatch(key):
        return key
    if not _KEY.fullmatch(key):
        raise ValueError("must be 1 to 1024 visible ASCII characters without blanks")
    return digest(key)


def digest(key: str) -> str:
    """``sha256:…`` of whatever somebody sends as a key: unlike ``key_digest``, of a digest too."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _digests(keys: Sequence[str]) -> tuple[str, ...]:
    """Keys are known by their digests from here on, so that no plan, log or process of the cluster has one."""
    try:
        return tuple(dict.fromkeys(map(key_digest, keys)))
    except ValueError as error:
        raise PydanticCustomError("secret", "{rule}", {"rule": str(error)}) from None


def _listed(value: Any) -> Any:
    """Words of a flag given several times, or as a JSON list."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        return value
    return [word for given in words for word in _unpacked(given)]


def _unpacked(given: Any) -> list[Any]:
    if not (isinstance(given, str) and given.startswith("[")):
        return [given]
    try:
        return list(json.loads(given))
    except ValueError:
        raise PydanticCustomError("json_list", 'must be a word or a JSON list such as ["a", "b"]') from None


_WORD = {"type": "string", "minLength": 1}
_ONE_OR_MORE = WithJsonSchema({"anyOf": [_WORD, {"type": "array", "items": _WORD}]})
Words = Annotated[tuple[Text, ...], BeforeValidator(_listed), _ONE_OR_MORE]
Keys = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value), _ONE_OR_MORE
]


class HttpConfig(Settings):
    api_key: Annotated[Keys, AfterValidator(_digests)] = Field(
        default_factory=default_api_keys, validate_default=True, repr=False
    )
    """Key that clients send as "Authorization: Bearer KEY", or its digest as sha256:HEX; again for more keys. Everybody
    on this machine can read it in the list of processes: --api-key-file and OCTAVO_API_KEY do not show it. Default:
    OCTAVO_API_KEY, else no key is asked for."""
    api_key_file: AbsolutePath | None = None
    """File with further API keys, one a line; # at its start or after a blank begins a comment. It is read again when
    it changes."""

    ssl_certfile: AbsolutePath | None = None
    """File with the certificate, and those that it depends on, in PEM: the server speaks HTTPS."""
    ssl_keyfile: AbsolutePath | None = None
    """File with the certificate's private key in PEM, without a password. Default: it is in --ssl-certfile."""
    ssl_ca_certs: AbsolutePath | None = None
    """File with the certificates in PEM of those who vouch for clients: only clients with a certificate are served."""
    ssl_ciphers: Annotated[str, Field(pattern=r"^[A-Za-z0-9:+!@=_-]+$")] | None = None
    """Ciphers of TLS 1.2, as OpenSSL writes them. Default: OpenSSL's own choice; TLS 1.3 is not affected."""

    allowed_origins: Words = ()
    """Web pages that browsers may let use the API (CORS): origins such as https://chat.example, once for each or as a
    JSON list; * is any. Default: none."""
    allowed_methods: Words = _ALL
    """Methods that such pages may use."""
    allowed_headers: Words = _ALL
    """Headers that such pages may send."""
    allow_credentials: bool = False
    """Such pages may send cookies and client certificates."""

    max_body_bytes: Annotated[ByteSize, Field(ge=1024)] = ByteSize(32 * 2**20)
    """The largest body of a request, such as 32MiB."""
    max_concurrent_requests: Count | None = None
    """Requests that a gateway works on at once; further ones are refused with 429. Default: any number."""
    keepalive_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 10.0
    """Seconds without anything to send after which a stream gets a comment, so that no proxy gives it up; 0: never."""
    slow_client_timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = 60.0
    """Seconds after which a client is cut off that reads nothing of what is ready for it, or sends no more of a body
    that it began."""

    vllm_metric_names: bool = False
    """Give metrics by vLLM's names too, where they mean the same, for its dashboards and autoscalers."""
    log_requests: bool = False
    """Log the beginning of every request's prompt and output, which may be private. Default: neither is ever logged."""
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$")] | None = None
    """URL that takes OpenTelemetry spans of requests as OTLP over HTTP, such as http://collector:4318/v1/traces; needs
    the packages of octavo[otel]. Default: no spans."""

    def check_http(self) -> None:
        """Raises ConfigurationError for settings that are fine alone and do not go together, or lack a package."""
        if self.otlp_traces_endpoint is not None:
            check_tracing()
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigurationError(f"--{name.replace('_', '-')} says nothing without --ssl-certfile")
        if not self.allowed_origins:
            for name, is_set in (
                ("methods", self.allowed_methods != _ALL),
                ("headers", self.allowed_headers != _ALL),
            ):
                if is_set:
                    raise ConfigurationError(f"--allowed-{name} says nothing without --allowed-origins")
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ConfigurationError(
                "--allow-credentials needs --allowed-origins that names the origins: with * any web page could act in a"
                " visitor's name"
            )
