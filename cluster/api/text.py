"""Text to token ids and back: the tokenizer and the chat template of the served model.

``PreTrainedTokenizerFast`` reads tokenizer.json and the template; its rendering of chats is transformers' own. Unlike
``AutoTokenizer`` it does not import torch (0.8 s, not 3.4 s, on two cores). Encoding goes to the ``tokenizers`` object
under it, which any number of threads may use at once: transformers' call sets padding and truncation each time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import jinja2
from transformers import PreTrainedTokenizerFast

from ...worker.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from .detokenizer import Detokenizer

ChatMessage = Mapping[str, str]
T = TypeVar("T")
_RARE = "\U000f0000"
"""A private character that is in no vocabulary."""


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """What the model's configuration says of token ids."""

    vocab_size: int
    """Rows of the embedding: ids are below it."""
    eos_token_ids: tuple[int, ...]


class TextProcessor:
    """Tokenizer and chat template. The ``async`` methods work in threads, so that long prompts do not stop the loop."""

    def __init__(self, tokenizer: Any, tokens: ModelTokens, *, num_threads: int = 2) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = tokens.vocab_size
        self.eos_token_ids = tokens.eos_token_ids
        self._max_token_chars = _max_token_chars(self._backend)
        self._knows_developer = "developer" in str(tokenizer.chat_template)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    @classmethod
    def load(cls, model_dir: Path, *, chat_template: str | None = None, num_threads: int = 2) -> Self:
        """Read a Hugging Face folder. ``chat_template`` replaces the folder's own.

        Raises ConfigurationError for a folder without a readable tokenizer.json and for a template with a syntax error.
        """
        if not (model_dir / "tokenizer.json").is_file():
            raise ConfigurationError(f"model folder {model_dir}: there is no tokenizer.json")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir, local_files_only=True)
        except Exception as error:
            raise ConfigurationError(f"model folder {model_dir}: the tokenizer cannot be read: {error}") from error
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        processor = cls(tokenizer, _model_tokens(model_dir, tokenizer), num_threads=num_threads)
        processor._compile_template()
        return processor

    def close(self) -> None:
        """End the threads; work under way is finished first."""
        self._threads.shutdown()

    async def render_chat(self, messages: Sequence[ChatMessage], *, max_tokens: int) -> list[int]:
        """The prompt of a chat, up to where the assistant's turn begins.

        Raises InvalidRequest when there is no template or it rejects the conversation, ContextLengthExceeded when the
        prompt is certainly longer than ``max_tokens``.
        """
        return await self._in_thread(lambda: self._encode(self._render(messages), max_tokens, special_tokens=False))

    async def encode(self, text: str, *, max_tokens: int) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds; errors as ``render_chat``."""
        return await self._in_thread(lambda: self._encode(text, max_tokens, special_tokens=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. transformers' clean-up of spaces is not done: it would change text once sent."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.decode, prompt_token_ids)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, max_tokens: int, *, special_tokens: bool) -> list[int]:
        self._check_length(text, max_tokens)
        # For a batch, even of one, the tokenizer lets go of the GIL: 200 kB would stop the event loop for 0.1 s.
        token_ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids
        bos = self._tokenizer.bos_token_id
        if special_tokens and bos is not None and token_ids[:2] == [bos, bos]:
            return token_ids[1:]  # the text brought its own
        return token_ids

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuse what no tokenization can make short enough, before spending seconds on it."""
        if self._max_token_chars is None or len(text) <= max_tokens * self._max_token_chars:
            return
        at_least = len(text) // self._max_token_chars
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_tokens} tokens, but the prompt of {len(text)} characters "
            f"has at least {at_least} tokens."
        )

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        """transformers' rendering; a template without the role developer gets those messages as system messages."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions, or start the server with a template.",
                param="messages",
                code="no_chat_template",
            )
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            chat = [dict(message) for message in messages]
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's author; whatever it raises is its verdict
            raise InvalidRequest(
                f"The model's chat template rejects this conversation: {error}", param="messages"
            ) from error
        return str(text)

    def _compile_template(self) -> None:
        """Render a probe, which also fills transformers' cache of compiled templates."""
        try:
            self._render([{"role": "user", "content": "Hello"}])
        except InvalidRequest as error:
            if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
                raise ConfigurationError(f"the chat template has a syntax error: {error.__cause__}") from error


def _max_token_chars(backend: Any) -> int | None:
    """The longest text that can be one token; None where any amount of text may vanish in tokenization."""
    added = backend.get_added_tokens_decoder().values()
    shortens = backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added)
    if shortens or not _keeps_blanks(backend) or len(backend.encode(_RARE * 3, add_special_tokens=False).ids) < 3:
        return None
    return max(map(len, backend.get_vocab()))


def _keeps_blanks(backend: Any) -> bool:
    probe = "a  b \n\t c"
    if backend.pre_tokenizer is None:
        return True
    pieces = backend.pre_tokenizer.pre_tokenize_str(probe)
    return bool(sum(end - start for _, (start, end) in pieces) >= len(probe))


def _model_tokens(model_dir: Path, tokenizer: Any) -> ModelTokens:
    config = _read_json(model_dir / "config.json")
    generation = _read_json(model_dir / "generation_config.json")
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or len(tokenizer)
    ids = [tokenizer.eos_token_id, *_as_list(config.get("eos_token_id")), *_as_list(generation.get("eos_token_id"))]
    eos_token_ids = dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
    return ModelTokens(int(vocab_size), tuple(eos_token_ids))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds no JSON object")
    return content
