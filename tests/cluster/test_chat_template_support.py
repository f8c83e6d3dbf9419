"""What is found out about chat templates, and the prompts that are made with them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.cluster.api.chat.render import Chat, ChatRenderer, TemplateSource
from octavo.cluster.api.chat.template import RenderLimits
from octavo.worker.errors import ConfigurationError, InvalidRequest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('Only one call at once!') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}[{{ m.role }}]{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}{% elif m.tool_calls %}"
    "[TOOL_CALLS]{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('Nine!') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name + c.function.arguments }}{% endfor %}{% elif m.content is not none %}"
    "{{ m.role }}{{ m.content }}{% endif %}{% endfor %}{{ tools | tojson if tools }}<think>\n"
)
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
TOOL_CHAT = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "call00001"},
]


def renderer(source: str, *added_tokens: str, **options: Any) -> ChatRenderer:
    return ChatRenderer(TemplateSource({"default": source}, {}, frozenset(added_tokens)), **options)


@pytest.mark.parametrize(
    ("source", "tokens", "expected"),
    [
        (
            CHATML,
            (),
            {"tools": False, "tool_form": "hermes", "system": True, "reasoning": None, "parallel_calls": True},
        ),
        (QWEN, (), {"tools": True, "tool_form": "hermes", "reasoning": "think", "variables": {"enable_thinking"}}),
        (LLAMA, ("<|python_tag|>",), {"tools": True, "tool_form": "llama3_json", "parallel_calls": False}),
        (LLAMA, (), {"tools": False, "tool_form": "hermes", "parallel_calls": True}),
        (MISTRAL, (), {"tools": True, "tool_form": "mistral", "system": False, "parallel_calls": True}),
        (MISTRAL, ("[THINK]", "[/THINK]"), {"tool_form": "mistral", "reasoning": "mistral"}),
        (DEEPSEEK, (), {"tools": True, "arguments_as_text": True, "null_content": True}),
        (CHATML.replace("<|im_start|>{{", "{{ 'developer' }}{{"), (), {"developer": True}),
        (CHATML.replace("m.content }}", "m.content[0].text }}"), (), {"content_parts": True}),
    ],
)
def test_what_a_template_can_do_is_found_out(source: str, tokens: tuple[str, ...], expected: dict[str, Any]) -> None:
    support = renderer(source, *tokens).support
    assert {name: getattr(support, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (QWEN, '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>'),
        (DEEPSEEK, '<tool_call>add{"a": "é"}tool42'),
        (
            CHATML,
            '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool',
        ),
        (CHATML.replace("m.content }}", "m.content[0].text }}"), "<|im_start|>user\nAdd.<|im_end|>"),
    ],
)
def test_calls_and_results_of_earlier_turns_are_shown(source: str, shown: str) -> None:
    assert shown in renderer(source).render(Chat(TOOL_CHAT, [TOOL]))


def test_a_template_that_knows_no_tools_gets_them_described() -> None:
    """In the system message that there is; without that role, in the first user's."""
    chat = Chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [TOOL])
    text = renderer(CHATML).render(chat)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '{"type": "function", "function": {"name": "add", "description": "Adds"' in text
    without_system = CHATML.replace("{{ m.role", "{{ raise_exception('!') if m.role == 'system' }}{{ m.role")
    text = renderer(without_system).render(Chat(chat.messages[1:], [TOOL]))
    assert text.count("<|im_start|>user") == 1
    assert text.endswith("</tool_response>.\n\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_tool_s_result_has_the_name_of_its_tool() -> None:
    """Some templates demand it, and OpenAI's messages do not have it."""
    source = QWEN.replace("{{ m.role }}", "{{ m.role }}{{ m.name if m.role == 'tool' }}")
    assert "<|im_start|>tooladd\n42" in renderer(source).render(Chat(TOOL_CHAT, [TOOL]))


def test_the_template_for_tools_is_taken_where_there_are_two() -> None:
    two = ChatRenderer(TemplateSource({"default": CHATML, "tool_use": QWEN}))
    assert two.support.tools
    assert "<tools>" in two.render(Chat(TOOL_CHAT[:1], [TOOL]))
    assert "<tools>" not in two.render(Chat(TOOL_CHAT[:1]))


def test_system_messages_that_would_be_lost_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no role for system messages"):
        renderer(MISTRAL).render(Chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]))


@pytest.mark.parametrize(
    "source", ["{% for %}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"]
)
def test_a_template_that_cannot_work_is_refused_at_start(source: str) -> None:
    with pytest.raises(ConfigurationError, match=r"syntax error|more than 0\.05 seconds"):
        renderer(source, limits=RenderLimits(cpu_s=0.05))


def test_a_form_of_calls_that_the_template_cannot_have_is_refused_at_start() -> None:
    with pytest.raises(ConfigurationError, match="--tool-call-parser: mistral, but the chat template shows no"):
        renderer(CHATML, tool_form="mistral")
    assert renderer(QWEN, tool_form="llama3_json").support.tool_form == "llama3_json"


@pytest.mark.parametrize("prefill", ["OK!", "OK! ", "OK!\n", "", "<|im_end|>", "<think>\nhm"])
@pytest.mark.parametrize("source", [CHATML, CHATML.replace("m.content }}", "m.content | trim }}"), QWEN])
def test_case_bug_056_a_message_is_continued_as_it_was_sent(source: str, prefill: str) -> None:
    """White space at its end is kept, whatever the template trims; nothing follows it."""
    messages = [{"role": "user", "content": "Joke"}, {"role": "assistant", "content": prefill}]
    text = renderer(source).render(Chat(messages, add_generation_prompt=False, continue_final_message=True))
    assert text.endswith(f"<|im_start|>assistant\n{prefill}")
    assert text.count("<|im_start|>assistant") == 1


@pytest.mark.parametrize(
    ("messages", "both"),
    [
        ([{"role": "user", "content": "Joke"}], False),
        ([{"role": "user", "content": "Joke"}, {"role": "assistant", "content": "OK"}], True),
        (TOOL_CHAT[:2], False),
    ],
)
def test_case_bug_056_what_cannot_be_continued_is_refused(messages: list[dict[str, Any]], both: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        renderer(QWEN).render(Chat(messages, add_generation_prompt=both, continue_final_message=True))
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt", "no_such"])
def test_case_bug_019_kwargs_are_variables_of_the_template_and_nothing_else(name: str) -> None:
    chat = Chat(TOOL_CHAT[:1], variables={name: True})
    with pytest.raises(InvalidRequest, match="which reads enable_thinking") as caught:
        renderer(QWEN).render(chat)
    assert caught.value.param == "chat_template_kwargs"
    assert renderer(QWEN).render(Chat(TOOL_CHAT[:1], variables={"enable_thinking": False})).endswith("</think>\n\n")
