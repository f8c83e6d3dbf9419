"""A mixture of experts, loaded from a checkpoint over one rank or two, computes what transformers does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from octavo.kernels.backend import cpu_kernels
from octavo.worker.collectives import SingleProcess
from octavo.worker.errors import ConfigurationError
from octavo.worker.model.config import ExpertNames, ExpertsConfig
from octavo.worker.model.experts import ExpertsLayer
from octavo.worker.model.families.mistral import MIXTRAL_NAMES
from octavo.worker.model.families.qwen import MOE_NAMES
from octavo.worker.model.packing import Packing, PackingMethod
from octavo.worker.model.partition import split
from octavo.worker.model.products import Placement
from octavo.worker.model.weights import load_weights

CPU = torch.device("cpu")
HIDDEN, COLUMNS, EXPERTS = 96, 70, 12
PREFIX = "model.layers.3"


def mixtral(num_chosen: int) -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": COLUMNS, "num_local_experts": EXPERTS}
    return MixtralSparseMoeBlock(MixtralConfig(**sizes, num_experts_per_tok=num_chosen))


def qwen3_moe(num_chosen: int, *, renormalise: bool) -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": COLUMNS, "num_experts": EXPERTS}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=num_chosen, norm_topk_prob=renormalise)
    return Qwen3MoeSparseMoeBlock(config)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], ExpertsConfig]] = {
    "mixtral": (lambda: mixtral(2), ExpertsConfig(MIXTRAL_NAMES, COLUMNS, EXPERTS, 2, renormalise=True)),
    "qwen3-moe": (
        lambda: qwen3_moe(4, renormalise=True),
        ExpertsConfig(MOE_NAMES, COLUMNS, EXPERTS, 4, renormalise=True),
    ),
    "qwen3-moe, probabilities as they are": (
        lambda: qwen3_moe(4, renormalise=False),
        ExpertsConfig(MOE_NAMES, COLUMNS, EXPERTS, 4, renormalise=False),
    ),
}


def random_block(make: Callable[[], nn.Module]) -> nn.Module:
    block = make()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return block


def save(block: Any, names: ExpertNames, folder: Path) -> None:
    """As checkpoints of the hub have it: a matrix of each expert by itself."""
    prefix, tensors = f"{PREFIX}.{names.block}", {}
    tensors[f"{prefix}.gate.weight"] = block.gate.weight
    for expert in range(EXPERTS):
        gate, up = block.experts.gate_up_proj[expert].chunk(2)
        parts = {names.gate: gate, names.up: up, names.down: block.experts.down_proj[expert]}
        tensors |= {f"{prefix}.experts.{expert}.{name}.weight": part for name, part in parts.items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def share(folder: Path, experts: ExpertsConfig, columns: range, dtype: torch.dtype) -> ExpertsLayer:
    layer = ExpertsLayer(PREFIX, experts, HIDDEN, columns, Placement.on(CPU, dtype), SingleProcess())
    load_weights([layer], folder, cpu_kernels(), may_be_unused=frozenset(), progress=lambda done, total: None)
    return layer


def both(
    kind: str, folder: Path, num_ranks: int, num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """What the ranks' shares add up to, and what transformers says, of random weights."""
    torch.manual_seed(0)
    make, experts = BLOCKS[kind]
    block, x = random_block(make), torch.randn(num_tokens, HIDDEN)
    save(block, experts.names, folder)
    shares = [share(folder, experts, columns, dtype)(x) for columns in split(COLUMNS, num_ranks)]
    with torch.no_grad():
        return torch.stack(shares).sum(dim=0), block(x[None])[0]


@pytest.mark.parametrize("num_tokens", [1, 7, 200])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", BLOCKS)
def test_as_transformers(kind: str, num_ranks: int, num_tokens: int, tmp_path: Path) -> None:
    given, expected = both(kind, tmp_path, num_ranks, num_tokens)
    torch.testing.assert_close(given, expected, atol=2e-4, rtol=0)


def test_the_weights_of_half_precision_choose_the_same_experts(tmp_path: Path) -> None:
    """The router stays in float32: only what the experts give is rounded, a little."""
    given, expected = both("mixtral", tmp_path, 1, 50, torch.bfloat16)
    assert (given - expected).abs().max() < 0.05
    assert not torch.equal(given, expected)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    make, experts = BLOCKS["mixtral"]
    save(random_block(make), experts.names, tmp_path)
    with pytest.raises(ConfigurationError, match=r"lacks the tensor model\.layers\.3\.mlp\.gate\.weight"):
        share(tmp_path, dataclasses.replace(experts, names=MOE_NAMES), range(COLUMNS), torch.float32)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement.on(CPU, torch.float32, "int8"), "--quantization is int8"),
        (Placement.on(CPU, torch.float32, None, Packing(PackingMethod.GPTQ, 128)), "packs its matrices"),
    ],
)
def test_weights_in_fewer_bits_are_refused(placement: Placement, message: str) -> None:
    _, experts = BLOCKS["mixtral"]
    with pytest.raises(ConfigurationError, match=message):
        ExpertsLayer(PREFIX, experts, HIDDEN, range(COLUMNS), placement, SingleProcess())
