"""What is asked of a server before the load: is it there, which model does it serve, how does it count tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...worker.errors import ConfigurationError
from .client import Client, UnexpectedAnswer
from .words import ESTIMATED, Count, Words, words_of

_TOKENIZER_FILE = "tokenizer.json"


async def find_model(client: Client, wanted: str | None) -> str:
    """``wanted`` if it is served, or the only one there is. Raises ConfigurationError."""
    names = _names(await client.ask("GET", "/v1/models"))
    if wanted is None and len(names) != 1:
        there = f"there are {len(names)}: {', '.join(names)}" if names else "the server does not say which there are"
        raise ConfigurationError(f"--model: must be said, {there}")
    if wanted is not None and names and wanted not in names:
        raise ConfigurationError(f"--model: {wanted!r} is not served; there is {', '.join(names)}")
    return names[0] if wanted is None else wanted


def _names(models: Any) -> list[str]:
    try:
        return [] if models is None else [str(model["id"]) for model in models["data"]]
    except (LookupError, TypeError) as error:
        raise UnexpectedAnswer(f"/v1/models answers what is no list of models: {str(models)[:200]}") from error


async def find_words(client: Client, model: str, tokenizer: Path | None) -> Words:
    """By the tokenizer in a folder, else by the server's ``/tokenize``, else by estimate. Raises ConfigurationError."""
    if tokenizer is not None:
        return await words_of(_count_of_file(tokenizer), str(tokenizer))
    count = _count_of_server(client, model)
    try:
        await count("time")
    except (UnexpectedAnswer, LookupError, TypeError):
        return ESTIMATED
    return await words_of(count, "/tokenize")


def _count_of_server(client: Client, model: str) -> Count:
    async def count(text: str) -> int:
        """Raises TypeError and KeyError where the endpoint is another one, or none."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return int((await client.ask("POST", "/tokenize", body))["count"])

    return count


def _count_of_file(path: Path) -> Count:
    from tokenizers import Tokenizer

    file = path / _TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(f"--tokenizer: {path} is neither a folder with a {_TOKENIZER_FILE} nor such a file")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises this one
        raise ConfigurationError(f"--tokenizer: {file}: {error}") from error

    async def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count
