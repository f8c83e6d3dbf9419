"""The checks: each a function of the facts that gives findings. They are in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .facts import Facts, Node
from .findings import Finding, green, red, yellow
from .gpu_checks import check_gpu_memory, check_gpus, check_peer_access
from .model_checks import check_cache, check_models

EQUAL = ("system", "python", "octavo", "ray", "torch", "cuda", "nccl")
"""Must be the same everywhere: Ray refuses other Pythons and Rays, and ranks must compute and talk alike."""

ALIKE = ("driver", "triton", "numpy", "transformers")
SHM_NEEDED_BYTES = 128 * 2**20
"""Ray's object store as Octavo starts it; NCCL wants some MiB for each pair of ranks of a node."""

HEALTH_CHECK = "RAY_health_check_period_ms"
SLOW_BYTES_PER_S = {"nccl": 2e9, "gloo": 2e7}
"""Below what an all-reduce is worth a look: PCIe without peer access, 100 Mbit Ethernet."""


def check_silence(facts: Facts) -> Iterator[Finding]:
    for node, reason in facts.silent.items():
        advice = "is it overloaded or gone? ray list nodes shows what the cluster knows of it"
        yield red("node", f"did not answer: {reason}", advice, node)


def check_versions(facts: Facts) -> Iterator[Finding]:
    for name in (*EQUAL, *ALIKE):
        yield from _compare_versions(name, facts.nodes)


def _compare_versions(name: str, nodes: Sequence[Node]) -> Iterator[Finding]:
    versions = {node.address: node.versions.get(name) for node in nodes}
    head = next((node for node in nodes if node.is_head), nodes[0])
    wanted = versions[head.address]
    others = {address: version for address, version in versions.items() if version != wanted}
    if not others:
        if wanted is not None:
            yield green(name, wanted)
        elif name in ("octavo", "ray", "torch"):
            yield red(name, "is not installed", "install Octavo with what it depends on on all nodes")
    for address, version in others.items():
        what = f"{version or 'none'}, but {wanted or 'none'} on {head.address}"
        if name in EQUAL:
            advice = "use machines of one kind" if name == "system" else f"install {name} {wanted} there"
            yield red(name, what, advice, address)
        else:
            yield yellow(name, what, "the same version everywhere has fewer surprises", address)


def check_environment(facts: Facts) -> Iterator[Finding]:
    """Variables that steer collectives and libraries, and differ."""
    names = sorted({name for node in facts.nodes for name in node.environment} - set(_INTERFACE_VARIABLES))
    differing = [name for name in names if len({node.environment.get(name) for node in facts.nodes}) > 1]
    for name in differing:
        values = ", ".join(f"{node.environment.get(name, 'unset')!r} on {node.address}" for node in facts.nodes)
        yield yellow("environment", f"{name} differs: {values}", "set it alike on all nodes, before Ray starts there")
    if not differing:
        yield green("environment", "alike" if len(facts.nodes) > 1 else "one node")


def check_ray_settings(facts: Facts) -> Iterator[Finding]:
    """How soon a dead node is noticed, and who may join."""
    if not facts.wanted.serves_in_cluster:
        return
    for node in facts.nodes:
        if HEALTH_CHECK not in node.environment and len(facts.nodes) > 1:
            advice = "start Ray with the RAY_health_check_… variables that octavo launch sets"
            yield yellow("ray settings", "a node that hangs is noticed after a minute", advice, node.address)
        if node.environment.get("RAY_AUTH_MODE") != "token":
            advice = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN for all of Ray's processes"
            yield yellow("ray settings", "whoever reaches Ray's ports may run code", advice, node.address)


_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_interface(facts: Facts) -> Iterator[Finding]:
    """Collectives must use the interface that the other nodes can reach."""
    for node in facts.nodes:
        faults = list(_interface_faults(node, len(facts.nodes) > 1))
        yield from faults
        if not faults:
            chosen = node.environment.get(_INTERFACE_VARIABLES[0]) or node.interface or "the loopback"
            yield green("interface", chosen, node.address)


