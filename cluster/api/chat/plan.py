"""From a chat's fields to what is generated and how its text is understood: the one place that knows both sides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ....worker.errors import InvalidRequest
from ..answer.message import MessageParser, PlainMessage
from ..grammar.structured import FieldGrammar
from ..request.chat_messages import ChatMessage, Tool, ToolChoice
from ..text.processor import TextProcessor
from .choice import ChosenTools, choose
from .grammars import after_reasoning, calls_in, either
from .marks import Marks, WithoutMarks
from .reasoning import (
    THINK,
    THINK_MARKS,
    ReasoningTokens,
    Thinking,
    ThinkMarks,
    ThinkParser,
    thinking_after,
    thinking_within,
)
from .render import Chat
from .support import TemplateSupport, ToolForm
from .tool_parser import OfferedTools, ToolParser
from .tool_parsers import HermesParser, Llama3JsonParser, MistralParser

_PARSERS: dict[ToolForm, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
_MISTRAL_MARKS = (MistralParser.TAG, MistralParser.ARGS, MistralParser.CALL_ID)


class ChatFields(Protocol):
    """The fields of a chat's body that matter here; None is a field that was left out."""

    @property
    def messages(self) -> Sequence[ChatMessage]: ...
    @property
    def tools(self) -> Sequence[Tool] | None: ...
    @property
    def tool_choice(self) -> ToolChoice | None: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def documents(self) -> list[dict[str, Any]] | None: ...
    @property
    def include_reasoning(self) -> bool | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def skip_special_tokens(self) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class ParserRecipe:
    """Makes the parser of one choice. Can be pickled."""

    form: ToolForm = "hermes"
    tools: OfferedTools | None = None
    thinking: Thinking = Thinking.OVER
    think_marks: ThinkMarks = THINK
    show_reasoning: bool = True
    hidden: Marks | None = None
    """Special tokens that are shown only because some of them are looked for."""

    def __call__(self) -> MessageParser:
        parser: MessageParser = PlainMessage() if self.tools is None else _PARSERS[self.form](self.tools)
        if self.thinking is not Thinking.OVER:
            is_open = self.thinking is Thinking.OPEN
            parser = ThinkParser(parser, is_open=is_open, show=self.show_reasoning, marks=self.think_marks)
        return parser if self.hidden is None else WithoutMarks(self.hidden, parser)

    def reasoning_tokens(self) -> ReasoningTokens:
        return ReasoningTokens(is_open=self.thinking is Thinking.OPEN, hidden=self.hidden, marks=self.think_marks)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    prompt_token_ids: list[int]
    message_parser: Callable[[], MessageParser]
    skip_special_tokens: bool
    """How the output's tokens become the text that ``message_parser`` takes."""
    grammar: FieldGrammar | None = None
    """What the output must follow; not compiled yet, see ``StructuredOutputs.check``."""
    reasoning_tokens: Callable[[], ReasoningTokens] | None = None
    """Where there may be reasoning."""


async def plan_chat(
    text: TextProcessor, fields: ChatFields, *, max_tokens: int | None, answer_grammar: FieldGrammar | None = None
) -> ChatPlan:
    """``max_tokens``: of the prompt. ``answer_grammar``: what response_format and the like say of the content, judged
    before; calls do not follow it, and where calls are forced there is no content.

    Raises InvalidRequest, which names the field, and ContextLengthExceeded.
    """
    support = text.template_support
    chosen = choose(fields.tools, fields.tool_choice, support.parallel_calls and fields.parallel_tool_calls)
    chat = _chat(fields, chosen, support)
    prompt = await text.chat_prompt(chat, max_tokens=max_tokens, chat_template=fields.chat_template)
    thinking = _thinking(chat, prompt.text, support)
    recipe, skips = _parser(text, fields, chosen, thinking)
    grammar = answer_grammar
    if chosen.callable_ and (chosen.needs_grammar or answer_grammar is not None):
        grammar = await text.in_thread(lambda: _grammar(text, fields, chosen, answer_grammar))
    if grammar is not None:
        spoken = after_reasoning(grammar.text, thinking, recipe.think_marks, text.special_tokens)
        grammar = replace(grammar, text=spoken)
    parser = PlainMessage if recipe == ParserRecipe() else recipe
    reasoning_tokens = None if thinking is Thinking.OVER else recipe.reasoning_tokens
    return ChatPlan(prompt.token_ids, parser, skips, grammar, reasoning_tokens)


