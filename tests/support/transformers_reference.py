"""What transformers says: greedy outputs, and whether a difference from them is excused by a near-tie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

NEAR_TIE = 1e-3
"""Logits are equal only up to rounding: two best ones that are closer than this may come in either order."""

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Reference:
    """``prompts``: token ids of chats; ``outputs``: transformers' greedy continuation of each, in float32."""

    model_dir: Path
    prompts: list[list[int]]
    outputs: list[list[int]]

    @cached_property
    def model(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()

    def differences(self, outputs: list[list[int]]) -> tuple[list[str], int]:
        """The outputs that differ for no good reason, described, and how many differ at a near-tie."""
        wrong, excused = [], 0
        for index, (expected, got) in enumerate(zip(self.outputs, outputs, strict=True)):
            if expected == got:
                continue
            gap, at = self._gap_at_first_difference(index, got)
            if gap <= NEAR_TIE:
                excused += 1
            else:
                wrong.append(f"prompt {index}: first difference at output token {at}, gap of the two best {gap:.2e}")
        return wrong, excused

    @torch.inference_mode()
    def _gap_at_first_difference(self, index: int, got: list[int]) -> tuple[float, int]:
        expected = self.outputs[index]
        pairs = zip(expected, got, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
        tokens = torch.tensor([self.prompts[index] + expected[:at]])
        best = self.model(tokens).logits[0, -1].topk(2).values
        return float(best[0] - best[1]), at


@torch.inference_mode()
def make_reference(model_dir: Path, *, num_prompts: int, max_tokens: int) -> Reference:
    """Greedy outputs of transformers for the first ``num_prompts`` test prompts, one at a time."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    texts = json.loads((DATA / "prompts.json").read_text())["prompts"][:num_prompts]
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
        for text in texts
    ]
    reference = Reference(model_dir, prompts, [])
    for prompt in prompts:
        output = reference.model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False)
        reference.outputs.append(output[0, len(prompt) :].tolist())
    return reference
