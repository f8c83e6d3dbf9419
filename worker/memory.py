"""How much KV a rank can hold: the ledger of its device's memory, and the worst step that can come.

On a GPU::

    memory × --gpu-memory-utilization
      − used by others and by the CUDA context (NVML)  − weights  − peak of the worst-case step  = KV

On a CPU there is no such wall, and what the worst step takes is small beside it: KV gets a fixed share of the memory
that is available, divided by the ranks on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
import pynvml
import torch

from .errors import ConfigurationError
from .model_runner import Limits, ModelRunner
from .step_plan import PlanKind, StepPlan

CPU_SHARE = 0.25
"""Of the available memory, for the KV of all ranks on a machine."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the settings say about the memory for KV."""

    gpu_memory_utilization: float = 0.9
    """Of a GPU's whole memory, for weights, activations and KV together."""
    kv_cache_memory_bytes: int | None = None
    """KV of each rank, instead of what the ledger leaves."""
    num_blocks_override: int | None = None
    """Blocks of each rank, instead of what the ledger leaves."""
    num_ranks_on_machine: int = 1
    """CPU ranks that share this machine's memory."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a rank's memory goes. ``entries`` are (what, bytes); the KV pool is what they leave, or what was set."""

    device: str
    entries: tuple[tuple[str, int], ...]
    kv_bytes: int
    """For the KV pool at the most."""
    bytes_per_block: int
    block_size: int
    num_blocks: int

    def table(self) -> str:
        """A few lines for people."""
        used = self.num_blocks * self.bytes_per_block
        rows = [*self.entries, ("left for KV", self.kv_bytes), ("KV pool", used)]
        lines = [f"memory of {self.device:<35} GiB", *(f"  {what:<40} {amount / _GIB:8.2f}" for what, amount in rows)]
        tokens = self.num_blocks * self.block_size
        return "\n".join([*lines, f"  = {self.num_blocks} blocks of {self.block_size} tokens, {tokens} tokens"])


def size_kv_cache(runner: ModelRunner, budget: KvBudget) -> Ledger:
    """How many blocks this rank can hold (``num_blocks`` of the ledger); the least of all ranks must be used.

    On a GPU the worst-case step is run to measure its peak, on all ranks at once, and no KV cache may exist yet.
    Raises ConfigurationError, with the numbers, when one sequence of the longest length would not fit.
    """
    device = runner.placement.device
    entries = _gpu_entries(runner, budget) if device.type == "cuda" else _cpu_entries(runner, budget)
    left = max(0, sum(amount for _, amount in entries))
    kv_bytes = _wanted_bytes(runner, budget, left)
    ledger = Ledger(
        str(device),
        tuple(entries),
        kv_bytes,
        runner.kv_bytes_per_block,
        runner.limits.block_size,
        kv_bytes // runner.kv_bytes_per_block,
    )
    _refuse_if_too_small(ledger, runner.limits)
    return ledger


def run_worst_case_step(runner: ModelRunner) -> None:
    """Run the largest step that the limits allow: what cannot work fails now, and kernels are compiled.

    All ranks of a group must call it at the same time. The KV cache must have at least one block; what is in block 0
    is overwritten, and nothing else remains.
    """
    runner.execute(worst_case_plan(runner.limits, long_contexts=runner.placement.device.type == "cuda"))


def worst_case_plan(limits: Limits, *, long_contexts: bool) -> StepPlan:
    """As many tokens as a step may compute over as many sequences as may run, each with a row of logits.

    The first sequences prefill as much as they can, the last ones decode, at the end of the longest context if
    ``long_contexts`` (which costs time and, on CPUs, shows nothing). Every block table points to block 0.
    """
    lengths = _worst_case_lengths(limits)
    new = np.array(lengths, np.int32)
    computed = limits.max_model_len - new if long_contexts else np.zeros_like(new)
    return StepPlan(
        PlanKind.STEP,
        slots=np.arange(new.size, dtype=np.int32),
        num_new_tokens=new,
        num_computed_tokens=computed.astype(np.int32),
        token_ids=np.zeros(int(new.sum()), np.int32),
        logit_indices=(np.cumsum(new) - 1).astype(np.int32),
    )


