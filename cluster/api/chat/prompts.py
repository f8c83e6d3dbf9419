"""The chat templates of a server: the model's own or the operator's, and requests' own where that is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ....worker.errors import InvalidRequest
from .reasoning import ReasoningParser
from .render import Chat, ChatRenderer, TemplateSource
from .support import TemplateSupport, ToolForm, form_of_reasoning
from .template_process import render_untrusted


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The operator's flags."""

    trust_request_chat_template: bool = False
    tool_call_parser: Literal["auto"] | ToolForm = "auto"
    reasoning_parser: ReasoningParser = "auto"


DEFAULT_OPTIONS = ChatOptions()


class ChatPrompts:
    """Prompts as text. Any number of threads may use it. Raises ConfigurationError as ``ChatRenderer`` does."""

    def __init__(self, source: TemplateSource | None, options: ChatOptions) -> None:
        self._source = source
        self._trusts_requests = options.trust_request_chat_template
        form: ToolForm | None = None if options.tool_call_parser == "auto" else options.tool_call_parser
        reasoning = options.reasoning_parser
        self._own = ChatRenderer(source, tool_form=form, reasoning=reasoning) if source and source.sources else None
        self.support = self._own.support if self._own else _without_template(reasoning)

    def text(self, chat: Chat) -> str:
        """Raises InvalidRequest when there is no template, or when it rejects the chat."""
        if self._own is None:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        return self._own.render(chat)

    def text_by(self, template: str, chat: Chat) -> str:
        """By a request's own template; blocks its thread for seconds at the most. Raises InvalidRequest."""
        if not self._trusts_requests:
            raise InvalidRequest(
                "A chat template is a program: this server runs its own only, and was not started with "
                "--trust-request-chat-template.",
                param="chat_template",
                code="unsupported_value",
            )
        known = self._source or TemplateSource({})
        return render_untrusted(TemplateSource({"default": template}, known.special_tokens, known.added_tokens), chat)


def _without_template(reasoning: ReasoningParser) -> TemplateSupport:
    return TemplateSupport(reasoning=form_of_reasoning(reasoning, "", frozenset()))
