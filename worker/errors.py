"""The exceptions that Octavo raises for what its users did or met.

One place turns them into exit codes (``cluster/cli.py``) and one into HTTP answers (``cluster/api/errors.py``).
Anything else that escapes is a defect of ours and is answered with 500.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error with a message meant for the user."""


class ConfigurationError(OctavoError):
    """A flag, file, model or machine that cannot work; names the setting, its value and the limit."""


class InvalidRequest(OctavoError):
    """A request that can never be served; HTTP 400.

    ``param`` names the field of the request, ``code`` is OpenAI's machine-readable code where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output exceeds the context, or could never fit in the KV pool; HTTP 400."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFound(OctavoError):
    """The request names a model that this cluster does not serve; HTTP 404."""


class Overloaded(OctavoError):
    """The cluster is full; HTTP 429 with ``Retry-After: retry_after_s``. ``reason`` is the router's word for it."""

    def __init__(self, message: str, *, retry_after_s: float, reason: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class Unavailable(OctavoError):
    """No worker group can take the request at present; HTTP 503, otherwise as ``Overloaded``."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class GenerationFailed(OctavoError):
    """The engine could not finish a request that it had taken; HTTP 500, or an error event in a stream."""
