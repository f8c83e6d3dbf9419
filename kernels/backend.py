"""Kernels: one implementation of every tensor function, chosen by device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from . import adapters, reference, reference_experts
from .adapters import PrepareAdapters, RowAdapters
from .kv_cache import KVCache, KVPool
from .quantized import Weight
from .sampling import Logprobs, SamplingTensors

if TYPE_CHECKING:  # it imports numba, which GPUs do without
    from .cpu_program import Team


class PagedAttention(Protocol):
    """See ``reference.paged_attention``."""

    def __call__(
        self,
        query: Tensor,
        cache: KVCache,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        scale: float,
        max_query_len: int,
        max_seq_len: int,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class RmsNorm(Protocol):
    """See ``reference.rms_norm``."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class NormHeads(Protocol):
    """See ``reference.norm_heads``."""

    def __call__(
        self, query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class PrepareLinear(Protocol):
    """See ``reference.prepare_linear``."""

    def __call__(self, weight: Weight, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]: ...


class PrepareExperts(Protocol):
    """See ``reference_experts.prepare_experts``."""

    def __call__(
        self, gate_up: Tensor, down: Tensor, *, num_chosen: int, renormalise: bool
    ) -> Callable[[Tensor, Tensor], Tensor]: ...


@dataclass(frozen=True)
class Kernels:
    """One implementation of each function; ``reference.py`` and ``reference_experts.py`` say what each takes and
    gives."""

    name: str
    """``triton``, ``cpu`` or ``reference``."""
    write_kv: Callable[[Tensor, Tensor, KVCache, Tensor], None]
    paged_attention: PagedAttention
    copy_blocks: Callable[[KVPool, Tensor], None]
    rms_norm: RmsNorm
    norm_heads: NormHeads
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_mul: Callable[[Tensor], Tensor]
    gelu_erf_mul: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, SamplingTensors], Tensor]
    logprobs: Callable[[Tensor, Tensor, int], Logprobs]
    prepare_linear: PrepareLinear
    """Packs a weight once for many products; what a layer calls afterwards."""
    prepare_experts: PrepareExperts
    """The same of a mixture of experts."""
    prepare_adapters: PrepareAdapters
    """LoRA's, of one product."""
    group_rows: Callable[[Tensor, int], RowAdapters]
    """Of each row's slot, int32 ``[T]``, -1 for none, and the number of slots: what all adapters of a step take."""
    team: Team | None = None
    """On CPUs, what runs the kernels: it can record them."""

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """``[T, n]`` of each → ``[T, sum of n]``."""
        return torch.cat(list(parts), dim=-1) if self.team is None else self.team.join_columns(parts)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """``x + other``, in x's memory; both ``[T, n]``."""
        return x.add_(other) if self.team is None else self.team.add(x, other)

    def between(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, which works in place or gives a new tensor, between kernels."""
        return function(x) if self.team is None else self.team.between(function, x)


def reference_kernels() -> Kernels:
    """Plain torch, on any device."""
    return Kernels(
        name="reference",
        write_kv=reference.write_kv,
        paged_attention=reference.paged_attention,
        copy_blocks=reference.copy_blocks,
        rms_norm=reference.rms_norm,
        norm_heads=reference.norm_heads,
        rotary=reference.rotary,
        silu_mul=reference.silu_mul,
        gelu_mul=reference.gelu_mul,
        gelu_erf_mul=reference.gelu_erf_mul,
        sample=reference.sample,
        logprobs=reference.logprobs,
        prepare_linear=reference.prepare_linear,
        prepare_experts=reference_experts.prepare_experts,
        prepare_adapters=adapters.ReferenceAdapters,
        group_rows=adapters.group_rows,
    )


def cpu_kernels() -> Kernels:
    """numba and oneDNN."""
    from . import (
        cpu_adapters,
        cpu_attention,
        cpu_cache,
        cpu_elementwise,
        cpu_experts,
        cpu_linear,
        cpu_logprobs,
        cpu_sample,
    )
    from .cpu_program import Team

    team = Team()
    return Kernels(
        name="cpu",
        write_kv=partial(cpu_cache.write_kv, team),
        paged_attention=partial(cpu_attention.paged_attention, team),
        copy_blocks=cpu_cache.copy_blocks,
        rms_norm=partial(cpu_elementwise.rms_norm, team),
        norm_heads=partial(cpu_elementwise.norm_heads, team),
        rotary=partial(cpu_elementwise.rotary, team),
        silu_mul=partial(cpu_elementwise.silu_mul, team),
        gelu_mul=partial(cpu_elementwise.gelu_mul, team),
        gelu_erf_mul=partial(cpu_elementwise.gelu_erf_mul, team),
        sample=cpu_sample.sample,
        logprobs=cpu_logprobs.logprobs,
        prepare_linear=partial(cpu_linear.prepare_linear, team),
        prepare_experts=partial(cpu_experts.Experts, team),
        prepare_adapters=partial(cpu_adapters.Adapters, team),
        group_rows=adapters.group_rows,
        team=team,
    )


def triton_kernels(*, batch_invariant: bool = False) -> Kernels:
    """Triton, for NVIDIA and AMD GPUs. ``batch_invariant``: see triton_attention.py, triton_linear.py."""
    from . import (
        triton_adapters,
        triton_attention,
        triton_cache,
        triton_elementwise,
        triton_experts,
        triton_linear,
        triton_logprobs,
        triton_sample,
    )

    return Kernels(
        name="triton",
        write_kv=triton_cache.write_kv,
        paged_attention=triton_attention.prepare_paged_attention(batch_invariant=batch_invariant),
        copy_blocks=triton_cache.copy_blocks,
        rms_norm=triton_elementwise.rms_norm,
        norm_heads=triton_elementwise.norm_heads,
        rotary=triton_elementwise.rotary,
        silu_mul=triton_elementwise.silu_mul,
        gelu_mul=triton_elementwise.gelu_mul,
        gelu_erf_mul=triton_elementwise.gelu_erf_mul,
        sample=triton_sample.sample,
        logprobs=triton_logprobs.logprobs,
        prepare_linear=partial(triton_linear.prepare_linear, batch_invariant=batch_invariant),
        prepare_experts=partial(triton_experts.Experts, batch_invariant=batch_invariant),
        prepare_adapters=triton_adapters.Adapters,
        group_rows=triton_adapters.group_rows,
    )


def select_kernels(device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """The fastest implementation for a device. Only what it needs is imported: numba on CPUs, Triton on GPUs.

    ``batch_invariant``: a sequence's result does not depend on the others. On CPUs that is so in any case, but for
    weights in half precision; there the chunks of a prompt show in its last bits, on GPUs they do not.
    """
    if device.type == "cpu":
        return cpu_kernels()
    return triton_kernels(batch_invariant=batch_invariant) if device.type == "cuda" else reference_kernels()
