"""The schemas of chats: messages, tools and the choice between them; and what a chat template sees of a message.

| role | content | beside it |
|---|---|---|
| system, developer, user | text, or a list of text parts | name |
| assistant | the same; may be null or left out beside tool_calls | name, tool_calls, reasoning_content (or reasoning) |
| tool | the same: what the call gave | tool_call_id, required; name |

The role function, functions and function_call are OpenAI's older words for tools, and are refused with the newer one.

An answer may be sent back as OpenAI's client gives it: its helpers ``parse`` and ``stream`` put ``parsed``,
``parsed_arguments`` and ``index`` into a message, which say again what is beside them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from .fields import Body, Content, Identifier, only

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""Of one message."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _no_function_role(role: Any) -> Any:
    if role == "function":
        raise PydanticCustomError("unsupported", "the role 'function' is deprecated, use 'tool' with tool_call_id")
    return role


def _json_object(text: str) -> str:
    parsed_arguments(text)
    return text


def parsed_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as the object that chat templates take; no text is no arguments."""
    try:
        value = json.loads(text, parse_constant=_no_constant) if text.strip() else {}
    except (ValueError, RecursionError):
        raise PydanticCustomError("value", "it must be the JSON text of an object") from None
    if not isinstance(value, dict):
        raise PydanticCustomError("value", "it must be the JSON text of an object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class CalledFunction(Body):
    name: FunctionName
    arguments: Annotated[str, AfterValidator(_json_object)]
    parsed_arguments: Any = None


class ToolCall(Body):
    """A call that an earlier answer has made."""

    id: Identifier
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def template_form(self) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves, so they get the object."""
        arguments = parsed_arguments(self.function.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Body):
    """One turn of a chat."""

    role: Annotated[Role, BeforeValidator(_no_function_role)]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    content: Annotated[Content | None, Field(validate_default=True)] = None
    tool_call_id: Annotated[Identifier | None, Field(validate_default=True)] = None
    name: Identifier | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of it."""
    refusal: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[Any, only()] = None
    parsed: Any = None

    @field_validator("tool_calls", "reasoning_content", "reasoning")
    @classmethod
    def _only_of_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("value", "only messages of the role 'assistant' have it")
        return value

    @field_validator("content")
    @classmethod
    def _content_is_there(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and "role" in info.data and "tool_calls" in info.data and not info.data["tool_calls"]:
            raise PydanticCustomError("missing", "it is required")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _of_tools(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role")
        if value is None and role == "tool":
            raise PydanticCustomError("missing", "messages of the role 'tool' have it")
        if value is not None and role not in ("tool", None):
            raise PydanticCustomError("value", "only messages of the role 'tool' have it")
        return value

    def text(self) -> str:
        """Parts are joined by line breaks, as vLLM does for templates that take a string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def template_form(self) -> dict[str, Any]:
        """The message as chat templates take it: without what is not there, the content one string."""
        message: dict[str, Any] = {"role": self.role, "content": self.text()}
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": reasoning}
        message |= {key: value for key, value in optional.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.template_form() for call in self.tool_calls]
        return message


class Function(Body):
    """What a tool does; ``parameters`` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """The arguments follow the schema whenever the tool is called."""

    @field_validator("parameters")
    @classmethod
    def _describes_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type", "object") != "object":
            raise PydanticCustomError("value", "arguments are an object, so the schema's type must be 'object'")
        return value


class Tool(Body):
    type: Literal["function"]
    function: Function

    def template_form(self) -> dict[str, Any]:
        """The tool as chat templates take it: without ``strict``, and with all that some of them demand."""
        function = self.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        shown = {"name": function.name, "description": function.description or "", "parameters": parameters}
        return {"type": "function", "function": shown}


def _unique_names(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise PydanticCustomError("value", "two tools have the same name")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_unique_names)]
"""An empty list is the same as none."""


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    """``{"type": "function", "function": {"name": …}}``"""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolsList(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """The prompt shows all tools, which keeps it in the prefix cache; called are only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsList


def _kind_of_choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None and not isinstance(value, dict):
        return "<word>"
    return "<allowed>" if kind == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(_kind_of_choice),
]
