"""A tiny random Llama, and what transformers says of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 211
CONTEXT = 256

LIMITS = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": CONTEXT}
"""Of the ranks that run it."""


class RandomLlama:
    """Nine query and three KV heads, saved to ``folder``. Its logits differ enough for every token to be telling."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=72,
            intermediate_size=120,
            num_hidden_layers=2,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=8,
            max_position_embeddings=CONTEXT,
            initializer_range=0.2,
            tie_word_embeddings=False,
        )
        self.folder = folder
        self._model = LlamaForCausalLM(config).eval()
        self._model.save_pretrained(folder)

    @torch.inference_mode()
    def prompt_logprobs(self, tokens: Sequence[int]) -> Tensor:
        """``[len(tokens) - 1, vocabulary]``: of what may follow each token but the last."""
        return torch.log_softmax(self._model(torch.tensor([tokens])).logits[0, :-1], dim=-1)

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """``[len(tokens), hidden]`` last hidden states."""
        states: NDArray[np.float32] = self._model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        return states


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(0, VOCABULARY, length).tolist())
