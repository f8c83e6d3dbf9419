"""Checks of GPUs: that there are as many as asked for, that torch can use them, free, and how they are linked."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts, Gpu, Node
from .findings import Finding, green, red, yellow


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def check_gpus(facts: Facts) -> Iterator[Finding]:
    if facts.wanted.device == "cpu":
        return
    for node in facts.nodes:
        yield from _gpus_of(node)
    found = sum(len(node.gpus) for node in facts.nodes)
    if found == 0 and facts.wanted.device == "cuda":
        advice = "is the driver loaded (nvidia-smi), and were GPUs given to the container (--gpus all)? or --device cpu"
        yield red("GPUs", "--device cuda, but no node has one", advice)
    elif found == 0:
        yield green("GPUs", "none: models are computed on CPUs")
    elif len(kinds := {gpu.name for node in facts.nodes for gpu in node.gpus}) > 1:
        yield yellow("GPUs", f"of several kinds: {', '.join(sorted(kinds))}", "a group is as fast as its slowest rank")


def _gpus_of(node: Node) -> Iterator[Finding]:
    if not node.gpus:
        return
    cuda, newest = node.versions.get("cuda"), node.versions.get("driver_cuda")
    if cuda is None:
        advice = "install the CUDA build of torch there"
        yield red("GPUs", f"{len(node.gpus)} GPUs, but torch is built without CUDA", advice, node.address)
    elif newest is not None and _numbers(newest)[0] < _numbers(cuda)[0]:
        what = f"torch wants CUDA {cuda}, the driver runs up to {newest}"
        yield red("GPUs", what, "update the driver, or install torch for an older CUDA", node.address)
    elif node.torch_gpu_error is not None:
        advice = "does nvidia-smi work there? dmesg names failed GPUs (Xid)"
        yield red("GPUs", f"torch cannot use them: {node.torch_gpu_error}", advice, node.address)
    elif node.num_torch_gpus < len(node.gpus):
        what = f"torch sees {node.num_torch_gpus} of {len(node.gpus)}"
        yield yellow("GPUs", what, "CUDA_VISIBLE_DEVICES hides the others", node.address)
    else:
        yield green("GPUs", f"{len(node.gpus)} × {node.gpus[0].name}", node.address)


def check_gpu_memory(facts: Facts) -> Iterator[Finding]:
    """What others hold is not there for weights and KV blocks."""
    if facts.wanted.device == "cpu":
        return
    for node in facts.nodes:
        for gpu in node.gpus:
            yield from _memory_of(gpu, node.address, facts.wanted.gpu_memory_utilization)


def _memory_of(gpu: Gpu, node: str, utilization: float) -> Iterator[Finding]:
    used, total = gpu.used_bytes / 2**30, gpu.total_bytes / 2**30
    users = ", ".join(gpu.users) or "processes that cannot be seen from here"
    what = f"GPU {gpu.index}: {used:.1f} of {total:.1f} GiB are used, by {users}"
    if gpu.used_bytes > utilization * gpu.total_bytes:
        yield red("GPU memory", what, "end those processes, or leave this GPU out (CUDA_VISIBLE_DEVICES)", node)
    elif gpu.used_bytes > 0.05 * gpu.total_bytes:
        yield yellow("GPU memory", what, "end those processes, or lower --gpu-memory-utilization", node)
    else:
        yield green("GPU memory", f"GPU {gpu.index}: {total - used:.1f} of {total:.1f} GiB free", node)


def check_peer_access(facts: Facts) -> Iterator[Finding]:
    """Ranks of one group on one node copy from GPU to GPU, over NVLink if there is one."""
    if facts.wanted.tensor_parallel_size == 1 or facts.wanted.device == "cpu":
        return
    for node in facts.nodes:
        if len(node.gpus) < 2:
            continue
        without = [f"{gpu.index}-{other}" for gpu in node.gpus for other in gpu.no_peer_access if gpu.index < other]
        if without:
            advice = "all-reduces go through the host's memory: is ACS or an IOMMU on, or is this a virtual machine?"
            yield yellow("GPU links", f"no peer access between {', '.join(without)}", advice, node.address)
        elif not all(gpu.num_nvlinks for gpu in node.gpus):
            idle = [str(gpu.index) for gpu in node.gpus if not gpu.num_nvlinks]
            some = any(gpu.num_nvlinks for gpu in node.gpus)
            advice = (
                "a link is down: nvidia-smi nvlink --status" if some else "PCIe: fine for groups of two, slow for more"
            )
            yield yellow("GPU links", f"no NVLink at GPU {', '.join(idle)}", advice, node.address)
        else:
            yield green("GPU links", f"NVLink, {min(gpu.num_nvlinks for gpu in node.gpus)} at each GPU", node.address)
