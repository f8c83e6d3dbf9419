"""A tiny random Llama that speaks the embedded model's tokens: text goes in and comes out, without a meaning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from packed_model import tiny_llama

MAX_MODEL_LEN = 512


def save_tiny_text_model(folder: Path, tokens_of: Path) -> None:
    """Into ``folder``, with the tokenizer and the chat template of the model in ``tokens_of``."""
    given = json.loads((tokens_of / "config.json").read_text())
    ids = {name: given.get(name) for name in ("bos_token_id", "eos_token_id")}
    tiny_llama(vocab_size=given["vocab_size"], max_position_embeddings=MAX_MODEL_LEN, **ids).save_pretrained(folder)
    for file in (*tokens_of.glob("tokenizer*"), *tokens_of.glob("*.jinja")):
        shutil.copy(file, folder)
