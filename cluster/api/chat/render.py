"""From a chat to the text of its prompt: what the template is given, and where the model goes on.

A chat's text is part of the prompt as it is. Text that spells a special token (``<|im_end|>``) becomes that token, as
in transformers and vLLM: whoever passes on strangers' words has to look for such spellings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from ....worker.errors import ConfigurationError, InvalidRequest
from .reasoning import ReasoningParser
from .support import (
    TemplateSupport,
    ToolForm,
    form_of_calls,
    form_of_reasoning,
    in_parts,
    shape_of_calls,
    shows_calls,
    shows_role,
    wants_parts,
    with_parts,
)
from .template import OPERATORS_LIMITS, ChatTemplate, RenderLimitExceeded, RenderLimits
from .tool_prompts import Message, with_described_tools

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""Variables with a field of their own, or of the rendering itself: not for chat_template_kwargs."""
_END = "\U000f0042"
"""Marks the end of the message to be continued. Private use: no template trims it."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a prompt is made of."""

    messages: Sequence[Message]
    """As ``ChatMessage.template_form`` gives them."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """chat_template_kwargs."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template, with what the tokenizer knows of it."""

    sources: Mapping[str, str]
    """By name; ``default``, and perhaps ``tool_use``, which is for chats with tools."""
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    """``bos_token`` and the like, which templates read."""
    added_tokens: frozenset[str] = frozenset()
    name: str = "the chat template"
    """What errors call it."""


class ChatRenderer:
    """One model's template. Any number of threads may use it.

    Raises ConfigurationError for a syntax error, for a ``tool_form`` that the template cannot have, and where it takes
    too long with the smallest chats.
    """

    def __init__(
        self,
        source: TemplateSource,
        *,
        tool_form: ToolForm | None = None,
        reasoning: ReasoningParser = "auto",
        limits: RenderLimits = OPERATORS_LIMITS,
    ) -> None:
        self._limits = limits
        try:
            self._templates = {name: ChatTemplate(text) for name, text in source.sources.items()}
        except jinja2.TemplateSyntaxError as error:
            message = f"{source.name} has a syntax error in line {error.lineno}: {error.message}"
            raise ConfigurationError(message) from error
        if "default" not in self._templates:
            message = f"{source.name} has none of the name default, only {', '.join(sorted(self._templates))}"
            raise ConfigurationError(message)
        self._special_tokens = {key: value for key, value in source.special_tokens.items() if key not in RESERVED}
        try:
            self.support = self._find_support(source, tool_form, reasoning)
        except RenderLimitExceeded as error:
            raise ConfigurationError(f"{source.name} cannot be used: {error}") from error

    def render(self, chat: Chat) -> str:
        """The prompt's text. Raises InvalidRequest, which names the field."""
        _check_continuation(chat)
        self._check_variables(chat.variables)
        messages = self._fitted(_with_mark(chat.messages) if chat.continue_final_message else chat.messages, chat.tools)
        tools = chat.tools if self.support.tools else None
        variables = {"documents": chat.documents, **chat.variables}
        try:
            text = self._write(messages, tools, add_generation_prompt=chat.add_generation_prompt, **variables)
        except Exception as error:  # a template is a program of the model's author; whatever it raises is its verdict
            message = f"The chat template rejects this conversation: {str(error) or type(error).__name__}"
            raise InvalidRequest(message, param="messages") from error
        return _up_to_mark(text) if chat.continue_final_message else text

    def _write(self, messages: Sequence[Message], tools: Sequence[Any] | None, **variables: Any) -> str:
        speaks_of_tools = tools or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        template = self._templates.get("tool_use" if speaks_of_tools else "default", self._templates["default"])
        given = {**self._special_tokens, "tools": tools or None, "add_generation_prompt": False, **variables}
        return template.render({**given, "messages": messages}, self._limits)

    def _find_support(
        self, source: TemplateSource, tool_form: ToolForm | None, reasoning: ReasoningParser
    ) -> TemplateSupport:
        all_sources = "\n".join(source.sources.values())
        form = tool_form or form_of_calls(all_sources, source.added_tokens)
        parts = wants_parts(self._write)
        render = in_parts(self._write) if parts else self._write
        shape = shape_of_calls(render)
        if tool_form not in (None, "hermes") and shape is None:
            raise ConfigurationError(
                f"--tool-call-parser: {tool_form}, but {source.name} shows no tools: Octavo describes them itself "
                "then, in the form hermes"
            )
        native = shape is not None and form is not None
        variables = frozenset().union(*(template.variables for template in self._templates.values()))
        return TemplateSupport(
            has_template=True,
            system=shows_role(render, "system"),
            developer="developer" in all_sources and shows_role(render, "developer"),
            tools=native,
            parallel_calls=not native or (shape is not None and shows_calls(render, shape, "a1b2c3d4e", "f5g6h7i8j")),
            arguments_as_text=shape is not None and shape.arguments_as_text,
            null_content=shape is not None and shape.null_content,
            content_parts=parts,
            tool_form=form if native and form else "hermes",
            reasoning=form_of_reasoning(reasoning, all_sources, source.added_tokens),
            documents="documents" in variables,
            variables=variables - RESERVED - set(self._special_tokens),
        )

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name not in self.support.variables:
                known = ", ".join(sorted(self.support.variables)) or "no variables"
                raise InvalidRequest(
                    f"chat_template_kwargs sets variables of the chat template, which reads {known}.",
                    param="chat_template_kwargs",
                )

    def _fitted(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
        """The messages in the shape that the template takes."""
        support = self.support
        if not support.developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if not support.system and any(m["role"] == "system" for m in messages):
            message = "The chat template has no role for system messages: put them into the user's."
            raise InvalidRequest(message, param="messages")
        if not support.tools:
            messages = with_described_tools(messages, tools, has_system_role=support.system)
        return [self._fitted_message(message) for message in _with_names(messages)]

    def _fitted_message(self, message: Message) -> Message:
        fitted = dict(message)
        calls = message.get("tool_calls")
        if calls and self.support.arguments_as_text:
            fitted["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if "reasoning_content" in message:
            fitted["reasoning"] = fitted["thinking"] = message["reasoning_content"]
        if calls and not message["content"] and self.support.null_content:
            fitted["content"] = None
        elif self.support.content_parts:
            return with_parts(fitted)
        return fitted


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Results of tools with the tool's name, which OpenAI's messages do not have, and some templates demand."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call["id"]: call["function"]["name"] for call in calls}
    return [{"name": names[id_], **m} if (id_ := m.get("tool_call_id")) in names else m for m in messages]


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _check_continuation(chat: Chat) -> None:
    if not chat.continue_final_message:
        return
    if chat.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on in the last message, add_generation_prompt begins a new one: only one of "
            "them can be true.",
            param="continue_final_message",
        )
    last = chat.messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message is true, but the last message is not text of the role assistant.",
            param="continue_final_message",
        )


def _with_mark(messages: Sequence[Message]) -> list[Message]:
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]


def _up_to_mark(text: str) -> str:
    """The text up to the end of the message that is continued; its white space is as it was sent."""
    before, mark, _ = text.rpartition(_END)
    if not mark:
        message = "The chat template does not show the last message as it is, so it cannot be continued."
        raise InvalidRequest(message, param="continue_final_message")
    return before
