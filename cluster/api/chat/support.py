"""What a chat template can do, found out at the start: it is given small chats, which must be in what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .reasoning import THINK_MARKS, ReasoningForm, ReasoningParser
from .template import RenderLimitExceeded

ToolForm = Literal["hermes", "llama3_json", "mistral"]
"""The form in which a model calls tools."""
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""A template's text for messages and tools. Raises whatever the template does."""

_MARK, _ARGUMENT = "octavoprobe", "octavoargument"
_USER = {"role": "user", "content": "Hello"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "A letter"}}}
_TOOL = {"type": "function", "function": {"name": _MARK, "description": "Nothing", "parameters": _SCHEMA}}


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """Of one chat template, and of the model that it belongs to."""

    has_template: bool = False
    system: bool = False
    developer: bool = False
    """Else such messages become system messages."""
    tools: bool = False
    """It shows tools, calls and results, in a form whose calls we can read; else ``tool_prompts.py`` does."""
    parallel_calls: bool = False
    """It shows several calls of one message; else there is one at the most."""
    arguments_as_text: bool = False
    """It writes a call's arguments as they are given, so they are given as JSON text."""
    null_content: bool = False
    """A message that only has calls must have no content, not an empty one."""
    content_parts: bool = False
    """It takes a message's content as a list of parts only."""
    tool_form: ToolForm = "hermes"
    reasoning: ReasoningForm | None = None
    """How the model thinks before it answers; None: it does not."""
    documents: bool = False
    variables: frozenset[str] = frozenset()
    """What it reads beside messages and tools: what chat_template_kwargs may set."""

    def summary(self) -> str:
        """One line for the start of the server."""
        if not self.has_template:
            return "chat template: none"
        roles = [role for role in ("system", "developer") if getattr(self, role)]
        tools = f"tools {'shown by the template' if self.tools else 'described by Octavo'}, called in the form "
        thinks = f"reasoning split off in the form {self.reasoning}" if self.reasoning else "no reasoning"
        return f"chat template: roles {', '.join([*roles, 'user', 'assistant'])}; {tools}{self.tool_form}; {thinks}"


@dataclass(frozen=True, slots=True)
class Shape:
    """In what shape a template wants to be given messages."""

    arguments_as_text: bool
    null_content: bool


def shows(render: Render, messages: Sequence[Mapping[str, Any]], *marks: str, tools: bool = False) -> bool:
    """Whether the template takes the messages and writes all of ``marks``. Raises RenderLimitExceeded."""
    try:
        text = render(messages, [_TOOL] if tools else None)
    except RenderLimitExceeded:
        raise
    except Exception:  # a template is a program of the model's author; whatever it raises is its verdict
        return False
    return all(mark in text for mark in marks)


def shows_role(render: Render, role: str) -> bool:
    return shows(render, [{"role": role, "content": _MARK}, _USER], _MARK)


def wants_parts(render: Render) -> bool:
    return not shows_role(render, "user") and shows_role(in_parts(render), "user")


def in_parts(render: Render) -> Render:
    """The same for a template that takes content as a list of parts only."""
    return lambda messages, tools: render([with_parts(message) for message in messages], tools)


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def shape_of_calls(render: Render) -> Shape | None:
    """How calls and their results have to be given; None: tools, calls or results are not shown."""
    if not shows(render, [_USER], _MARK, tools=True):
        return None
    shapes = [Shape(text, null) for null in (False, True) for text in (False, True)]
    return next((shape for shape in shapes if shows_calls(render, shape, "a1b2c3d4e")), None)


def shows_calls(render: Render, shape: Shape, *call_ids: str) -> bool:
    """Whether one message's calls are shown, with their results."""
    marks = (_MARK, f'"{_ARGUMENT}"', *map(_result, call_ids))
    return shows(render, _chat_with_calls(shape, call_ids), *marks, tools=True)


def _result(call_id: str) -> str:
    return f"octavoresult{call_id}"


def _chat_with_calls(shape: Shape, call_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Mistral's templates want ids of nine letters and digits."""
    arguments: Any = f'{{"a": "{_ARGUMENT}"}}' if shape.arguments_as_text else {"a": _ARGUMENT}
    function = {"name": _MARK, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
    content = None if shape.null_content else ""
    results = [{"role": "tool", "content": _result(each), "tool_call_id": each, "name": _MARK} for each in call_ids]
    return [_USER, {"role": "assistant", "content": content, "tool_calls": calls}, *results]


def form_of_calls(source: str, added_tokens: frozenset[str]) -> ToolForm | None:
    """The form that a template's author had in mind; None for one that we have no parser for."""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source:
        return "hermes"
    if "<|python_tag|>" in source or "<|python_tag|>" in added_tokens:
        return "llama3_json"
    return None


def form_of_reasoning(parser: ReasoningParser, source: str, added_tokens: frozenset[str]) -> ReasoningForm | None:
    """What ``parser`` says; auto is the form whose last mark the template or the tokenizer knows."""
    match parser:
        case "none":
            return None
        case "auto":
            known = (
                form for form, marks in THINK_MARKS.items() if marks.close in source or marks.close in added_tokens
            )
            return next(known, None)
        case form:
            return form
