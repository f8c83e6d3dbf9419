"""The Triton kernels at the constants that models ask for: a function for each file of kernels, in ``CASES``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton
from triton_usage import Case

from octavo.kernels import (
    triton_adapters,
    triton_attention,
    triton_cache,
    triton_elementwise,
    triton_experts,
    triton_experts_kernels,
    triton_linear_int4,
    triton_linear_scaled,
    triton_logprobs,
    triton_sample,
    triton_sample_filter,
)
from octavo.kernels.triton_attention_kernels import paged_attention_kernel, reduce_splits_kernel
from octavo.kernels.triton_attention_launch import Launch, Shape, choose_launches, invariant_launch
from octavo.kernels.triton_device import Device
from octavo.kernels.triton_linear_tiles import TILES_IN_GROUP, Tile

DEVICES = {
    "sm_80": Device(108, capability=80),
    "sm_90": Device(132, capability=90),
    "sm_100": Device(148, capability=100),
    "gfx942": Device(304, is_amd=True),
}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}


def adapter_cases(target: str) -> Iterator[Case]:
    for dtype, is_second in (("bf16", False), ("bf16", True), ("fp32", False), ("fp32", True)):
        tile = triton_adapters.TILES[BYTES[dtype]]
        yield Case(
            f"adapters {'second' if is_second else 'first'} {dtype}",
            triton_adapters.adapter_kernel,
            {**pointers(dtype, "x", "weight", "out"), "order": "*i64", "starts": "*i32"},
            {
                "IS_SECOND": is_second,
                "NUM_SLOTS": 64,
                "SLOTS_PADDED": 64,
                "ROWS": tile.rows,
                "COLUMNS": tile.columns,
                "INNER": tile.inner,
                "UPCAST": False,
            },
            **tile.options(DEVICES[target]),
            hot=True,
        )


def attention_cases(target: str) -> Iterator[Case]:
    device = DEVICES[target]
    wanted: list[tuple[str, str, int, tuple[str, ...], tuple[bool, ...]]] = [
        ("bf16", "bf16", 128, (), (True, False)),
        ("bf16", "fp8", 128, (), (True,)),
        ("fp32", "fp32", 64, (), (False,)),
        ("bf16", "bf16", 256, ("cap_scale",), (True, False)),
    ]
    if target in ("sm_80", "gfx942"):
        # They have the least registers and shared memory, and these take the most, also to compile.
        wanted.append(("bf16", "int8", 128, (), (False,)))
        wanted.append(("fp16", "fp16", 256, ("sliding_window", "cap_scale"), (False,)))
    for dtype, cache, head_dim, options, one_block in wanted:
        shape = Shape(4, head_dim, BYTES[dtype], BYTES[cache])
        for launch in choose_launches(shape, device, 8, 8, 512, 8192):
            if launch.one_block in one_block:
                name = f"{cache} {head_dim} {'decode' if launch.one_block else 'prefill'}{' capped' * bool(options)}"
                yield attention_case(name, dtype, cache, shape, launch, device, options)
    shape = Shape(4, 128, 2, 2)
    yield attention_case("bf16 128 batch invariant", "bf16", "bf16", shape, invariant_launch(shape, device), device, ())
    yield Case(
        "attention reduce 256",
        reduce_splits_kernel,
        {
            **pointers("fp32", "partial", "partial_sums"),
            **pointers("i32", "seq_lens", "starts"),
            "out": "*bf16",
        },
        {
            "sliding_window": None,
            "HEAD_DIM": 256,
            "DIM_PADDED": 256,
            "BLOCK_Q": 4,
            "TILE": 32,
            "NUM_SPLITS": 64,
            "CHUNK": triton_attention.REDUCED_AT_ONCE,
        },
        hot=True,
    )


def attention_case(
    name: str, dtype: str, cache: str, shape: Shape, launch: Launch, device: Device, options: tuple[str, ...]
) -> Case:
    stored = {"fp8": "fp8e4nv" if device.has_fp8 else "u8", "int8": "i8"}.get(cache, cache)
    types = {
        **pointers(dtype, "query", "out"),
        **pointers(stored, "key_cache", "value_cache"),
        **pointers("fp32", "key_scales", "value_scales", "partial", "partial_sums"),
        **pointers("i32", "tables", "seq_lens", "starts"),
        "cap_scale": "fp32",
        "score_scale": "fp32",
    }
    absent = {"sliding_window", "cap_scale"} - set(options)
    absent |= set() if stored != dtype else {"key_scales", "value_scales"}
    absent |= set() if launch.num_splits > 1 else {"partial", "partial_sums"}
    constants = {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "DIM_PADDED": shape.dim_padded,
        "BLOCK_SIZE": 16,
        "ROWS": launch.rows,
        "BLOCK_Q": launch.block_q,
        "TILE": launch.tile,
        "NUM_SPLITS": launch.num_splits,
        "ONE_BLOCK": launch.one_block,
        "FULL_TILES": launch.full_tiles,
        "UPCAST": False,
    }
    return Case(
        f"attention {name}",
        paged_attention_kernel,
        {name: type_ for name, type_ in types.items() if name not in absent},
        {**dict.fromkeys(absent), **constants},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        hot=True,
    )


def expert_cases(target: str) -> Iterator[Case]:
    """Qwen3-MoE's 128 experts, of which 8 are chosen: what finds a tile's expert is largest for them."""
    sizes = {"NUM_EXPERTS": 128, "EXPERTS_PADDED": 128}
    yield Case(
        "experts route",
        triton_experts_kernels.route_kernel,
        {"logits": "*bf16", "experts": "*i32", "weights": "*fp32"},
        {**sizes, "NUM_CHOSEN": 8, "CHOSEN_PADDED": 8, "RENORMALISE": True},
        hot=True,
    )
    yield Case(
        "experts combine",
        triton_experts_kernels.combine_kernel,
        pointers("bf16", "parts", "out"),
        {"NUM_CHOSEN": 8, "BLOCK": triton_experts.COMBINE_BLOCK},
        hot=True,
    )
    products = [(of, tile) for of in ("bf16", "fp32") for tile in triton_experts.TILES[BYTES[of]]]
    for dtype, tile in products:
        types = {
            **pointers(dtype, "x", "weight", "out"),
            **pointers("i32", "starts"),
            "order": "*i64",
            "weights": "*fp32",
        }
        constants = {**sizes, "ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "UPCAST": False}
        for part, kernel, more in (
            ("gate and up", triton_experts_kernels.gate_up_kernel, {"NUM_CHOSEN": 8}),
            ("down", triton_experts_kernels.down_kernel, {}),
        ):
            name = f"experts {part} {dtype}, {tile.rows} rows"
            yield Case(name, kernel, types, {**constants, **more}, **tile.options(DEVICES[target]), hot=True)


def linear_cases(target: str) -> Iterator[Case]:
    """Decode and prefill, and the batch-invariant tile. Groups of 32 take more registers than longer ones."""
    tiles = triton_linear_scaled.TILES_OF_BYTES
    yield gemm_case("int8 decode", target, "i8", tiles[-1], scratch="*i32")
    yield gemm_case("int8 prefill", target, "i8", tiles[0])
    if target in ("sm_90", "sm_100"):
        yield gemm_case("fp8 prefill", target, "fp8e4nv", tiles[0])
    yield gemm_case("invariant bf16", target, "bf16", triton_linear_scaled.FIXED_TILES[2])
    int4_tiles = triton_linear_int4.tiles_for(DEVICES[target])
    yield int4_case("int4 decode, groups of 32", target, int4_tiles[-1], run=1, scratch="*fp32")
    yield int4_case("int4 prefill, groups of 128", target, int4_tiles[0], run=4)
    yield Case(
        "linear quantize_rows int8",
        triton_linear_scaled.quantize_rows_kernel,
        {"x": "*bf16", "values": "*i8", "scales": "*fp32"},
        {"LARGEST": 127.0, "SMALLEST_SCALE": 1e-8, "RATIO": 254.0, "BLOCK": 16384},
        num_warps=16,
        hot=True,
    )


def gemm_case(name: str, target: str, dtype: str, tile: Tile, scratch: str | None = None) -> Case:
    scales = dict.fromkeys(("row_scales", "column_scales"), None if dtype == "bf16" else "*fp32")
    types = {"x": f"*{dtype}", "weight": f"*{dtype}", **scales}
    return tile_case(name, target, triton_linear_scaled.gemm_kernel, types, {"INNER": tile.inner}, tile, scratch)


def int4_case(name: str, target: str, tile: Tile, run: int, scratch: str | None = None) -> Case:
    sixteen, mantissa = triton_linear_int4.SIXTEEN[torch.bfloat16]
    constants = {
        "QUARTERS_PER_GROUP": run,
        "RUN": run,
        "QUARTER": triton_linear_int4.QUARTER,
        "EVEN": True,
        "SIXTEEN": sixteen,
        "MANTISSA": mantissa,
        "PTX": not DEVICES[target].is_amd,
    }
    types = {"x": "*bf16", "words": "*i16", **pointers("fp16", "scales", "minimums")}
    return tile_case(name, target, triton_linear_int4.int4_gemm_kernel, types, constants, tile, scratch)


def tile_case(
    name: str,
    target: str,
    kernel: Any,
    types: Mapping[str, str | None],
    constants: Mapping[str, object],
    tile: Tile,
    scratch: str | None,
) -> Case:
    """Arguments without a type are absent; ``scratch`` has one if sums are split."""
    types = {**types, "out": "*bf16", "bias": None, "scratch": scratch, "counters": scratch and "*i32"}
    return Case(
        f"linear {name}",
        kernel,
        {name: type_ for name, type_ in types.items() if type_ is not None},
        {
            **{name: None for name, type_ in types.items() if type_ is None},
            **constants,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "GROUP": TILES_IN_GROUP,
            "UPCAST": False,
        },
        **tile.options(DEVICES[target]),
        hot=True,
    )


def cache_cases(target: str) -> Iterator[Case]:
    for dtype, stored, largest in (("bf16", "bf16", None), ("bf16", "i8", 127.0), ("bf16", "u8", 448.0)):
        scales = pointers("fp32", "key_scales", "value_scales")
        yield Case(
            f"write_kv {dtype} to {stored}",
            triton_cache.write_kv_kernel,
            {
                **pointers(dtype, "key", "value"),
                **pointers(stored, "key_cache", "value_cache"),
                **({} if largest is None else scales),
                "slots": "*i64",
            },
            {
                **(dict.fromkeys(scales) if largest is None else {}),
                "LARGEST_VALUE": largest,
                "SMALLEST": 1e-8,
                "BLOCK_SIZE": 16,
                "NUM_HEADS": 8,
                "HEAD_DIM": 128,
                "HEADS_PADDED": 8,
                "DIM_PADDED": 128,
            },
            hot=True,
        )
    yield Case(
        "copy_blocks",
        triton_cache.copy_blocks_kernel,
        {"data": "*u8", "copies": "*i32"},
        {"CHUNK": triton_cache.COPY_CHUNK},
        hot=True,
    )


def elementwise_cases(target: str) -> Iterator[Case]:
    for activation, (dtype, width) in enumerate((("fp32", 576), ("bf16", 4096), ("fp16", 16384))):
        yield Case(
            f"rms_norm {dtype} {width}",
            triton_elementwise.rms_norm_kernel,
            {**pointers(dtype, "x", "weight", "residual", "out"), "eps": "fp32"},
            {"WIDTH": width, "WIDTH_PADDED": triton.next_power_of_2(width), "HAS_RESIDUAL": True},
            num_warps=triton_elementwise.rms_norm_warps(width),
            hot=True,
        )
        yield Case(
            f"norm_heads {dtype}",
            triton_elementwise.norm_heads_kernel,
            {**pointers(dtype, "query", "key", "query_weight", "key_weight"), "eps": "fp32"},
            {
                "NUM_QUERY_HEADS": 40,
                "NUM_KEY_HEADS": 8,
                "WIDTH": 128,
                "QUERY_PADDED": 64,
                "KEY_PADDED": 8,
                "WIDTH_PADDED": 128,
            },
            hot=True,
        )
        yield Case(
            f"rotary {dtype}",
            triton_elementwise.rotary_kernel,
            {**pointers(dtype, "query", "key"), "positions": "*i64", "cos_sin": "*fp32"},
            {
                "NUM_QUERY_HEADS": 9,
                "NUM_KEY_HEADS": 3,
                "WIDTH": 64,
                "HALF": 32,
                "QUERY_PADDED": 16,
                "KEY_PADDED": 4,
                "HALF_PADDED": 32,
            },
            hot=True,
        )
        yield Case(
            f"act_mul {dtype}",
            triton_elementwise.act_mul_kernel,
            pointers(dtype, "gate_up", "out"),
            {"ACTIVATION": activation, "BLOCK": triton_elementwise.ACT_BLOCK},
            hot=True,
        )


def sample_cases(target: str) -> Iterator[Case]:
    rows = pointers("fp32", "temperatures", "top_ps", "min_ps", "thresholds") | {"top_ks": "*i32"}
    parts = {"best_of": "*fp64", "winner_of": "*i32"}
    edits = pointers("fp32", "logits", "repetitions", "frequencies", "presences", "values")
    runs = pointers("i32", "tokens", "starts", "counts")
    for filtered, edited in ((False, False), (True, True)):
        yield Case(
            f"draw{' filtered, edited' if filtered else ''}",
            triton_sample.draw_kernel,
            {**rows, **parts, **pointers("fp32", "given", "logits"), **pointers("i32", "branches", "positions")}
            | {"seeds": "*i64"},
            {"FILTERED": filtered, "EDITED": edited, "PART": triton_sample.PART, "BLOCK": triton_sample.DRAW_BLOCK},
            hot=True,
        )
    yield Case(
        "sampling threshold",
        triton_sample_filter.threshold_kernel,
        {**rows, "logits": "*fp32"},
        {"BLOCK": triton_sample_filter.BLOCK},
        num_warps=triton_sample_filter.NUM_WARPS,
        hot=True,
    )
    finish = {**parts, "token_ids": "*i64"}
    yield Case("sampling finish", triton_sample.finish_kernel, finish, {"PARTS_PADDED": 16}, hot=True)
    edit = {"BLOCK": triton_sample.EDIT_BLOCK}
    yield Case("sampling penalties", triton_sample.penalise_kernel, {**edits, **runs}, edit)
    yield Case("sampling bias", triton_sample.bias_kernel, {**edits, **runs}, edit)
    yield Case("sampling bans", triton_sample.ban_kernel, {**edits, **runs}, edit)
    mask = {**edits, "allowed": "*i32"}
    yield Case("sampling mask", triton_sample.mask_kernel, mask, {"BLOCK": triton_sample.MASK_BLOCK}, hot=True)


def logprob_cases(target: str) -> Iterator[Case]:
    types = {
        **pointers("fp32", "logits", "peak_of", "sum_of", "logprobs", "top_logprobs"),
        **pointers("i32", "larger_of", "ranks", "top_token_ids"),
        **pointers("i64", "token_ids", "keys_of", "keys"),
    }
    part = {"PART": triton_logprobs.PART}
    yield Case(
        "logprobs of a part", triton_logprobs.part_kernel, types, part, num_warps=triton_logprobs.PART_WARPS, hot=True
    )
    finish = {"PARTS_PADDED": 64, "BLOCK": triton_logprobs.TOP_BLOCK}
    yield Case("logprobs finish", triton_logprobs.finish_kernel, types, finish, hot=True)


CASES: tuple[Callable[[str], Iterator[Case]], ...] = (
    adapter_cases,
    attention_cases,
    cache_cases,
    elementwise_cases,
    expert_cases,
    linear_cases,
    logprob_cases,
    sample_cases,
)


def pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")
