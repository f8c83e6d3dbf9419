"""Model folders as they come, in shards or as GGUF, and as they should not be."""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
NUM_SHARDS = 3


def shard_name(number: int) -> str:
    """``number`` counts from 1."""
    return f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"


def save_sharded(source: Path, folder: Path) -> None:
    """The model of ``source`` in three shards with an index, and all that is beside its weights."""
    folder.mkdir(exist_ok=True)
    link(source, folder, but={WHOLE})
    tensors = load_file(source / WHOLE)
    shard_of = {name: shard_name(1 + number % NUM_SHARDS) for number, name in enumerate(sorted(tensors))}
    for shard in set(shard_of.values()):
        save_file(
            {name: tensors[name] for name, of in shard_of.items() if of == shard}, folder / shard, {"format": "pt"}
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def save_stray(folder: Path) -> None:
    """What an older download may have left: a whole file that no index names, with other weights."""
    save_file({"model.norm.weight": torch.zeros(576)}, folder / WHOLE, {"format": "pt"})


def link(source: Path, folder: Path, *, but: Container[str] = ()) -> None:
    """All files of ``source``, without a copy of what they hold."""
    for file in source.iterdir():
        if file.name not in but and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())


def change_json(file: Path, **changes: Any) -> None:
    """Set the keys of a JSON file, in a copy where it was a link; None takes one away."""
    content = json.loads(file.read_text()) | changes
    file.unlink()
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def requantize(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The GGUF file ``source`` with its matrices in another type: metadata and order of rows stay as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            of_items = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], of_items)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