def _worst_case_lengths(limits: Limits) -> list[int]:
    """New tokens of each sequence: long ones first, one for each that is left, the budget used up if possible."""
    tokens, lengths = limits.max_num_batched_tokens, []
    for sequences_left in range(limits.max_num_seqs, 0, -1):
        if tokens == 0:
            break
        lengths.append(max(1, min(limits.max_model_len, tokens - (sequences_left - 1))))
        tokens -= lengths[-1]
    return lengths


def _cpu_entries(runner: ModelRunner, budget: KvBudget) -> list[tuple[str, int]]:
    available = psutil.virtual_memory().available
    share = int(available * CPU_SHARE / budget.num_ranks_on_machine)
    ranks = f"{budget.num_ranks_on_machine} rank" + "s" * (budget.num_ranks_on_machine > 1)
    return [
        ("available, weights loaded", available),
        (f"kept free: all but {CPU_SHARE:.0%}, over {ranks}", share - available),
    ]


def _gpu_entries(runner: ModelRunner, budget: KvBudget) -> list[tuple[str, int]]:
    device = runner.placement.device
    weights = torch.cuda.memory_allocated(device)
    peak = _peak_of_worst_case(runner)
    total, used = _device_memory(device)
    others = used - torch.cuda.memory_reserved(device)
    return [
        ("memory", total),
        (
            f"kept free: utilization {budget.gpu_memory_utilization:g}",
            int(total * budget.gpu_memory_utilization) - total,
        ),
        ("others, CUDA context (NVML)", -others),
        ("weights", -weights),
        ("peak of the worst-case step", -peak),
    ]


def _peak_of_worst_case(runner: ModelRunner) -> int:
    """Bytes that the worst-case step takes beyond weights; block 0 is all the KV that it needs."""
    device = runner.placement.device
    runner.allocate_kv(1)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_worst_case_step(runner)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    runner.release_kv()
    torch.cuda.empty_cache()
    return peak


def _device_memory(device: torch.device) -> tuple[int, int]:
    """(total, used by all processes) of a GPU in bytes, from NVML; from CUDA where NVML does not know it (MIG)."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
        total, used = int(memory.total), int(memory.used)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    return total, used


def _wanted_bytes(runner: ModelRunner, budget: KvBudget, left: int) -> int:
    """Bytes for KV: as set, else what is left."""
    if budget.num_blocks_override is not None:
        setting, value = "--num-gpu-blocks-override", budget.num_blocks_override
        wanted = value * runner.kv_bytes_per_block
    elif budget.kv_cache_memory_bytes is not None:
        setting, value = "--kv-cache-memory-bytes", budget.kv_cache_memory_bytes
        wanted = value
    else:
        return left
    limit = psutil.virtual_memory().available if runner.placement.device.type == "cpu" else left
    if wanted > limit:
        raise ConfigurationError(
            f"{setting} is {value}, which takes {_gib(wanted)} for KV on {runner.placement.device}, "
            f"but only {_gib(limit)} are free"
        )
    return wanted


def _refuse_if_too_small(ledger: Ledger, limits: Limits) -> None:
    needed = limits.max_blocks
    if ledger.num_blocks >= needed:
        return
    fits = ledger.num_blocks * limits.block_size
    helps = "--kv-cache-memory-bytes" if ledger.device == "cpu" else "--gpu-memory-utilization"
    raise ConfigurationError(
        f"one sequence of --max-model-len {limits.max_model_len} tokens needs {needed} KV blocks, "
        f"{_gib(needed * ledger.bytes_per_block)} on {ledger.device}, but {_gib(ledger.kv_bytes)} are left for KV, "
        f"{ledger.num_blocks} blocks: raise {helps}, or lower --max-model-len to at most {fits}"
    )


def _gib(amount: int) -> str:
    return f"{amount / _GIB:.2f} GiB"
