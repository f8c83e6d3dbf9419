"""Templates that requests bring: rendered in a process of their own, which is ended at the limit.

The sandbox keeps a template from everything but its own time and memory, and those one expression can use up; the
operating system bounds them. ``python -m octavo.cluster.api.chat.template_process`` reads a pickle of a source, a chat
and limits, and writes the outcome as JSON: what a stranger's program has had its hands on is not unpickled.
"""

from __future__ import annotations

import json
import logging
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable

from ....worker.errors import ConfigurationError, InvalidRequest
from ...environment import bare_environment
from .render import Chat, ChatRenderer, TemplateSource
from .template import RenderLimits

REQUESTS_LIMITS = RenderLimits(cpu_s=2.0, max_chars=2**24)
_CPU_S = 5
"""Of the whole process, its start included."""
_TIME_LIMIT_S = 20.0
_MAX_BYTES = 2**30

_LOGGER = logging.getLogger(__name__)


def render_untrusted(source: TemplateSource, chat: Chat, limits: RenderLimits = REQUESTS_LIMITS) -> str:
    """The prompt's text; blocks its thread for 20 s at the most. Raises InvalidRequest."""
    command = [sys.executable, "-P", "-m", f"{__package__}.template_process"]
    try:
        given = pickle.dumps((source, chat, limits))
        done = subprocess.run(command, input=given, capture_output=True, timeout=_TIME_LIMIT_S, env=bare_environment())
    except subprocess.TimeoutExpired:
        raise _refusal(f"it takes more than {_TIME_LIMIT_S:g} seconds") from None
    if done.returncode != 0:
        _LOGGER.warning("a request's chat template ended its process: %s %s", done.returncode, done.stderr[-2000:])
        raise _refusal("it takes more time or memory than the template of a request may")
    outcome = json.loads(done.stdout)
    if "text" in outcome:
        return str(outcome["text"])
    raise InvalidRequest(outcome["message"], param=outcome["param"])


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The request's chat template is refused: {reason}.", param="chat_template")


def main() -> None:
    _bound()
    source, chat, limits = pickle.load(sys.stdin.buffer)
    outcome = _outcome(lambda: ChatRenderer(source, limits=limits).render(chat))
    sys.stdout.write(json.dumps(outcome))


def _bound() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _outcome(render: Callable[[], str]) -> dict[str, str | None]:
    try:
        return {"text": render()}
    except InvalidRequest as error:
        param = "chat_template" if error.param == "messages" else error.param
        return {"message": str(error), "param": param}
    except ConfigurationError as error:
        return {"message": str(_refusal(str(error))), "param": "chat_template"}
    except MemoryError:
        return {"message": str(_refusal("it takes too much memory")), "param": "chat_template"}


if __name__ == "__main__":
    main()
