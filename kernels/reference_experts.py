"""A mixture of experts in plain torch, on any device: what the fast twins are compared with.

Words: T tokens, E experts, k of them chosen for each token, I columns of an expert's MLP that this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference

LOWEST = torch.finfo(torch.float32).min
"""What a logit that is no number, or -inf, counts as where experts are chosen."""


def prepare_experts(
    gate_up: Tensor, down: Tensor, *, num_chosen: int, renormalise: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of ``x [T, hidden]`` and the router's logits ``[T, E]``, giving ``[T, hidden]``, for many calls.

    Expert e is a SwiGLU of ``gate_up[e]``, ``[2 * I, hidden]``, gate first, and ``down[e]``, ``[hidden, I]``. A token's
    result is the sum of its ``num_chosen`` experts', each times its probability (Shazeer et al. 2017), from the
    likeliest on. See ``choose_experts``. It does not depend on the other tokens, bit for bit, on CPUs and where GPUs'
    kernels are batch invariant. A row of NaN gives NaN, and leaves the others alone. Raises ValueError for weights that
    do not fit each other, and if there are fewer than ``num_chosen`` experts.
    """
    check_experts(gate_up, down, num_chosen)

    def compute(x: Tensor, logits: Tensor) -> Tensor:
        experts, weights = choose_experts(logits, num_chosen, renormalise=renormalise)
        parts = torch.zeros(*experts.shape, x.shape[1], device=x.device)
        for expert in torch.unique(experts).tolist():
            token, place = (experts == expert).nonzero(as_tuple=True)
            inner = reference.silu_mul(F.linear(x[token].to(gate_up.dtype), gate_up[expert]))
            parts[token, place] = F.linear(inner, down[expert]).float() * weights[token, place, None]
        return parts.sum(dim=1).to(x.dtype)

    return compute


def choose_experts(logits: Tensor, num_chosen: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each row of ``[T, E]``, int64 ``[T, k]``, and their weights, float32 ``[T, k]``.

    Of equals the first are chosen. Weights are the softmax over all experts, or over the chosen with ``renormalise``.
    """
    logits = logits.float()
    comparable = torch.where(logits > LOWEST, logits, LOWEST)
    experts = comparable.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weights = comparable.softmax(dim=-1).gather(-1, experts)
    return experts, weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights


def check_experts(gate_up: Tensor, down: Tensor, num_chosen: int) -> None:
    """Raises ValueError where the shapes contradict each other, or the number of experts."""
    num_experts, hidden, columns = down.shape
    if gate_up.shape != (num_experts, 2 * columns, hidden):
        raise ValueError(
            f"down is {tuple(down.shape)}, gate_up {tuple(gate_up.shape)} instead of "
            f"{(num_experts, 2 * columns, hidden)}"
        )
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"num_chosen is {num_chosen}, expected 1 to {num_experts}, the number of experts")
