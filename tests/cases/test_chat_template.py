"""Chats become prompts by the model's template: all of them, exactly, and never at another's cost."""

from __future__ import annotations

from typing import Any

import pytest
from api_calls import chat, complete
from serve_process import OneModel

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def test_case_bug_054_no_template(base: OneModel, stream: bool) -> None:
    assert complete(base, "The capital of France is", stream=stream, **GREEDY).status == 200
    answer = chat(base, "hi", stream=stream, **GREEDY)
    assert (answer.status, (answer.error or {})["code"]) == (400, "no_chat_template")
    assert "--chat-template" in (answer.error or {})["message"]


@pytest.mark.parametrize("way", ["flag", "file in the folder"])
def test_case_bug_054_a_template_from_elsewhere(short: OneModel, plain: OneModel, way: str) -> None:
    server = short if way == "flag" else plain
    rendered = "<|im_start|>user\nSay hello<|im_end|>\n<|im_start|>assistant\n"
    expected = complete(server, rendered, **GREEDY)
    answer = chat(server, "Say hello", **GREEDY)
    assert answer.text == expected.text
    assert (answer.usage or {})["prompt_tokens"] == (expected.usage or {})["prompt_tokens"]


@pytest.mark.parametrize("beginning", ["OK!", "OK! ", "OK!\n", "", "<|im_end|>"], ids=repr)
@pytest.mark.usefixtures("canary")
def test_case_bug_056_an_answer_that_was_begun(cluster: OneModel, stream: bool, beginning: str) -> None:
    messages = [{"role": "user", "content": "Joke"}, {"role": "assistant", "content": beginning}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(cluster, messages, stream=stream, **flags, **GREEDY)
    assert answer.status == 200, answer
    assert "<|im_start|>" not in answer.text
    if beginning == "OK!":
        begun = chat(cluster, messages[:1], max_tokens=1, temperature=0).usage or {}
        usage = answer.usage or {}
        assert usage["prompt_tokens"] == begun["prompt_tokens"] + 2  # "OK" and "!", no end of turn


@pytest.mark.usefixtures("canary")
def test_case_bug_056_contradictions(cluster: OneModel, stream: bool) -> None:
    begun = [{"role": "user", "content": "Joke"}, {"role": "assistant", "content": "OK!"}]
    answer = chat(cluster, begun, continue_final_message=True, add_generation_prompt=True, stream=stream, **GREEDY)
    assert (answer.status, (answer.error or {})["param"]) == (400, "continue_final_message")
    answer = chat(cluster, begun[:1], continue_final_message=True, add_generation_prompt=False, stream=stream, **GREEDY)
    assert answer.status == 400


@pytest.mark.usefixtures("canary")
def test_case_bug_058_the_developers_words(cluster: OneModel, stream: bool) -> None:
    usages = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Answer BANANA only."}, {"role": "user", "content": "Colour?"}]
        usages.append(chat(cluster, messages, stream=stream, **GREEDY).usage or {})
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
