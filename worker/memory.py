"""How much KV a rank can hold: its device's memory is measured, the worst step that can come is run.

On a GPU::

    memory × --gpu-memory-utilization
      − used by others and by the CUDA context (NVML)  − weights  − peak of the worst-case step  = KV

On a CPU there is no wall but the machine's memory, which other programs need as well: KV gets a fixed share of what is
available once the weights are loaded and the worst-case step is allowed for, divided by the ranks on the machine; or
what the settings say, as far as it is available. ``worker/ledger.py`` does the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType

import numpy as np
import pynvml
import torch
from torch import Tensor

from .decode_graphs import BYTES_PER_GRAPH, DecodeGraphs
from .errors import ConfigurationError
from .host_memory import host_memory, own_bytes, peak_growth
from .ledger import CpuMemory, Entries, GpuMemory, Ledger, cpu_entries, gib, gpu_entries, left_of
from .model.layers import Layer
from .model.transformer import Transformer
from .model_runner import Limits, ModelRunner
from .prompt_reading import ROWS_AT_ONCE
from .spec import KvCacheDtype
from .step_plan import PlanKind, StepPlan

KV_DTYPES: dict[KvCacheDtype, torch.dtype | None] = {
    "auto": None,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""By the names that --kv-cache-dtype has for them; None: as activations are."""


_LIKELIEST = 20
"""With each token that is scored in the worst-case step; how many matters little."""


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

    def setting(self) -> tuple[str, int] | None:
        """The flag that sizes the KV pool and its value; None: the ledger does."""
        if self.num_blocks_override is not None:
            return "--num-gpu-blocks-override", self.num_blocks_override
        if self.kv_cache_memory_bytes is not None:
            return "--kv-cache-memory-bytes", self.kv_cache_memory_bytes
        return None


def size_kv_cache(runner: ModelRunner, budget: KvBudget) -> Ledger:
    """How many blocks this rank can hold (``num_blocks`` of the ledger); the least of all ranks must be used.

    Runs the worst-case step to measure its peak: on all ranks at once, and no KV cache may exist; none is left.
    Raises ConfigurationError, with the numbers, when what is set is not there, or one sequence of the longest length
    would not fit.
    """
    is_gpu = runner.placement.device.type == "cuda"
    return ledger_of(runner, budget, _gpu_entries(runner, budget) if is_gpu else _cpu_entries(runner, budget))


def ledger_of(runner: ModelRunner, budget: KvBudget, entries: Entries) -> Ledger:
    """The ledger of what was measured. Raises ConfigurationError as ``size_kv_cache`` does."""
    kv_bytes = _kv_bytes(runner, budget, left_of(entries))
    ledger = Ledger(
        device=_device_name(runner.placement.device),
        entries=entries,
        kv_bytes=kv_bytes,
        bytes_per_block=runner.kv_bytes_per_block,
        block_size=runner.limits.block_size,
        max_model_len=runner.limits.max_model_len,
        num_blocks=kv_bytes // runner.kv_bytes_per_block,
        setting=" ".join(map(str, budget.setting() or ())) or None,
        kv_form=next((name for name, dtype in KV_DTYPES.items() if dtype is runner.kv_dtype), ""),
    )
    _refuse_if_too_small(ledger, runner, budget)
    return ledger


def allocate_pool(runner: ModelRunner, num_blocks: int) -> None:
    """Allocate the KV pool so that its memory is there, and fails to be now or never.

    On CPUs that takes about 0.4 s a GiB. Raises ConfigurationError when there is less memory than when the pool was
    sized.
    """
    device = runner.placement.device
    try:
        runner.allocate_kv(num_blocks)
    except RuntimeError as error:
        wanted = gib(num_blocks * runner.kv_bytes_per_block)
        raise ConfigurationError(
            f"{wanted} for {num_blocks} KV blocks could not be had on {device}: {error}"
        ) from error


def run_worst_case_step(runner: ModelRunner) -> None:
    """Run the largest step that the limits allow: what cannot work fails now, and kernels are compiled.

    All ranks of a group must call it at the same time. The KV cache must have at least one block; what is in block 0
    is overwritten, and nothing else remains.
    """
    runner.execute(worst_case_plan(runner.limits, long_contexts=runner.placement.device.type == "cuda"))


