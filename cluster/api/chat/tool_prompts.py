"""Tools for chat templates that know none: described in a system message, in the Hermes form.

Calls and results of earlier turns are written in the same form, results as turns of the user, since no other role is
sure to be there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

Message = Mapping[str, Any]

_INSTRUCTIONS = """\
You can call functions. These are the functions, each a JSON object on a line of its own:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments between these tags:
<tool_call>
{{"name": "<name of the function>", "arguments": <object of its arguments>}}
</tool_call>
The result is given to you between <tool_response> and </tool_response>."""


def with_described_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, has_system_role: bool
) -> list[Message]:
    """Messages of the roles system, user and assistant that say what ``messages`` and ``tools`` do."""
    plain: list[Message] = []
    for is_result, group in groupby(messages, key=_is_result):
        turns = list(group)
        plain += [_results(turns)] if is_result else [_without_calls(turn) for turn in turns]
    return _described(plain, tools, "system" if has_system_role else "user") if tools else plain


def _described(messages: list[Message], tools: Sequence[Mapping[str, Any]], role: str) -> list[Message]:
    """The description at the end of the system message; without that role, before the first user's words."""
    text = _INSTRUCTIONS.format(tools="\n".join(map(_dumps, tools)))
    if not messages or messages[0]["role"] != role:
        return [{"role": role, "content": text}, *messages]
    first = messages[0]
    pieces = (first["content"], text) if role == "system" else (text, first["content"])
    return [{**first, "content": "\n\n".join(filter(None, pieces))}, *messages[1:]]


def _is_result(message: Message) -> bool:
    return bool(message["role"] == "tool")


def _without_calls(message: Message) -> Message:
    calls = message.get("tool_calls") or ()
    if not calls:
        return message
    written = [f"<tool_call>\n{_dumps(call['function'])}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, (message["content"], *written)))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _results(messages: Sequence[Message]) -> Message:
    written = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages]
    return {"role": "user", "content": "\n".join(written)}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
