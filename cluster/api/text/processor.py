"""Text to token ids and back: the tokenizer and the chat template of the served model.

``PreTrainedTokenizerFast`` reads tokenizer.json and the template, which ``chat/`` renders. Unlike ``AutoTokenizer`` it
does not import torch (0.8 s, not 3.4 s, on two cores). Encoding goes to the ``tokenizers`` object under it, which any
number of threads may use at once: transformers' call sets padding and truncation each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from transformers import PreTrainedTokenizerFast

from ....worker.errors import ConfigurationError, ContextLengthExceeded
from ....worker.grammar import GrammarCompiler
from ..chat.prompts import DEFAULT_OPTIONS, ChatOptions, ChatPrompts
from ..chat.render import Chat, TemplateSource
from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .model_files import read_json
from .token_bytes import TokenBytes

T = TypeVar("T")
_RARE = "\U000f0000"
"""A private character that is in no vocabulary."""
_NUM_UNTRUSTED = 2
"""Processes that render requests' own templates at once."""


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """What the model's configuration says of token ids."""

    vocab_size: int
    """Rows of the embedding: ids are below it."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    token_ids: list[int]


class TextProcessor:
    """Tokenizer and chat template. The ``async`` methods work in threads, so that long prompts do not stop the loop."""

    def __init__(
        self,
        model_dir: Path,
        tokenizer: Any,
        tokens: ModelTokens,
        *,
        options: ChatOptions = DEFAULT_OPTIONS,
        num_threads: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.token_bytes = TokenBytes(self._backend)
        self.vocab_size = tokens.vocab_size
        self.eos_token_ids = tokens.eos_token_ids
        self.grammars = GrammarCompiler.of_model(model_dir, tokens.vocab_size)
        self._max_token_chars = _max_token_chars(self._backend)
        self._chats = ChatPrompts(_template_source(tokenizer), options)
        self.template_support = self._chats.support
        self.tokenizer_info = _tokenizer_info(tokenizer)
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        """Tokens that are no text: name → id."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._untrusted = ThreadPoolExecutor(_NUM_UNTRUSTED, thread_name_prefix="template")

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        chat_template: str | None = None,
        options: ChatOptions = DEFAULT_OPTIONS,
        num_threads: int = 2,
    ) -> Self:
        """Read a Hugging Face folder. ``chat_template`` replaces the folder's own.

        Raises ConfigurationError for a folder without a readable tokenizer.json, for a template with a syntax error,
        and for options that do not fit the template.
        """
        tokenizer = _read_tokenizer(model_dir, chat_template)
        return cls(model_dir, tokenizer, _model_tokens(model_dir, tokenizer), options=options, num_threads=num_threads)

    def close(self) -> None:
        """End the threads; work under way is finished first."""
        self._threads.shutdown()
        self._untrusted.shutdown()

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids of a chat's prompt: up to where the assistant's turn begins, or goes on.

        ``messages`` and ``tools`` are what ``template_form`` gives. By default ``add_generation_prompt`` is the
        opposite of ``continue_final_message``. ``template_kwargs`` are variables of the template, ``chat_template`` is
        the request's own. Errors as ``chat_prompt``.
        """
        chat = Chat(
            messages,
            tools,
            documents,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_kwargs or {},
        )
        return (await self.chat_prompt(chat, max_tokens=max_tokens, chat_template=chat_template)).token_ids

    async def chat_prompt(self, chat: Chat, *, max_tokens: int | None, chat_template: str | None = None) -> ChatPrompt:
        """Raises InvalidRequest when there is no template or it rejects the conversation, ContextLengthExceeded when
        the prompt is certainly longer than ``max_tokens``."""
        if chat_template is None:
            text = await self.in_thread(lambda: self._chats.text(chat))
        else:
            loop = asyncio.get_running_loop()
            text = await loop.run_in_executor(self._untrusted, self._chats.text_by, chat_template, chat)
        token_ids = await self.encode(text, max_tokens=max_tokens, special_tokens=False, param="messages")
        return ChatPrompt(text, token_ids)

    async def encode(
        self, text: str, *, max_tokens: int | None, special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds; errors as ``chat_prompt``, of
        ``param``."""
        self._check_length(text, max_tokens, param)
        return await self.in_thread(lambda: self._encode(text, special_tokens=special_tokens))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell the words, each at the start of a text and after a space, as vLLM's bad
        words are."""
        if not words:
            return ()
        stripped = [word.lstrip(" ") or word for word in words]
        spellings = [spelling for word in stripped for spelling in (word, f" {word}")]
        encoded = await self.in_thread(lambda: self._backend.encode_batch_fast(spellings, add_special_tokens=False))
        return tuple(dict.fromkeys(tuple(each.ids) for each in encoded if each.ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """transformers' clean-up of spaces is not done: it would change text once sent. Nor are spaces put between
        special tokens that are shown."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """For the output that follows a prompt."""
        if self.token_bytes.is_byte_level:
            tokens = self.token_bytes
            return ByteDetokenizer(tokens.without_special if skip_special_tokens else tokens.all)
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt_token_ids)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What ``work`` gives; it is done in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, *, special_tokens: bool) -> list[int]:
        # For a batch, even of one, the tokenizer lets go of the GIL: 200 kB would stop the event loop for 0.1 s.
        token_ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids
        bos = self._tokenizer.bos_token_id
        if special_tokens and bos is not None and token_ids[:2] == [bos, bos]:
            return token_ids[1:]  # the text brought its own
        return token_ids

    def _check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        """Refuse what no tokenization can make short enough, before spending seconds on it."""
        if max_tokens is None or self._max_token_chars is None or len(text) <= max_tokens * self._max_token_chars:
            return
        at_least = len(text) // self._max_token_chars
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_tokens} tokens, but the prompt of {len(text)} characters "
            f"has at least {at_least} tokens.",
            param=param,
        )


def _tokenizer_info(tokenizer: Any) -> Mapping[str, Any]:
    """Of a name that the tokenizer has no token for, null."""
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {role: getattr(tokenizer, role) for role in roles} | {"chat_template": tokenizer.chat_template}


def template_source(model_dir: Path, chat_template: str | None) -> TemplateSource | None:
    """What ``TextProcessor.load`` takes for the template. Raises ConfigurationError."""
    return _template_source(_read_tokenizer(model_dir, chat_template))


def _read_tokenizer(model_dir: Path, chat_template: str | None) -> Any:
    if not (model_dir / "tokenizer.json").is_file():
        raise ConfigurationError(f"model folder {model_dir}: there is no tokenizer.json")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:
        raise ConfigurationError(f"model folder {model_dir}: the tokenizer cannot be read: {error}") from error
    _refuse_ids_without_rows(model_dir, tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _refuse_ids_without_rows(model_dir: Path, tokenizer: Any) -> None:
    """Raises ConfigurationError for a token whose id is no row of the model's embedding: a prompt could have it."""
    rows = _model_tokens(model_dir, tokenizer).vocab_size
    vocabulary = tokenizer.backend_tokenizer.get_vocab()
    beyond = {token_id: token for token, token_id in vocabulary.items() if token_id >= rows}
    if beyond:
        last = max(beyond)
        raise ConfigurationError(
            f"model folder {model_dir}: tokenizer.json has {len(beyond)} tokens that the model has no row for, up to "
            f"{beyond[last]!r} with the id {last}; vocab_size in config.json is {rows}"
        )


def _template_source(tokenizer: Any) -> TemplateSource | None:
    template = tokenizer.chat_template
    if not template:
        return None
    sources = template if isinstance(template, dict) else {"default": template}
    added = frozenset(token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values())
    return TemplateSource(sources, tokenizer.special_tokens_map, added)


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
    config = read_json(model_dir / "config.json")
    generation = read_json(model_dir / "generation_config.json")
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or len(tokenizer)
    ids = [tokenizer.eos_token_id, *_as_list(config.get("eos_token_id")), *_as_list(generation.get("eos_token_id"))]
    eos_token_ids = dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
    return ModelTokens(int(vocab_size), tuple(eos_token_ids))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
