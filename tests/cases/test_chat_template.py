"""Chats become prompts by the model's template: all of them, exactly, and never at another's cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_calls import chat, complete
from serve_process import ServeProcess

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def without_template(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model as a base model has it."""
    folder = tmp_path_factory.mktemp("model") / "base"
    shutil.copytree(model_dir, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def base(without_template: Path) -> Iterator[ServeProcess]:
    server = ServeProcess(str(without_template), "--replicas", "1")
    yield server
    server.stop()


def test_case_bug_054_no_template(base: ServeProcess, stream: bool) -> None:
    assert complete(base, "The capital of France is", stream=stream, **GREEDY).status == 200
    answer = chat(base, "hi", stream=stream, **GREEDY)
    assert (answer.status, (answer.error or {})["code"]) == (400, "no_chat_template")
    assert "--chat-template" in (answer.error or {})["message"]


@pytest.mark.parametrize("way", ["flag", "file in the folder"])
def test_case_bug_054_a_template_from_elsewhere(without_template: Path, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "with-template"
    shutil.copytree(without_template, folder)
    path = tmp_path / "my.jinja" if way == "flag" else folder / "chat_template.jinja"
    path.write_text(TEMPLATE)
    flags = ("--chat-template", str(path)) if way == "flag" else ()
    server = ServeProcess(str(folder), "--replicas", "1", *flags)
    try:
        rendered = "<|im_start|>user\nSay hello<|im_end|>\n<|im_start|>assistant\n"
        expected = complete(server, rendered, **GREEDY)
        answer = chat(server, "Say hello", **GREEDY)
        assert answer.text == expected.text
        assert (answer.usage or {})["prompt_tokens"] == (expected.usage or {})["prompt_tokens"]
    finally:
        server.stop()


@pytest.mark.parametrize("beginning", ["OK!", "OK! ", "OK!\n", "", "<|im_end|>"], ids=repr)
@pytest.mark.usefixtures("canary")
def test_case_bug_056_an_answer_that_was_begun(cluster: ServeProcess, stream: bool, beginning: str) -> None:
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
def test_case_bug_056_contradictions(cluster: ServeProcess, stream: bool) -> None:
    begun = [{"role": "user", "content": "Joke"}, {"role": "assistant", "content": "OK!"}]
    answer = chat(cluster, begun, continue_final_message=True, add_generation_prompt=True, stream=stream, **GREEDY)
    assert (answer.status, (answer.error or {})["param"]) == (400, "continue_final_message")
    answer = chat(cluster, begun[:1], continue_final_message=True, add_generation_prompt=False, stream=stream, **GREEDY)
    assert answer.status == 400


@pytest.mark.usefixtures("canary")
def test_case_bug_058_the_developers_words(cluster: ServeProcess, stream: bool) -> None:
    usages = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Answer BANANA only."}, {"role": "user", "content": "Colour?"}]
        usages.append(chat(cluster, messages, stream=stream, **GREEDY).usage or {})
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
