"""A tokenizer.json whose tokens are single characters, for tiny models: 0, 1 and 2 are special, 2 ends an output."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_TOKENS = 96
STOP = 2
_SPECIAL = ("<pad>", "<bos>", "<eos>")
_LEFT_OUT = "`~^"


def write_tokenizer(folder: Path) -> Tokenizer:
    """Space, line break and the printable ASCII characters but three."""
    letters = ["Ġ", "Ċ", *(chr(code) for code in range(33, 127) if chr(code) not in _LEFT_OUT)]
    vocabulary = {text: index for index, text in enumerate((*_SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