def _interface_faults(node: Node, has_others: bool) -> Iterator[Finding]:
    for name in _INTERFACE_VARIABLES:
        chosen = node.environment.get(name)
        if chosen is None:
            continue
        wanted = [word.lstrip("^=") for word in chosen.split(",")]
        missing = [word for word in wanted if not any(each.startswith(word) for each in node.interfaces)]
        if missing and not chosen.startswith("^"):
            there = ", ".join(node.interfaces)
            yield red(
                "interface", f"{name}={chosen}, but there are {there}", f"set {name} to one of them", node.address
            )
        elif not chosen.startswith("^") and node.interface and not node.interface.startswith(tuple(wanted)):
            what = f"{name}={chosen}, but {node.address} is on {node.interface}"
            yield yellow(
                "interface", what, f"set {name}={node.interface}, unless {chosen} is a faster net", node.address
            )
    if has_others and not any(name in node.environment for name in _INTERFACE_VARIABLES) and node.interface is None:
        advice = f"set {' and '.join(_INTERFACE_VARIABLES)} to the interface that leads to the other nodes"
        yield red("interface", f"none of {', '.join(node.interfaces)} has {node.address}", advice, node.address)


def check_shm(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.shm_bytes is None:
            yield red("/dev/shm", "there is none", "mount a tmpfs on /dev/shm", node.address)
        elif node.shm_bytes < SHM_NEEDED_BYTES:
            what = f"{node.shm_bytes / 2**20:.0f} MiB free, {SHM_NEEDED_BYTES / 2**20:.0f} MiB are needed"
            advice = "docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory on /dev/shm"
            yield red("/dev/shm", what, advice, node.address)
        else:
            yield green("/dev/shm", f"{node.shm_bytes / 2**30:.1f} GiB free", node.address)


def check_port(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.port_error is not None:
            taken = "end what listens there (ss -ltnp shows it), or give another --port; 0 takes a free one"
            advice = taken if node.port_error.startswith("--port") else "give an address of that machine, or 0.0.0.0"
            yield red("port", node.port_error, advice, node.address)
        elif node.is_head and not facts.wanted.serves_in_cluster:
            yield green("port", "free", node.address)


def check_api_key_file(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.key_file_error is not None:
            advice = "write keys into it, one a line, readable by the user that Octavo runs as"
            yield red("API keys", node.key_file_error, advice, node.address)


def check_placement(facts: Facts) -> Iterator[Finding]:
    if facts.placement_error is not None:
        what, _, advice = facts.placement_error.rpartition("; ")
        yield red("placement", what, advice)
    elif facts.is_booked is not None:
        yield yellow("placement", facts.is_booked, "is the cluster serving already, or used by others?")
    else:
        yield green("placement", f"room for {facts.wanted.num_ranks} ranks")


def check_reductions(facts: Facts) -> Iterator[Finding]:
    for each in facts.reductions:
        nodes = " ".join(dict.fromkeys(each.nodes))
        if each.error is not None:
            advice = "do firewalls let the nodes reach each other on all ports, and is the interface right (see above)?"
            yield red("all-reduce", f"group {each.group}: {each.error}", advice, nodes)
            continue
        rate = f"{each.bytes_per_s / 1e9:.2f} GB/s each rank"
        size = f"{each.size_bytes / 2**20:g} MiB"
        what = f"group {each.group}: {size} in {each.seconds * 1e3:.2f} ms, {rate} ({each.backend})"
        if each.bytes_per_s < SLOW_BYTES_PER_S[each.backend]:
            yield yellow("all-reduce", what, "slow: which interface and which kind of link is used?", nodes)
        else:
            yield green("all-reduce", what, nodes)


CHECKS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    check_silence,
    check_versions,
    check_environment,
    check_ray_settings,
    check_gpus,
    check_gpu_memory,
    check_peer_access,
    check_interface,
    check_shm,
    check_models,
    check_cache,
    check_port,
    check_api_key_file,
    check_placement,
    check_reductions,
)


def examine(facts: Facts) -> list[Finding]:
    """All findings."""
    if not facts.nodes:
        return list(check_silence(facts))
    return [finding for check in CHECKS for finding in check(facts)]
