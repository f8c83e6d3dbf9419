"""Which tools a prompt shows and which of them may be called, from ``tools``, ``tool_choice`` and parallel_tool_calls.

| tool_choice | the prompt shows | the output |
|---|---|---|
| auto (the default) | all tools | text, calls, or both; calls follow their schemas if a tool is strict |
| none | no tools, as at vLLM with ``--exclude-tools-when-tool-choice-none`` | text; nothing is taken for a call |
| required | all tools | one call or more, which follow their schemas |
| a function | all tools | one call of it, which follows its schema |
| allowed_tools | all tools | as auto or required, with those tools |

Where calls are forced, arguments follow ``parameters`` also without ``strict`` as far as such a schema can be enforced.
With parallel_tool_calls false, or a template that cannot show several calls of one message, there is one call at the
most: forced ones cannot be more, of others the first counts and the rest is dropped. A text that ends by itself and had
a call has the finish reason tool_calls, also with a function named; without one it is stop, and length if it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....worker.errors import InvalidRequest
from ..grammar.json_schema import check_schema
from ..request.chat_messages import AllowedTools, NamedTool, Tool, ToolChoice
from .grammars import CallableTool


@dataclass(frozen=True, slots=True)
class ChosenTools:
    shown: tuple[Tool, ...] = ()
    callable_: tuple[Tool, ...] = ()
    is_forced: bool = False
    """At least one call must be made."""
    at_most_one: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable_)

    @property
    def needs_grammar(self) -> bool:
        return self.is_forced or any(tool.function.strict for tool in self.callable_)

    def schemas(self, tools: Sequence[Tool]) -> list[CallableTool]:
        """The callable tools with the schemas that their arguments are to follow; ``tools`` gives errors their index.

        Raises InvalidRequest for a strict tool whose schema cannot be enforced.
        """
        return [self._schema(tool, tools.index(tool)) for tool in self.callable_]

    def _schema(self, tool: Tool, index: int) -> CallableTool:
        function = tool.function
        schema = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
        schema = {"type": "object", **schema}
        if not (function.strict or self.is_forced):
            return CallableTool(function.name, _ANY_OBJECT)
        try:
            check_schema(schema, f"tools[{index}].function.parameters")
        except InvalidRequest:
            if function.strict:
                raise
            return CallableTool(function.name, _ANY_OBJECT)
        return CallableTool(function.name, schema)


_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def choose(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ChosenTools:
    """Raises InvalidRequest for a choice of tools that there are not."""
    offered = tuple(tools or ())
    if not offered:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a tool, but the request has no tools.", param="tool_choice")
        return ChosenTools()
    at_most_one = parallel is False
    match choice:
        case "none":
            return ChosenTools()
        case None | "auto":
            return ChosenTools(offered, offered, at_most_one=at_most_one)
        case "required":
            return ChosenTools(offered, offered, is_forced=True, at_most_one=at_most_one)
        case NamedTool():
            return ChosenTools(offered, _named(offered, [choice]), is_forced=True, at_most_one=True)
        case AllowedTools():
            allowed = choice.allowed_tools
            return ChosenTools(offered, _named(offered, allowed.tools), allowed.mode == "required", at_most_one)


def _named(offered: Sequence[Tool], wanted: Sequence[NamedTool]) -> tuple[Tool, ...]:
    names = {tool.function.name for tool in wanted}
    if unknown := names - {tool.function.name for tool in offered}:
        raise InvalidRequest(f"tool_choice names {sorted(unknown)[0]!r}, which is not in tools.", param="tool_choice")
    return tuple(tool for tool in offered if tool.function.name in names)