def _chat(fields: ChatFields, chosen: ChosenTools, support: TemplateSupport) -> Chat:
    continues = bool(fields.continue_final_message)
    if fields.documents and not support.documents and fields.chat_template is None:
        raise InvalidRequest("The chat template does not read documents.", param="documents")
    return Chat(
        [message.template_form() for message in fields.messages],
        [tool.template_form() for tool in chosen.shown] or None,
        fields.documents or None,
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        variables={**_effort(fields, support), **(fields.chat_template_kwargs or {})},
    )


def _effort(fields: ChatFields, support: TemplateSupport) -> dict[str, Any]:
    """reasoning_effort in the template's own words: a variable of that name, or one that switches thinking."""
    effort = fields.reasoning_effort
    if effort is None:
        return {}
    if fields.chat_template is not None:
        message = "The request brings its own chat_template: say it in chat_template_kwargs."
        raise InvalidRequest(message, param="reasoning_effort")
    if "reasoning_effort" in support.variables:
        return {"reasoning_effort": effort}
    if "enable_thinking" in support.variables:
        return {"enable_thinking": effort != "none"}
    if effort == "none" and not support.reasoning:
        return {}
    raise InvalidRequest("The chat template has no setting for it.", param="reasoning_effort")


@functools.lru_cache(maxsize=8)
def _marks(names: frozenset[str]) -> Marks:
    """A model has hundreds of special tokens, and their automaton takes a part of a second."""
    return Marks(names)


def _thinking(chat: Chat, prompt: str, support: TemplateSupport) -> Thinking:
    if support.reasoning is None:
        return Thinking.OVER
    marks = THINK_MARKS[support.reasoning]
    if chat.continue_final_message:
        return thinking_within(chat.messages[-1]["content"], marks)
    return thinking_after(prompt, marks)


def _parser(
    text: TextProcessor, fields: ChatFields, chosen: ChosenTools, thinking: Thinking
) -> tuple[ParserRecipe, bool]:
    """The parser, and whether special tokens are left out of its text."""
    form, think_marks = text.template_support.tool_form, THINK_MARKS[text.template_support.reasoning or "think"]
    max_calls = 1 if chosen.at_most_one else None
    offered = OfferedTools(chosen.names, max_calls, chosen.is_forced) if chosen.callable_ else None
    looked_for = {think_marks.open, think_marks.close} if thinking is not Thinking.OVER else set()
    looked_for |= set(_MISTRAL_MARKS) if offered and form == "mistral" else set()
    wants_special = fields.skip_special_tokens is False
    shows_special = wants_special or any(mark in text.special_tokens for mark in looked_for)
    hidden = _marks(frozenset(text.special_tokens.keys() - looked_for)) if shows_special and not wants_special else None
    show_reasoning = fields.include_reasoning is not False
    return ParserRecipe(form, offered, thinking, think_marks, show_reasoning, hidden), not shows_special


def _grammar(
    text: TextProcessor, fields: ChatFields, chosen: ChosenTools, answer_grammar: FieldGrammar | None
) -> FieldGrammar:
    """Forced calls; or calls that follow their schemas, beside free text or an answer in the form asked for."""
    is_free = not chosen.is_forced and answer_grammar is None
    calls = calls_in(
        text.template_support.tool_form,
        chosen.schemas(fields.tools or ()),
        text.special_tokens,
        at_most_one=chosen.at_most_one,
        text_before=is_free,
    )
    if answer_grammar is not None and not chosen.is_forced:
        calls = either(calls, answer_grammar.text)
    return FieldGrammar(calls, "tools")
