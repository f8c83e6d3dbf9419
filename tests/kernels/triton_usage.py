"""What a Triton kernel takes on a target, found by compiling it, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Case:
    """One kernel at one set of constants."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    """Types of arguments, ``*bf16`` for pointers; what is neither typed nor constant is int32."""
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int | None = None
    """None: the target's default."""
    hot: bool = False
    """It may not spill."""


@dataclass(frozen=True)
class Usage:
    registers: int
    spilled: int
    """Bytes of each thread's private memory: nothing but spilled registers lies there."""
    shared_bytes: int


def compile_case(case: Case, target: GPUTarget) -> Usage:
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr" if name in case.constants else "i32") for name in names}
    # As at a launch: tensors begin at multiples of 16 bytes, and the strides of their rows are multiples of 16 too.
    aligned = [
        i for i, name in enumerate(names) if signature[name][0] == "*" or name.endswith(("_stride", "_bytes", "_in"))
    ]
    source = ASTSource(
        case.kernel,
        signature,
        constexprs=dict(case.constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    stages = {} if case.num_stages is None else {"num_stages": case.num_stages}
    compiled = triton.compile(source, target=target, options={"num_warps": case.num_warps, **stages})
    # What does not fit Blackwell's memory for accumulators is compiled to this, without a word.
    assert "trap;" not in compiled.asm.get("ptx", ""), case.name
    shared = compiled.metadata.shared
    return nvidia_usage(compiled.asm["cubin"], shared) if target.backend == "cuda" else amd_usage(compiled.asm, shared)


def nvidia_usage(cubin: bytes, shared_bytes: int) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", dump.stdout)
    assert found, dump.stdout
    registers, stack, static, local = map(int, found.groups())
    return Usage(registers, stack + local, max(shared_bytes, static))


def amd_usage(asm: Mapping[str, str], shared_bytes: int) -> Usage:
    def count(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", asm["amdgcn"])[-1])

    # A scalar register that is spilled lies in a vector register, which costs little.
    return Usage(
        count("vgpr_count"), count("private_segment_fixed_size"), max(shared_bytes, count("group_segment_fixed_size"))
    )
