"""A bar on stderr for each repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from .sample import Sample


@dataclass(slots=True)
class Bar:
    tqdm: Any
    num_samples: int = 0
    num_tokens: int = 0
    num_failed: int = 0

    def note_script(self) -> None:
        self.tqdm.update()

    def note_sample(self, sample: Sample) -> None:
        self.num_samples += 1
        self.num_tokens += sample.num_tokens
        self.num_failed += not sample.is_good
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        said = f"{self.num_samples} requests, {self.num_tokens} output tokens{failed}"
        self.tqdm.set_postfix_str(said, refresh=False)


class Progress:
    """Shown where stderr is a terminal, unless ``is_hidden``."""

    def __init__(self, num_repeats: int, *, is_hidden: bool) -> None:
        self._num_repeats = num_repeats
        self._disable = True if is_hidden else None

    @contextlib.contextmanager
    def run(self, number: int, num_scripts: int | None) -> Iterator[Bar]:
        name = "load" if self._num_repeats == 1 else f"load {number + 1}/{self._num_repeats}"
        with tqdm(total=num_scripts, desc=name, unit=" prompts", disable=self._disable, leave=False) as bar:
            yield Bar(bar)
