"""What the model's own generation_config.json says of sampling: it holds where a request says nothing.

``do_sample`` and ``max_new_tokens`` are not taken over: whether and how much is generated is the request's to say, and
a cap that nobody sees would cut answers short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ....worker.errors import ConfigurationError
from ..text.model_files import read_json
from .fields import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY

NONE = "none"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values of the fields of these names in requests without them; OpenAI's, unless a model has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, choice: str, model_dir: Path) -> Self:
        """``choice`` is what --generation-config says: auto (the model's folder), none, or another folder.

        Raises ConfigurationError for a value that no request could have.
        """
        if choice == NONE:
            return cls()
        folder = model_dir if choice == AUTO else Path(choice)
        path = folder / "generation_config.json"
        if choice != AUTO and not path.is_file():
            raise ConfigurationError(f"--generation-config: there is no {path}")
        values = read_json(path)
        given = {name: values[name] for name in _RULES if values.get(name) is not None}
        for name, value in given.items():
            rule, holds = _RULES[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
                raise ConfigurationError(f"{path}: {name} is {value!r}, but must be {rule}; --generation-config none")
        return cls(**given | ({"top_k": int(given["top_k"])} if "top_k" in given else {}))

    def own(self) -> Mapping[str, Any]:
        """Those that differ from OpenAI's."""
        usual = asdict(type(self)())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


def _is_top_k(value: float) -> bool:
    return (isinstance(value, int) or value.is_integer()) and -1 <= value < 2**63


_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("from 0 to 2", lambda value: 0 <= value <= 2),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number of 64 bits, -1 or more", _is_top_k),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": (
        f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
        lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
    ),
}
