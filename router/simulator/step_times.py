"""How long a step takes: a cost model with a few coefficients, from data sheets or fitted to measured steps.

A step that computes T tokens, of which P belong to prompts and D are one for each decoding sequence, takes

    overhead + max(weights, token * T) + context * (sum over the P tokens of the tokens before each)
             + kv * (KV tokens read: those of the decoding sequences, and once those before each chunk of a prompt)

The matrix products read all weights once and do 2 operations for each weight and token (Kaplan et al., "Scaling laws
for neural language models", 2020, table 1): whichever takes longer counts (roofline; Williams, Waterman and Patterson,
CACM 52(4), 2009). Attention of prompts is bound by arithmetic, 4 * layers * heads * head_dim operations for each token
and each one before it (q·k and p·v, a product and a sum each); that of decodes by reading the KV.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import orjson

from ...worker.errors import ConfigurationError
from ...worker.step_plan import StepPlan

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", int, npt.NDArray[np.int64])

_COLUMNS = ("num_prefill_tokens", "num_context_tokens", "num_decodes", "num_kv_tokens", "seconds")


class StepShape(NamedTuple):
    """What a step does, as far as its time depends on it."""

    num_prefill_tokens: int
    num_context_tokens: int
    """Sum over the tokens of prefill of the tokens before each."""
    num_decodes: int
    num_kv_tokens: int
    """KV read from memory: all tokens of decoding sequences, and what is before each chunk of prefill."""


def shape_of(plan: StepPlan) -> StepShape:
    """A sequence that computes one token decodes, one with more is prefill."""
    new, before = plan.num_new_tokens, plan.num_computed_tokens
    num_decodes = int(new.size)
    if new.size == plan.token_ids.size:
        return StepShape(0, 0, num_decodes, int(before.sum(dtype=np.int64)) + num_decodes)
    num_prefill = num_context = num_kv = num_chunks = 0
    for count, start in zip(new.tolist(), before.tolist(), strict=True):
        num_kv += start
        if count > 1:
            num_chunks += 1
            num_prefill += count
            num_context += count * start + count * (count - 1) // 2
    num_decodes -= num_chunks
    return StepShape(num_prefill, num_context, num_decodes, num_kv + num_decodes)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Coefficients in seconds; see the formula above. All finite and ≥ 0, ``overhead_s`` or ``weights_s`` above 0."""

    overhead_s: float
    weights_s: float
    token_s: float
    context_s: float
    kv_s: float

    def step_s(self, shape: StepShape) -> float:
        base_s = self._base_s(shape.num_prefill_tokens + shape.num_decodes)
        return base_s + shape.num_context_tokens * self.context_s + shape.num_kv_tokens * self.kv_s

    def decode_steps_s(self, num_decodes: int, num_kv_tokens: int, num_steps: int) -> Floats:
        """float64 [num_steps]: steps one after the other of the same sequences, which read ``num_kv_tokens`` in the
        first one and a token more each in every other. Equal to ``step_s`` to the last bit."""
        kv_tokens = num_kv_tokens + num_decodes * np.arange(num_steps, dtype=np.int64)
        return cast(Floats, self._base_s(num_decodes) + 0 * self.context_s + kv_tokens * self.kv_s)

    def _base_s(self, num_tokens: int) -> float:
        return self.overhead_s + max(self.weights_s, num_tokens * self.token_s)

    def check(self, name: str) -> None:
        """Raise ConfigurationError that begins with ``name`` when a coefficient is impossible."""
        for field, value in asdict(self).items():
            if not 0.0 <= value < math.inf:
                raise ConfigurationError(f"{name}: {field} must be a finite number ≥ 0, got {value}")
        if self.overhead_s + self.weights_s <= 0.0:
            raise ConfigurationError(f"{name}: a step without tokens would take no time")


def fit(steps: Sequence[Sequence[float]]) -> StepTimes:
    """Least squares over measured steps, rows as in ``StepShape`` with the seconds last.

    Each step counts by its relative error, so that the many short ones are not lost beside the long. Coefficients that
    come out negative are set to 0, the most negative first, and the rest fitted again: none can be. ``weights_s`` is 0,
    its share lies in the overhead: from the steps of one machine the two cannot be told apart.
    """
    table = np.asarray(steps, np.float64)
    seconds = table[:, 4]
    features = np.stack((np.ones(len(table)), table[:, 0] + table[:, 2], table[:, 1], table[:, 3]), axis=1)
    scale = np.maximum(np.abs(features).max(axis=0), 1.0)
    weighted = features / scale / seconds[:, None]
    used, solution = [0, 1, 2, 3], np.zeros(4)
    while used:
        solution = np.zeros(4)
        solution[used] = np.linalg.lstsq(weighted[:, used], np.ones(len(table)), rcond=None)[0]
        if solution.min() >= 0.0:
            break
        used.remove(int(solution.argmin()))
    overhead_s, token_s, context_s, kv_s = (solution / scale).tolist()
    return StepTimes(overhead_s, 0.0, token_s, context_s, kv_s)


def load_fitted(path: Path, flag: str = "--step-times") -> StepTimes:
    """Fit to the last line of ``path``, a file that ``flag`` named and a benchmark has printed: a JSON object whose
    ``steps`` are rows of num_prefill_tokens, num_context_tokens, num_decodes, num_kv_tokens (see ``StepShape``) and
    seconds.

    Raises ConfigurationError when there is no such line, a row is impossible, or there are fewer than 8.
    """
    try:
        lines = path.read_bytes().strip().splitlines()
        value = orjson.loads(lines[-1] if lines else b"")
    except OSError as error:
        raise ConfigurationError(f"{flag}: {path}: {error.strerror or error}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{flag}: {path}: the last line is not JSON ({error})") from error
    steps = value.get("steps") if isinstance(value, Mapping) else None
    if not isinstance(steps, list) or len(steps) < 8:
        raise ConfigurationError(f"{flag}: {path}: the last line must have a list 'steps' of 8 or more rows")
    for number, row in enumerate(steps):
        if not _is_possible(row):
            raise ConfigurationError(
                f"{flag}: {path}: steps[{number}] must be finite numbers ({', '.join(_COLUMNS)}), got {row!r}"
            )
    fitted = fit(steps)
    fitted.check(f"{flag}: {path}: the fit")
    return fitted


def _is_possible(row: object) -> bool:
    if not isinstance(row, list) or len(row) != len(_COLUMNS):
        return False
    numbers = [value for value in row if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(row) and all(0 <= value < math.inf for value in numbers) and numbers[-1] > 0