def worst_case_plan(limits: Limits, *, long_contexts: bool) -> StepPlan:
    """As many tokens as a step may compute over as many sequences as may run, each with a row of logits; of a prompt
    as many tokens are scored as are at once.

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
        scored=np.array([[0, min(lengths[0], ROWS_AT_ONCE), _LIKELIEST, 0]], np.int32),
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


def _cpu_entries(runner: ModelRunner, budget: KvBudget) -> Entries:
    host, own = host_memory(), own_bytes()
    runner.allocate_kv(1)
    step_peak = peak_growth(lambda: run_worst_case_step(runner))
    runner.release_kv()
    memory = CpuMemory(host.total, host.available, own, weight_bytes(runner.model), step_peak)
    form = runner.placement.describe_weights()
    return cpu_entries(memory, budget.num_ranks_on_machine, shared=budget.setting() is None, form=form)


def weight_bytes(model: Transformer) -> int:
    """Bytes of the tensors that a model's layers keep, plain and packed; what two layers share counts once."""
    tensors = {_identity(tensor): tensor for layer in model.layers() for tensor in _tensors_of(layer)}
    return sum(tensor.nbytes for tensor in tensors.values()) + sum(table.nbytes for table in model.rotary_tables)


def _tensors_of(layer: Layer) -> Iterator[Tensor]:
    """Those of a layer and of the kernels that it has prepared."""
    for value in vars(layer).values():
        if isinstance(value, Tensor) or callable(value):
            yield from _tensors_in(value)


def _tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """A product may be an object of ours, a function, or several of them, and may hold a quantised weight."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for part in _parts_of(value):
            yield from _tensors_in(part, depth - 1)


def _parts_of(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or ())
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in fields(value))
    elif type(value).__module__.partition(".")[0] == __name__.partition(".")[0]:
        yield from getattr(value, "__dict__", {}).values()


def _identity(tensor: Tensor) -> int:
    """The same for two tensors of the same memory; oneDNN's packed ones, which show none, are never shared."""
    return id(tensor) if tensor.is_mkldnn else tensor.data_ptr()


def _gpu_entries(runner: ModelRunner, budget: KvBudget) -> Entries:
    device = runner.placement.device
    buffers = 0 if runner.graphs is None else runner.graphs.buffer_bytes
    weights = torch.cuda.memory_allocated(device) - buffers
    step_peak = _peak_of(runner, run_worst_case_step)
    graphs = buffers + (0 if runner.graphs is None else _graph_bytes(runner, runner.graphs))
    total, used = _device_memory(device)
    memory = GpuMemory(total, used, torch.cuda.memory_reserved(device), weights, step_peak, graphs)
    return gpu_entries(memory, budget.gpu_memory_utilization, runner.placement.describe_weights())


def _device_name(device: torch.device) -> str:
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _graph_bytes(runner: ModelRunner, graphs: DecodeGraphs) -> int:
    """What recorded graphs will take beyond their buffers: the pool of the largest serves all of them."""
    pool = _peak_of(runner, lambda runner: graphs.run_padding())
    graphs.room_bytes = pool + BYTES_PER_GRAPH
    return pool + BYTES_PER_GRAPH * len(graphs.sizes) * len(graphs.contexts)


def _peak_of(runner: ModelRunner, run: Callable[[ModelRunner], None]) -> int:
    """Bytes that a step takes beyond weights; block 0 is all the KV that it needs."""
    device = runner.placement.device
    runner.allocate_kv(1)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run(runner)
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


def _kv_bytes(runner: ModelRunner, budget: KvBudget, left: int) -> int:
    """Bytes for KV: as set, else what is left. Raises ConfigurationError when more is set than is left."""
    setting = budget.setting()
    if setting is None:
        return left
    flag, value = setting
    wanted = value * runner.kv_bytes_per_block if budget.num_blocks_override is not None else value
    if wanted > left:
        device = runner.placement.device
        wall = "" if device.type == "cpu" else f" within --gpu-memory-utilization {budget.gpu_memory_utilization:g}"
        raise ConfigurationError(
            f"{flag} is {value}, which takes {gib(wanted)} for KV on {device}, but only {gib(left)} are free{wall}"
        )
    return wanted


def _refuse_if_too_small(ledger: Ledger, runner: ModelRunner, budget: KvBudget) -> None:
    if ledger.num_blocks >= ledger.max_blocks:
        return
    device, setting = runner.placement.device, budget.setting()
    default = "--kv-cache-memory-bytes" if device.type == "cpu" else "--gpu-memory-utilization"
    fits = ledger.num_blocks * ledger.block_size
    otherwise = f", or set --max-model-len to at most {fits}" if fits else ""
    raise ConfigurationError(
        f"one sequence of --max-model-len {ledger.max_model_len} tokens needs {ledger.max_blocks} KV blocks, "
        f"{gib(ledger.max_blocks * ledger.bytes_per_block)} on {device}, but {gib(ledger.kv_bytes)} are left for KV, "
        f"{ledger.num_blocks} blocks: raise {setting[0] if setting else default}{otherwise}"
    )
