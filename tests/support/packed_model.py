"""Tiny models as GPTQ and AWQ checkpoints, packed by the formats' definitions, and the float models they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
WEIGHTS = "model.safetensors"


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Six query and three KV heads; six and ten groups of 16 input channels."""
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    others = {"max_position_embeddings": 64, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**(shape | heads | others | changes))).eval()


def save_packed(model: LlamaForCausalLM, folder: Path, settings: dict[str, Any], plain: tuple[str, ...] = ()) -> None:
    """Save ``model`` with the matrices of its layers packed, and give it the weights that they stand for.

    ``settings`` is config.json's quantization_config. Modules that have a word of ``plain`` in their names stay.
    """
    model.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not any(word in name for word in plain):
            del tensors[f"{name}.weight"]
            packed, module.weight.data = _pack(module.weight.data, settings)
            tensors |= {f"{name}.{what}": tensor.contiguous() for what, tensor in packed.items()}
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def _pack(weight: Tensor, settings: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one matrix ``[out, in]``, and the weight that they stand for."""
    inputs = weight.shape[1]
    size = inputs if settings["group_size"] == -1 else settings["group_size"]
    group_of = torch.arange(inputs) // size
    if settings.get("desc_act"):
        group_of = group_of[torch.randperm(inputs)]
    scales, zeros = _scales_and_zeros(weight, group_of)
    each_scale, each_zero = scales[group_of].T.float(), zeros[group_of].T
    q = (weight / each_scale + each_zero).round().clamp(0, 15).int()
    stands_for = each_scale * (q - each_zero)
    if settings["quant_method"] == "awq":
        return {"qweight": _words(q.T, AWQ_ORDER), "qzeros": _words(zeros, AWQ_ORDER), "scales": scales}, stands_for
    stored = zeros - (1 if settings.get("checkpoint_format", "gptq") == "gptq" else 0)
    tensors = {"qweight": _words(q).T, "qzeros": _words(stored), "scales": scales, "g_idx": group_of.int()}
    return tensors, stands_for


def _scales_and_zeros(weight: Tensor, group_of: Tensor) -> tuple[Tensor, Tensor]:
    """float16 and int32 ``[groups, out]``; zero points are from 1 to 15, so that the first format can store them."""
    groups = [weight[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    low = torch.stack([group.amin(dim=1) for group in groups])
    high = torch.stack([group.amax(dim=1) for group in groups])
    scales = ((high - low) / 15).half()
    return scales, (-low / scales.float()).round().clamp(1, 15).int()


def _words(numbers: Tensor, order: list[int] | None = None) -> Tensor:
    """``[n, 8 m]`` to int32 ``[n, m]``, the first of ``order`` in the lowest four bits."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, number in enumerate(order or range(8)):
        words |= numbers[:, number::8].long() << 4 * place
    return words.to(torch.int32)
