"""What is known of a node before a model is loaded on it: plain data, gathered there (``gather.py``), judged elsewhere
(``checks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EMBEDDED = "the embedded model"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What NVML says of a GPU."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    users: tuple[str, ...] = ()
    """Processes that hold memory of it: ``python (123) 3.2 GiB``. Those in other containers are not seen."""
    num_nvlinks: int = 0
    """Links that are up."""
    no_peer_access: tuple[int, ...] = ()
    """GPUs of this node whose memory it cannot read."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """``digest`` is of the whole of a small file, of the beginning of a large one."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Model:
    """A model as this node has it."""

    name: str
    folder: str | None
    """Folder or file; None: it is not here and would be fetched from the hub."""
    files: Mapping[str, ModelFile] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One node. Sizes are in bytes; ``None`` is what could not be found out."""

    address: str
    hostname: str
    versions: Mapping[str, str | None]
    """python, octavo, ray, torch, cuda (torch's), driver, driver_cuda (the newest that the driver runs), nccl, …"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that change what is computed or how nodes talk."""
    num_cpus: int = 1
    memory_bytes: int = 0
    shm_bytes: int | None = None
    """Free in /dev/shm."""
    interfaces: tuple[str, ...] = ()
    interface: str | None = None
    """The network interface that has ``address``, by the route to the head."""
    gpus: tuple[Gpu, ...] = ()
    num_torch_gpus: int = 0
    """That torch sees, which is what Ray's and the user's variables leave of them."""
    torch_gpu_error: str | None = None
    models: tuple[Model, ...] = ()
    port_error: str | None = None
    key_file_error: str | None = None
    cache_dir: str = ""
    cache_free_bytes: int | None = None
    cache_error: str | None = None
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class Reduction:
    """An all-reduce that the ranks of one group did."""

    group: int
    nodes: tuple[str, ...]
    """Of the ranks, in their order."""
    backend: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    """Of one all-reduce, the median."""
    error: str | None = None

    @property
    def bytes_per_s(self) -> float:
        """That each rank sends, 2 (n − 1) / n of the tensor (ring), for each second."""
        num_ranks = len(self.nodes)
        return 2 * (num_ranks - 1) / num_ranks * self.size_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the configuration asks for, as far as checks need it."""

    device: str
    """``auto``, ``cpu`` or ``cuda``."""
    tensor_parallel_size: int
    """The largest of all models."""
    num_ranks: int
    gpu_memory_utilization: float
    serves_in_cluster: bool
    """The cluster was joined: its HTTP server and its nodes are somebody else's matter."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is judged."""

    nodes: tuple[Node, ...]
    wanted: Wanted
    silent: Mapping[str, str] = field(default_factory=dict)
    """Nodes that did not answer, and why."""
    placement_error: str | None = None
    """Why the groups can never have their place."""
    is_booked: str | None = None
    """Why they have none at the moment."""
    reductions: tuple[Reduction, ...] = ()
