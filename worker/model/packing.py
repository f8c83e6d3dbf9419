"""Packing: what config.json says about matrices that are stored in 4 bits (``quantization_config``)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from .config_file import ConfigFile

NIBBLES = 8
"""Numbers of 4 bits in the int32 that both formats are stored in."""

HEAD = "lm_head.weight"


class PackingMethod(enum.Enum):
    """The format of the tensors; ``model/packed_checkpoint.py`` draws them."""

    GPTQ = "gptq"
    AWQ = "awq"


@dataclass(frozen=True, slots=True)
class Packing:
    """Matrices whose numbers are 4 bits, with a scale and a zero point for each group of input channels."""

    method: PackingMethod
    group_size: int | None
    """Input channels of a group; None: one group holds all of them."""
    zero_offset: int = 0
    """What a stored zero point lacks: 1 in the first format of GPTQ."""
    is_permuted: bool = False
    """GPTQ's ``desc_act``: a group's input channels need not follow each other."""
    plain_modules: tuple[str, ...] = ()
    """Parts of the names of modules that are stored as usual."""
    packed_modules: tuple[str, ...] | None = None
    """The last parts of the names of modules that are packed; None: all that are not plain."""
    packs_head: bool = False

    def covers(self, name: str) -> bool:
        """Whether the matrix that would be called ``name`` (``….weight``) is packed."""
        if name == HEAD:
            return self.packs_head
        module = name.removesuffix(".weight")
        if any(part in module for part in self.plain_modules):
            return False
        return self.packed_modules is None or module.endswith(self.packed_modules)

    def describe(self) -> str:
        """For people: ``4-bit GPTQ in groups of 128``."""
        groups = "one group" if self.group_size is None else f"groups of {self.group_size}"
        return f"4-bit {self.method.name} in {groups}"


def read_packing(file: ConfigFile) -> Packing | None:
    """None: the matrices are stored as usual. Raises ConfigurationError for what is not read exactly."""
    source = file.within("quantization_config")
    if not source.values:
        return None
    known = [method.value for method in PackingMethod]
    method = PackingMethod(source.choice("quant_method", source.values.get("quant_method"), known))
    _refuse_other_bits(source)
    plain, only = _names(source, "modules_to_not_convert"), _names(source, "modules_in_block_to_quantize")
    group_size, packs_head = _group_size(source), source.flag("lm_head", default=False)
    if method is PackingMethod.AWQ:
        _choice(source, ("version", "format"), "gemm", ["gemm"])
        if not source.flag("zero_point", default=True):
            source.refuse("zero_point is False; known: True")
        return Packing(method, group_size, plain_modules=plain, packed_modules=only or None, packs_head=packs_head)
    name = _choice(source, ("checkpoint_format", "format"), "gptq", ["gptq", "gptq_v2"])
    return Packing(
        method,
        group_size,
        zero_offset=1 if name == "gptq" else 0,
        is_permuted=source.flag("desc_act", default=False),
        plain_modules=plain,
        packed_modules=only or None,
        packs_head=packs_head,
    )


def _refuse_other_bits(source: ConfigFile) -> None:
    bits = source.values.get("bits", source.values.get("w_bit"))
    if bits != 4:
        source.refuse(f"quantization_config.bits is {bits!r}; known: 4")
    source.choice("pack_dtype", source.values.get("pack_dtype") or "int32", ["int32"])
    if source.values.get("dynamic"):
        source.refuse("quantization_config.dynamic gives modules settings of their own, which are not supported")


def _group_size(source: ConfigFile) -> int | None:
    value = source.values.get("group_size", source.values.get("q_group_size", 128))
    if value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % NIBBLES:
        source.refuse(f"group_size is {value!r}; known: -1 and multiples of {NIBBLES}")
    return value


def _choice(source: ConfigFile, keys: tuple[str, ...], default: str, known: list[str]) -> str:
    """The value of the first key that has one, in lower case."""
    key = next((key for key in keys if source.values.get(key)), keys[0])
    value: Any = source.values.get(key, default)
    return source.choice(key, value.lower() if isinstance(value, str) else value, known)


def _names(source: ConfigFile, key: str) -> tuple[str, ...]:
    """A list of names, or a list of such lists, as one."""
    value = source.values.get(key) or []
    items = value if isinstance(value, list) else [None]
    names: list[Any] = [name for item in items for name in (item if isinstance(item, list) else [item])]
    if not all(isinstance(name, str) for name in names):
        source.refuse(f"{key} is {value!r}, expected names of modules")
    return tuple(names)
