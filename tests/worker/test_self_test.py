"""What a rank proves before it serves: sums over ranks, logits that are numbers, the embedded model's answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.worker.collectives import SingleProcess
from octavo.worker.errors import ConfigurationError
from octavo.worker.model_runner import Limits
from octavo.worker.self_test import EMBEDDED_PROMPT, run_self_test


class WrongSums(SingleProcess):
    """Loses one number of every sum."""

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone()
        total[7] = 0
        return total


class Answering:
    """A runner whose model knows the answer, but for the token at ``wrong_at``."""

    def __init__(self, wrong_at: int | None = None, max_model_len: int = 64) -> None:
        self.limits = Limits(16, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=max_model_len)
        self.config = SimpleNamespace(vocab_size=1000)
        self.placement = SimpleNamespace(device=torch.device("cpu"))
        self._wrong_at = wrong_at

    def execute(self, plan: Any) -> Tensor:
        logits = torch.zeros(plan.logit_indices.size, 1000)
        for row, token in enumerate(plan.token_ids[1:]):
            logits[row, token] = 9.0
        if self._wrong_at is not None:
            logits[len(EMBEDDED_PROMPT) - 1 + self._wrong_at, 5] = 12.5
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 50}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3, max_position_embeddings=64)).save_pretrained(path)
    return path


def test_any_model_that_gives_numbers_passes(folder: Path, start_group: Any) -> None:
    with start_group(folder) as (runner, _):
        run_self_test(runner, SingleProcess(), is_embedded=False)


def test_weights_that_are_no_numbers_end_the_start(folder: Path, start_group: Any) -> None:
    with start_group(folder) as (runner, _):
        with torch.inference_mode():
            runner.model.norm._prepared[3] = torch.nan
        with pytest.raises(ConfigurationError, match=r"1450 of the model's 1450 logits are not finite"):
            run_self_test(runner, SingleProcess(), is_embedded=False)


def test_ranks_that_add_up_wrong_end_the_start() -> None:
    with pytest.raises(ConfigurationError, match="gave 1 wrong sums, number 7 is 0 and should be 7"):
        run_self_test(Answering(), WrongSums(), is_embedded=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_model_len", [64, 20, 16])
def test_the_embedded_model_knows_its_answer(max_model_len: int) -> None:
    """As much of it as the context can hold."""
    run_self_test(Answering(max_model_len=max_model_len), SingleProcess(), is_embedded=True)  # type: ignore[arg-type]


def test_another_answer_of_the_embedded_model_ends_the_start() -> None:
    with pytest.raises(ConfigurationError, match=r"logit of token 40, number 5 .* is 3.5 below the best"):
        run_self_test(Answering(wrong_at=4), SingleProcess(), is_embedded=True)  # type: ignore[arg-type]
