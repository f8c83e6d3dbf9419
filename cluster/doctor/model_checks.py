"""Checks of files: the models on every node, equal, and a cache folder with room."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from .facts import EMBEDDED, Facts, Model, Node
from .findings import Finding, green, red, yellow

CACHE_NEEDED_BYTES = 2 * 2**30
"""For compiled kernels and a converted small model."""


def check_models(facts: Facts) -> Iterator[Finding]:
    head = next((node for node in facts.nodes if node.is_head), facts.nodes[0])
    for index, model in enumerate(head.models):
        names = {name for node in facts.nodes for name in node.models[index].files}
        faults = [fault for node in facts.nodes for fault in _faults(node, node.models[index], head, model, names)]
        yield from faults
        if not faults:
            yield green("model", _described(model))


def _described(model: Model) -> str:
    if not model.files:
        return f"{model.name}: verified by its checksum when it is made"
    size = sum(file.size_bytes for file in model.files.values())
    return f"{model.name}: {len(model.files)} files, {size / 2**30:.2f} GiB"


def _faults(node: Node, model: Model, head: Node, reference: Model, names: AbstractSet[str]) -> Iterator[Finding]:
    """``reference`` is the model as the head has it, ``names`` are those of the files that any node has."""
    if model.error is not None:
        yield red("model", f"{model.name}: {model.error}", "copy the model there, or correct its name", node.address)
        return
    if model.folder is None and model.name != EMBEDDED:
        what = f"{model.name} is not in the hub's cache"
        yield yellow("model", what, "it will be fetched at the start; octavo model fetch does it before", node.address)
        return
    if missing := sorted(names - model.files.keys()):
        what = f"{model.name}: no {', '.join(missing)}, which other nodes have"
        yield red("model", what, "copy the whole folder there", node.address)
    for name in sorted(reference.files.keys() & model.files.keys()):
        theirs, wanted = model.files[name], reference.files[name]
        if theirs.size_bytes != wanted.size_bytes:
            what = f"{model.name}: {name} has {theirs.size_bytes:,} bytes, {wanted.size_bytes:,} on {head.address}"
            yield red("model", what, "copy it again: it is another version, or only half there", node.address)
        elif theirs.digest != wanted.digest:
            what = f"{model.name}: the content of {name} is not that on {head.address}"
            yield red("model", what, "copy it again: it is another version", node.address)


def check_cache(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.cache_error is not None:
            yield red("cache folder", node.cache_error, "give a folder that can be written (--cache-dir)", node.address)
        elif node.cache_free_bytes is not None and node.cache_free_bytes < CACHE_NEEDED_BYTES:
            what = f"{node.cache_free_bytes / 2**30:.1f} GiB free at {node.cache_dir}"
            advice = f"{CACHE_NEEDED_BYTES / 2**30:g} GiB at least are needed; make room, or use --cache-dir"
            yield red("cache folder", what, advice, node.address)
        else:
            yield green("cache folder", f"{(node.cache_free_bytes or 0) / 2**30:.0f} GiB free", node.address)
