"""From a chat's fields to its prompt, its grammar and its parser: what is honoured, and what is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from octavo.cluster.api.answer.message import MessageDelta, PlainMessage
from octavo.cluster.api.chat.grammars import CallableTool, after_reasoning, calls_in, either
from octavo.cluster.api.chat.plan import ChatPlan, plan_chat
from octavo.cluster.api.chat.reasoning import MISTRAL, Thinking
from octavo.cluster.api.errors import describe
from octavo.cluster.api.grammar.schema_grammar import grammar_of_schema
from octavo.cluster.api.grammar.structured import FieldGrammar
from octavo.cluster.api.request.chat_messages import ChatMessage, Tool, ToolChoice, Tools
from octavo.cluster.api.request.fields import Body
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import InvalidRequest
from octavo.worker.grammar import GrammarCompiler

IM_END, A_SPECIAL, ANOTHER_SPECIAL = 2, 4, 5
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
ADD = {"type": "function", "function": {"name": "add"}}
NAMED = {"type": "function", "function": {"name": "add"}}
WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
WRONG_CALL = WEATHER_CALL.replace("city", "town")


class Chat(Body):
    """The fields of a body that a plan is made from."""

    messages: list[ChatMessage]
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    skip_special_tokens: bool | None = None


HI = {"role": "user", "content": "Hi"}


async def plan(text: TextProcessor, answer_grammar: FieldGrammar | None = None, **fields: Any) -> ChatPlan:
    body = Chat.model_validate({"messages": [HI], **fields})
    return await plan_chat(text, body, max_tokens=8192, answer_grammar=answer_grammar)


Accepts = Callable[[str | FieldGrammar | None, str], bool]


@pytest.fixture(scope="module")
def accepts(model_dir: Path, text: TextProcessor) -> Accepts:
    """Whether an output may follow a grammar to its end. ``{4}`` in the output is the special token 4."""
    compiler = GrammarCompiler.of_model(model_dir, text.vocab_size)
    names = {token_id: name for name, token_id in text.special_tokens.items()}

    def judge(grammar: str | FieldGrammar | None, output: str) -> bool:
        assert grammar is not None
        grammar = grammar.text if isinstance(grammar, FieldGrammar) else grammar
        for token_id in (A_SPECIAL, ANOTHER_SPECIAL):
            output = output.replace(f"{{{token_id}}}", names[token_id])
        matcher, row = compiler.matcher(grammar, (IM_END,)), np.zeros(text.vocab_size // 32, np.int32)
        for token_id in (*text._backend.encode(output, add_special_tokens=False).ids, IM_END):
            matcher.fill_mask(row)
            if not row[token_id >> 5] >> (token_id & 31) & 1:
                return False
            matcher.accept(token_id)
        return True

    return judge


@pytest.mark.parametrize(
    ("fields", "allowed", "forbidden"),
    [
        ({"tool_choice": "required"}, [WEATHER_CALL, f"{ADD_CALL}\n{WEATHER_CALL}"], ["", "Hi", WRONG_CALL]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [ADD_CALL], [f"{ADD_CALL}\n{ADD_CALL}"]),
        ({"tool_choice": NAMED}, [ADD_CALL], [WEATHER_CALL, f"{ADD_CALL}\n{ADD_CALL}", ""]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            [ADD_CALL, f"{ADD_CALL}\n{ADD_CALL}"],
            [WEATHER_CALL],
        ),
        ({"tools": [STRICT, ADD]}, ["", "Hi", WEATHER_CALL, f"Hi\n{ADD_CALL}"], [WRONG_CALL, "<tool_call>Hi"]),
    ],
)
async def test_forced_and_strict_calls_follow_their_schemas(
    text: TextProcessor, accepts: Accepts, fields: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    made = await plan(text, **{"tools": [WEATHER, ADD], **fields})
    assert [output for output in allowed if not accepts(made.grammar, output)] == []
    assert [output for output in forbidden if accepts(made.grammar, output)] == []


async def test_an_answer_in_a_form_or_a_call(text: TextProcessor, accepts: Accepts) -> None:
    """response_format beside tools: the content follows it, calls need not. An error names the field that is to blame,
    and tools where there are two."""
    answer = FieldGrammar(grammar_of_schema(CITY), "guided_json")
    made = await plan(text, answer, tools=[WEATHER, ADD])
    assert [accepts(made.grammar, output) for output in (ADD_CALL, '{"city": "Rome"}', "Hi")] == [True, True, False]
    assert made.grammar is not None
    assert made.grammar.field == "tools"
    assert (await plan(text, answer)).grammar == answer
    assert not accepts((await plan(text, answer, tools=[ADD], tool_choice="required")).grammar, '{"city": "Rome"}')


TOOL = CallableTool("add", {"type": "object"})
LLAMA_CALL, MISTRAL_CALL = '{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "arguments": {"a": 1}}'
SPECIAL = {"[TOOL_CALLS]": A_SPECIAL, "[ARGS]": ANOTHER_SPECIAL}


@pytest.mark.parametrize(
    ("form", "special", "free", "allowed", "forbidden"),
    [
        ("llama3_json", {}, False, [LLAMA_CALL, f"{LLAMA_CALL}; {LLAMA_CALL}"], ["Hi", ""]),
        ("llama3_json", {}, True, [LLAMA_CALL, "Hi {", ""], ["{", '{"name": "x"}']),
        ("mistral", {"[TOOL_CALLS]": A_SPECIAL}, False, [f"{{4}}[{MISTRAL_CALL}, {MISTRAL_CALL}]"], ["{4}", "Hi"]),
        ("mistral", {"[TOOL_CALLS]": A_SPECIAL}, True, [f"Hi{{4}}[{MISTRAL_CALL}]", "Hi"], ["Hi{4}"]),
        ("mistral", SPECIAL, False, ['{4}add{5}{"a": 1}{4}add{5}{}'], ["Hi", "{4}add{}", "{4}sub{5}{}"]),
        ("mistral", SPECIAL, True, ["Hi{4}add{5}{}", "Hi", ""], ["Hi{4}"]),
    ],
)
def test_forced_calls_are_in_the_model_s_form(
    accepts: Accepts, form: Any, special: dict[str, int], free: bool, allowed: list[str], forbidden: list[str]
) -> None:
    grammar = calls_in(form, [TOOL], special, at_most_one=False, text_before=free)
    assert [output for output in allowed if not accepts(grammar, output)] == []
    assert [output for output in forbidden if accepts(grammar, output)] == []


def test_grammars_begin_where_reasoning_is_over(accepts: Accepts) -> None:
    calls = calls_in("hermes", [TOOL], {}, at_most_one=True)
    both = either(calls, grammar_of_schema(CITY))
    for grammar, answers in ((calls, [ADD_CALL]), (both, [ADD_CALL, '{"city": "Rome"}'])):
        still_open, possible = (after_reasoning(grammar, t) for t in (Thinking.OPEN, Thinking.POSSIBLE))
        assert after_reasoning(grammar, Thinking.OVER) == grammar
        for answer in answers:
            assert accepts(still_open, f"Hm.\n</think>\n\n{answer}")
            assert accepts(possible, f"<think>Hm.</think>{answer}")
            assert accepts(possible, answer)
            assert not accepts(still_open, answer)
            assert not accepts(possible, f"Hm.{answer}")


def test_marks_that_are_special_tokens_are_not_spelled(accepts: Accepts) -> None:
    special = {"[THINK]": A_SPECIAL, "[/THINK]": ANOTHER_SPECIAL}
    still_open, possible = (
        after_reasoning(grammar_of_schema(CITY), t, MISTRAL, special) for t in (Thinking.OPEN, Thinking.POSSIBLE)
    )
    answer = '{"city": "Rome"}'
    allowed = [f"Hm.\n{{5}}\n{answer}", f"{{5}}{answer}"]
    assert [output for output in allowed if not accepts(still_open, output)] == []
    assert [output for output in allowed if not accepts(possible, f"{{4}}{output}")] == []
    assert accepts(possible, answer)
    forbidden = [answer, f"Hm.{answer}", f"Hm.[/THINK]{answer}"]
    assert [output for output in forbidden if accepts(still_open, output)] == []


async def test_without_tools_all_text_is_content(text: TextProcessor) -> None:
    for fields in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}, {"tool_choice": "auto"}):
        made = await plan(text, **fields)
        assert made.prompt_token_ids == await text.render_chat([HI], max_tokens=99)
        assert (made.message_parser, made.skip_special_tokens, made.grammar) == (PlainMessage, True, None)


async def test_tools_are_shown_and_their_calls_understood(text: TextProcessor) -> None:
    made = pickle.loads(pickle.dumps(await plan(text, tools=[WEATHER, ADD])))
    prompt = text.decode(made.prompt_token_ids)
    assert json.dumps({"type": "function", "function": WEATHER["function"]}) in prompt
    parser = made.message_parser()
    given: MessageDelta = parser.push(WEATHER_CALL) + parser.finish(is_cut=False)
    assert [(call.name, call.arguments) for call in given.tool_calls] == [("get_weather", '{"city": "Rome"}')]
    assert (made.grammar, made.skip_special_tokens) == (None, True)


async def test_only_allowed_tools_are_calls(text: TextProcessor) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    made = await plan(text, tools=[WEATHER, ADD], tool_choice=allowed)
    assert made.prompt_token_ids == (await plan(text, tools=[WEATHER, ADD])).prompt_token_ids
    assert made.message_parser().push(WEATHER_CALL + ".").content == WEATHER_CALL + "."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"documents": [{"title": "x", "text": "y"}]}, "documents"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_case_bug_063_what_cannot_be_done_is_refused_by_name(
    text: TextProcessor, fields: dict[str, Any], param: str
) -> None:
    """With BUG-019 (templates of requests) and BUG-056 (continued messages)."""
    with pytest.raises(InvalidRequest) as caught:
        await plan(text, **fields)
    assert caught.value.param == param


async def test_a_strict_schema_that_cannot_be_enforced_is_refused(text: TextProcessor) -> None:
    """Without ``strict`` the call is forced all the same, its arguments being any object."""
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(InvalidRequest) as caught:
        await plan(text, tools=[ADD, {"type": "function", "function": {**odd, "strict": True}}])
    assert str(caught.value.param).startswith("tools[1].function.parameters")
    assert (await plan(text, tools=[{"type": "function", "function": odd}], tool_choice="required")).grammar


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASSISTANT = {"role": "assistant", "tool_calls": [CALL]}


def refusal(model: Any, value: Any) -> tuple[str | None, str | None]:
    try:
        TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        described = describe(error)
        return described.param, described.code
    return None, None


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        (ASSISTANT, None, None),
        (ASSISTANT | {"content": None, "refusal": None}, None, None),
        ({"role": "tool", "tool_call_id": "a", "content": "42"}, None, None),
        ({"role": "user"}, "content", "missing_required_parameter"),
        ({"role": "assistant", "content": None}, "content", "missing_required_parameter"),
        ({"role": "tool", "content": "42"}, "tool_call_id", "missing_required_parameter"),
        (HI | {"tool_call_id": "a"}, "tool_call_id", "invalid_value"),
        (HI | {"tool_calls": [CALL]}, "tool_calls", "invalid_value"),
        (HI | {"reasoning_content": "Hm"}, "reasoning_content", "invalid_value"),
        ({"role": "function", "name": "f", "content": "x"}, "role", "unsupported_value"),
        (HI | {"function_call": {"name": "f", "arguments": ""}}, "function_call", "unsupported_value"),
        *[
            (
                {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]},
                "tool_calls[0].function.arguments",
                "invalid_value",
            )
            for arguments in ("{", "[]", '{"a": NaN}', "[" * 100_000)
        ],
    ],
)
def test_messages(message: dict[str, Any], param: str | None, code: str | None) -> None:
    assert refusal(ChatMessage, message) == (param, code)


def test_a_message_as_templates_take_it() -> None:
    message = ChatMessage.model_validate(ASSISTANT | {"reasoning": "Hm"})
    function = {"name": "add", "arguments": {"a": 1}}
    assert message.template_form() == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([ADD] * 2, "body"),
        ([NAMED | {"function": {"name": f"f{i}"}} for i in range(129)], "body"),
        ([ADD | {"type": "custom"}], "[0].type"),
        ([ADD | {"function": {"name": "no blank"}}], "[0].function.name"),
        ([ADD | {"function": {"name": "f\n"}}], "[0].function.name"),
        ([ADD | {"function": {"name": "f", "parameters": {"type": "array"}}}], "[0].function.parameters"),
        ([ADD | {"function": {"name": "f", "other": 1}}], "[0].function.other"),
    ],
)
def test_tools_that_are_none(tools: list[Any], param: str) -> None:
    assert refusal(Tools, tools)[0] == param


@pytest.mark.parametrize("choice", ["some", 3, {}, {"type": "custom"}, {"type": "function"}, []])
def test_choices_that_are_none(choice: Any) -> None:
    assert refusal(ToolChoice, choice)[1] is not None


THINKER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ documents }}"
    "<|im_start|>assistant\n{{ '<think></think>' if enable_thinking is false else '<think>\n' }}"
)


@pytest.fixture(scope="module")
def thinker(model_dir: Path) -> Iterator[TextProcessor]:
    processor = TextProcessor.load(model_dir, chat_template=THINKER)
    yield processor
    processor.close()


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({}, "Hm.", "4"),
        ({"include_reasoning": False}, "", "4"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "", "Hm.</think>4"),
        ({"reasoning_effort": "none"}, "", "Hm.</think>4"),
        ({"reasoning_effort": "low", "documents": [{"text": "x"}]}, "Hm.", "4"),
    ],
)
async def test_reasoning_is_split_off_where_the_prompt_has_opened_it(
    thinker: TextProcessor, fields: dict[str, Any], reasoning: str, content: str
) -> None:
    made = pickle.loads(pickle.dumps(await plan(thinker, **fields)))
    parser = made.message_parser()
    assert parser.push("Hm.</think>4") + parser.finish(is_cut=False) == MessageDelta(content, reasoning)
    assert (made.reasoning_tokens is not None) == ("</think>" not in content)


async def test_a_grammar_waits_for_the_end_of_reasoning(thinker: TextProcessor, accepts: Accepts) -> None:
    made = await plan(thinker, tools=[ADD], tool_choice="required")
    assert accepts(made.grammar, f"Hm.</think>{ADD_CALL}")
    assert not accepts(made.grammar, ADD_CALL)


def test_a_tool_as_templates_take_it() -> None:
    shown = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert Tool.model_validate(ADD).template_form() == {"type": "function", "function": shown}
