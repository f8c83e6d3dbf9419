"""TextProcessor: the same prompts as transformers, off the event loop, with errors that name the rule."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from octavo.cluster.api.chat.prompts import ChatOptions
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi \n"}],
    [
        {"role": "user", "content": "안녕 👩‍👩‍👧"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "<|im_end|> is plain to you?"},
    ],
]


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("chat", CHATS)
async def test_chats_are_rendered_as_transformers_renders_them(
    text: TextProcessor, reference: Any, chat: list[dict[str, str]]
) -> None:
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert await text.render_chat(chat, max_tokens=8192) == expected


@pytest.mark.parametrize(
    "prompt", ["The capital of France is", " two  blanks", "\n", "안녕 👩‍👩‍👧", "<|im_start|>user"]
)
async def test_texts_are_encoded_as_transformers_encodes_them(text: TextProcessor, reference: Any, prompt: str) -> None:
    assert await text.encode(prompt, max_tokens=8192) == reference.encode(prompt)


def test_what_the_configuration_says(text: TextProcessor) -> None:
    assert text.vocab_size == 49_152
    assert 2 in text.eos_token_ids


def test_loading_does_not_import_torch(model_dir: Path) -> None:
    code = (
        "import sys, pathlib; from octavo.cluster.api.text.processor import TextProcessor;"
        "TextProcessor.load(pathlib.Path(sys.argv[1])).close(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(model_dir)], check=True, timeout=60)


async def test_case_bug_058_developer_messages_are_rendered_as_system(text: TextProcessor) -> None:
    def chat(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": "Answer BANANA only."}, {"role": "user", "content": "Hi"}]

    as_developer = await text.render_chat(chat("developer"), max_tokens=8192)
    assert as_developer == await text.render_chat(chat("system"), max_tokens=8192)


async def test_case_bug_019_a_request_s_template_is_used_only_where_it_is_trusted(
    text: TextProcessor, folder: Path
) -> None:
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as caught:
        await text.render_chat(CHATS[0], max_tokens=99, chat_template=template)
    assert caught.value.param == "chat_template"
    trusting = TextProcessor.load(folder, options=ChatOptions(trust_request_chat_template=True))
    token_ids = await trusting.render_chat(CHATS[0], max_tokens=99, chat_template=template)
    assert trusting.decode(token_ids) == CHATS[0][0]["content"] + "!"
    trusting.close()


def test_options_go_before_what_the_template_says(folder: Path) -> None:
    thinking = TextProcessor.load(folder, options=ChatOptions(reasoning_parser="think"))
    assert thinking.template_support.reasoning
    assert "reasoning split off" in thinking.template_support.summary()
    thinking.close()
    set_template(folder, "{% for m in messages %}{{ m.content }}</think>{% endfor %}")
    for parser, reasons in (("auto", "think"), ("none", None), ("mistral", "mistral")):
        text = TextProcessor.load(folder, options=ChatOptions(reasoning_parser=parser))  # type: ignore[arg-type]
        assert text.template_support.reasoning == reasons
        text.close()


async def test_a_prompt_that_cannot_fit_is_refused_before_tokenization(text: TextProcessor) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"256 tokens.*30000000 characters"):
        await text.encode("x" * 30_000_000, max_tokens=256)


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the model folder's text files, to be changed; the vocabulary is cut, since most of it is not needed."""
    for file in model_dir.glob("*"):
        if file.suffix in {".json", ".jinja"}:
            shutil.copy(file, tmp_path)
    (tmp_path / "tokenizer.json").write_text(small_tokenizer(model_dir))
    return tmp_path


@cache
def small_tokenizer(model_dir: Path) -> str:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token_id < 1_000}
    merged = (
        (merge, merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)) for merge in model["merges"]
    )
    model["merges"] = [merge for merge, token in merged if token in model["vocab"]]
    return json.dumps(tokenizer)


def set_template(folder: Path, template: str | None) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


async def test_case_bug_054_without_a_template_only_chats_are_refused(folder: Path) -> None:
    set_template(folder, None)
    text = TextProcessor.load(folder)
    assert await text.encode("Hello", max_tokens=99)
    with pytest.raises(InvalidRequest, match="no chat template: use /v1/completions"):
        await text.render_chat(CHATS[0], max_tokens=99)
    text.close()


@pytest.mark.parametrize("source", ["chat_template.jinja", "option"])
async def test_case_bug_054_a_template_from_elsewhere(folder: Path, source: str) -> None:
    template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    set_template(folder, None)
    if source == "chat_template.jinja":
        (folder / source).write_text(template)
    text = TextProcessor.load(folder, chat_template=template if source == "option" else None)
    assert text.decode(await text.render_chat(CHATS[0], max_tokens=99)) == CHATS[0][0]["content"] + "!"
    text.close()


async def test_a_template_that_rejects_a_chat_names_its_rule(folder: Path) -> None:
    set_template(folder, "{{ raise_exception('Conversation roles must alternate') }}")
    text = TextProcessor.load(folder)
    with pytest.raises(InvalidRequest, match="rejects this conversation: Conversation roles must alternate"):
        await text.render_chat(CHATS[0], max_tokens=99)
    text.close()


async def test_a_beginning_of_sequence_token_is_not_doubled(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": bos},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = TextProcessor.load(folder)
    plain, with_bos = [await text.encode(t, max_tokens=99) for t in ("Hello", "<|im_start|>Hello")]
    assert plain == with_bos
    assert (await text.render_chat(CHATS[0], max_tokens=99)).count(1) == 3  # system, user, assistant
    text.close()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("config.json", "[]", "no JSON object"),
    ],
)
def test_a_broken_folder_is_named(folder: Path, file: str, content: str | None, message: str) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        TextProcessor.load(folder)


def test_a_template_with_a_syntax_error_is_refused_at_start(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="syntax error"):
        TextProcessor.load(folder, chat_template="{% for %}")
