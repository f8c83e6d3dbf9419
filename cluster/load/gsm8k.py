"""Few-shot GSM8K: school mathematics behind the same solved examples, from a file of its JSON lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from ...worker.errors import ConfigurationError
from .scripts import Script, Turn
from .words import Words

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Gsm8k:
    """``examples`` begin every prompt; ``questions`` come in random order."""

    examples: str
    questions: tuple[str, ...]
    num_output_tokens: int

    @property
    def num_scripts(self) -> int | None:
        return len(self.questions)

    @property
    def has_arrivals(self) -> bool:
        return False

    def scripts(self, words: Words, seed: int) -> Iterator[Script]:
        for number in np.random.default_rng(seed).permutation(len(self.questions)).tolist():
            text = f"{self.examples}Question: {self.questions[number]}\nAnswer:"
            yield Script("", (Turn(text, self.num_output_tokens),))


def read_gsm8k(path: Path, num_shots: int, num_output_tokens: int) -> Gsm8k:
    """The first ``num_shots`` are the examples, the others are asked; .gz too. Raises ConfigurationError."""
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if content.startswith(_GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        message = f"--dataset-path: {path}: {getattr(error, 'strerror', None) or error}"
        raise ConfigurationError(message) from error
    lines = [line for line in text.splitlines() if line.strip()]
    solved = [_solved(path, number, line) for number, line in enumerate(lines, 1)]
    if len(solved) <= num_shots:
        raise ConfigurationError(
            f"--num-shots: must be below the {len(solved)} problems that {path} has, got {num_shots}"
        )
    examples = "".join([f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in solved[:num_shots]])
    return Gsm8k(examples, tuple([question for question, _ in solved[num_shots:]]), num_output_tokens)


def _solved(path: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        value = orjson.loads(line)
        question, answer = value["question"], value["answer"]
    except (ValueError, LookupError, TypeError) as error:
        message = f"--dataset-path: {path}, line {number}: an object with question and answer is expected"
        raise ConfigurationError(message) from error
    return str(question), str(answer)
