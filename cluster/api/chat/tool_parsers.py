"""Tool calls in a model's text, in the three forms that most open models were trained on.

| form | a call |
|---|---|
| hermes | ``<tool_call>``, ``{"name": …, "arguments": {…}}``, ``</tool_call>``: Hermes, Qwen; models without a form |
| llama3_json | ``{"name": …, "parameters": {…}}``, all of the text; ``<|python_tag|>`` may precede, more follow ``;`` |
| mistral | ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` for each |

A call is given when its name, which must be that of a tool of the request, and the beginning of its arguments are
known; from then on its arguments are given as they come. Until then it may turn out to be no call: then it is content,
as it is. A call that stops being JSON half-way stays as it was given, and the rest is content. White space around calls
is dropped.

At the end of the text a call that could not be given yet is
* dropped where a limit has cut the text behind the call's mark, or behind another call: it would be markup, which
  clients show, and nothing that anybody could read;
* content, as it is, where the text ended by itself, or was cut in what could have become the first mark, or plain text.
Where calls are forced the text is nothing but calls, so that whatever is not given as a call is dropped.
"""

from __future__ import annotations

import re

from .call_reader import BareCall
from .marks import Marks
from .tool_parser import OfferedTools, ToolParser, mistral_call_id

_MAX_HEAD_CHARS = 256
"""Of a name with its id in Mistral's newer form; what is longer is no call."""


class HermesParser(ToolParser):
    """``<tool_call>`` … ``</tool_call>`` anywhere in the text; the end may be missing."""

    TAG, END = "<tool_call>", "</tool_call>"
    _marks = Marks([TAG])

    def _begin(self) -> bool:
        return self._find_mark(self._marks, self._opened)

    def _opened(self) -> bool:
        self._skip_blank()
        if not self._text:
            return False
        return self._object_call(is_marked=True) if self._text[0] == "{" else self._no_call(self._begin)

    def _after_call(self) -> bool:
        """The end of the tag, or another call in the same one."""
        rest = self._text.lstrip()
        if self.END.startswith(rest):
            if rest != self.END:
                return False
        elif rest[0] == "{":
            self._text = rest
            return self._object_call(is_marked=True)
        self._text = rest.removeprefix(self.END) if rest.startswith(self.END) else self._text
        self._state = self._begin
        return True


class Llama3JsonParser(ToolParser):
    """Calls are all of the text, or none of it is: an answer that happens to be JSON has other members or names."""

    TAG = "<|python_tag|>"
    _between = re.compile(r"[\s;]*")

    def _begin(self) -> bool:
        self._skip_blank()
        if self._text != self.TAG and self.TAG.startswith(self._text):
            return False
        if self._text.startswith(self.TAG):
            self._prefix += self.TAG
            self._text = self._text.removeprefix(self.TAG)
            self._state = self._opened
            return True
        return self._opened()

    def _opened(self) -> bool:
        self._skip_blank()
        if not self._text:
            return False
        return self._object_call(is_marked=False) if self._text[0] == "{" else self._no_call(self._plain)

    def _after_call(self) -> bool:
        found = self._between.match(self._text)
        self._text = self._text[found.end() if found else 0 :]
        if not self._text:
            return False
        if self._text[0] == "{":
            return self._object_call(is_marked=False)
        self._state = self._plain
        return True

    def _after_failure(self) -> bool:
        self._state = self._plain
        return True


class MistralParser(ToolParser):
    """``[TOOL_CALLS]`` anywhere in the text: one with a list of calls, or one before each call."""

    TAG, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    new_id = staticmethod(mistral_call_id)
    _marks = Marks([TAG])
    _head = re.compile(r"\s*([A-Za-z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]*\s*)?(?:\[ARGS\]\s*)?")

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._in_list = False

    def _begin(self) -> bool:
        self._in_list = False
        return self._find_mark(self._marks, self._opened)

    def _opened(self) -> bool:
        self._skip_blank()
        if not self._text:
            return False
        if self._text[0] in "[{":
            self._in_list = self._text[0] == "["
            self._prefix += "[" if self._in_list else ""
            self._text = self._text.removeprefix("[")
            self._state = self._item
        else:
            self._state = self._named
        return True

    def _item(self) -> bool:
        self._skip_blank()
        if not self._text:
            return False
        return self._object_call(is_marked=True) if self._text[0] == "{" else self._no_call(self._begin)

    def _named(self) -> bool:
        """The name of a call, up to where its arguments begin."""
        brace = self._text.find("{", 0, _MAX_HEAD_CHARS)
        if brace < 0:
            return len(self._text) >= _MAX_HEAD_CHARS and self._no_call(self._begin)
        found = self._head.fullmatch(self._text, 0, brace)
        if found is None or found.group(1) not in self._tools.names:
            return self._no_call(self._begin)
        self._prefix += self._text[:brace]
        self._text = self._text[brace:]
        return self._start_call(BareCall(found.group(1)))

    def _after_call(self) -> bool:
        rest = self._text.lstrip()
        if not self._in_list:
            self._state = self._begin
            return True
        if not rest:
            return False
        if rest[0] == ",":
            self._text, self._state = rest[1:], self._item
            return True
        self._text = rest[1:] if rest[0] == "]" else self._text
        self._state = self._begin
        return True
