"""Compiles every Triton kernel without a GPU: ``python compile_triton.py sm_80 sm_90 sm_100 gfx942``."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels import triton_attention, triton_cache, triton_elementwise, triton_sample

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def compile_kernel(kernel: Any, target: GPUTarget, types: dict[str, str], **constants: int) -> None:
    """Arguments that are neither typed nor constant are int32."""
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=target)
    assert compiled.asm, kernel.__name__


def compile_attention(target: GPUTarget, dtype: str, head_dim: int, max_query_len: int) -> None:
    launch = triton_attention.choose_launch(3, max_query_len, 4 if dtype == "fp32" else 2)
    pointers = dict.fromkeys(("query", "key_cache", "value_cache", "out"), f"*{dtype}")
    tables = dict.fromkeys(("tables", "seq_lens", "starts"), "*i32")
    compile_kernel(
        triton_attention.paged_attention_kernel,
        target,
        {**pointers, **tables, "scale": "fp32"},
        GROUP=3,
        HEAD_DIM=head_dim,
        DIM_PADDED=head_dim,
        ROWS=launch.rows,
        BLOCK_Q=launch.block_q,
        TILE=launch.tile,
        UPCAST=False,
    )


def compile_rest(target: GPUTarget, dtype: str) -> None:
    def pointers(*names: str) -> dict[str, str]:
        return dict.fromkeys(names, f"*{dtype}")

    compile_kernel(
        triton_cache.write_kv_kernel,
        target,
        {**pointers("key", "value", "key_cache", "value_cache"), "slots": "*i64"},
        NUM_HEADS=3,
        HEAD_DIM=64,
        HEADS_PADDED=4,
        DIM_PADDED=64,
    )
    compile_kernel(triton_cache.copy_blocks_kernel, target, {**pointers("cache"), "copies": "*i32"}, CHUNK=2048)
    compile_kernel(
        triton_elementwise.rms_norm_kernel,
        target,
        {**pointers("x", "weight", "residual", "out"), "eps": "fp32"},
        WIDTH=576,
        WIDTH_PADDED=1024,
        HAS_RESIDUAL=True,
    )
    compile_kernel(
        triton_elementwise.rotary_kernel,
        target,
        {**pointers("query", "key"), "positions": "*i64", "cos_sin": "*fp32"},
        NUM_QUERY_HEADS=9,
        NUM_KEY_HEADS=3,
        HALF=32,
        QUERY_PADDED=16,
        KEY_PADDED=4,
        HALF_PADDED=32,
    )
    compile_kernel(triton_elementwise.silu_mul_kernel, target, pointers("gate_up", "out"), BLOCK=1024)


def main(target: GPUTarget) -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        compile_rest(target, dtype)
        for head_dim in (64, 128):
            compile_attention(target, dtype, head_dim, max_query_len=1)
    compile_attention(target, "bf16", 64, max_query_len=512)
    integers = dict.fromkeys(("branches", "positions"), "*i32")
    compile_kernel(
        triton_sample.draw_kernel,
        target,
        {"logits": "*fp32", "temperatures": "*fp32", "seeds": "*i64", "best": "*fp64", "winner": "*i64", **integers},
        PART=triton_sample.PART,
        BLOCK=1024,
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(TARGETS[name])
        print(name)
