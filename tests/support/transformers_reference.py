"""What transformers says of greedy outputs: whether each token is the one that it would have chosen."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

NEAR_TIE = 1e-3
"""Logits are equal only up to rounding: two best ones that are closer than this may come in either order."""

DATA = Path(__file__).parent.parent / "data"


class Reference:
    """Judges greedy outputs by transformers' logits in float32.

    One forward pass over prompt and output gives the logits before every token. Where each token of an output is the
    best one after those before it, the output is what ``generate`` gives, and at a fraction of its cost.
    """

    def __init__(
        self, model_dir: Path, prompts: list[list[int]], *, max_tokens: int, eos_token_ids: Collection[int]
    ) -> None:
        self.prompts = prompts
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._max_tokens = max_tokens
        self._eos = frozenset(eos_token_ids)
        self._gaps: dict[tuple[int, ...], list[float]] = {}

    def differences(self, outputs: Sequence[Sequence[int]]) -> tuple[list[str], int]:
        """The outputs that differ for no good reason, described, and how many differ at near-ties alone."""
        wrong, excused = [], 0
        for index, (prompt, output) in enumerate(zip(self.prompts[: len(outputs)], outputs, strict=True)):
            wrong += [f"prompt {index}: {fault}" for fault in self._faults(prompt, output)]
            excused += any(0.0 < gap <= NEAR_TIE for gap in self._gaps_of(prompt, output))
        return wrong, excused

    def _faults(self, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
        ends = [position for position, token in enumerate(output) if token in self._eos]
        is_whole = ends == [len(output) - 1] or (not ends and len(output) == self._max_tokens)
        gaps = enumerate(self._gaps_of(prompt, output))
        return [f"output token {position} is {gap:.2e} below the best" for position, gap in gaps if gap > NEAR_TIE] + (
            [] if is_whole else [f"{len(output)} tokens, ends at {ends}"]
        )

    @torch.inference_mode()
    def _gaps_of(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """By how much the logit of each output token is below the best one."""
        tokens = (*prompt, *output)
        if tokens not in self._gaps:
            logits = self._model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            self._gaps[tokens] = (logits.amax(1) - chosen).tolist()
        return self._gaps[tokens]


def chat_prompts(model_dir: Path, num_prompts: int) -> list[list[int]]:
    """Token ids of the first test prompts, each a chat."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    texts = json.loads((DATA / "prompts.json").read_text())["prompts"][:num_prompts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]
