"""Every kernel in plain torch, on any device: what the fast twins are compared with.

Written to be read, not to be fast. Words: T tokens, S sequences, R rows of logits, V vocabulary, D head_dim. A
*slot* is one token's place in the cache, ``block * block_size + offset``. One layer's cache is
``[num_blocks, num_kv_heads, block_size, D]``, so the tile of one block and one head is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import gumbel_noise


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the K and V of T tokens, ``[T, num_kv_heads, D]``, to their slots; slot -1 marks a padding row."""
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows].long()
    block_size = key_cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, :, offset] = key[rows].to(key_cache.dtype)
    value_cache[block, :, offset] = value[rows].to(value_cache.dtype)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch against paged K and V.

    ``query`` is ``[T, num_query_heads, D]``; the queries of sequence s are rows ``query_start_loc[s]`` to
    ``query_start_loc[s + 1]``, the last of them at position ``seq_lens[s] - 1``. ``block_tables`` int32
    ``[S, max_blocks]``, ``seq_lens`` int32 ``[S]``, ``query_start_loc`` int32 ``[S + 1]``. Query head h reads KV head
    ``h // (num_query_heads // num_kv_heads)``. Slots past a sequence's length are never read: they may hold NaN.
    Rows that belong to no sequence (padding) are left as they are in ``out``; a new tensor's are unspecified.
    ``max_query_len`` and ``max_seq_len`` are upper bounds, for kernels that size their launch by them.
    """
    out = torch.zeros_like(query) if out is None else out
    starts = query_start_loc.tolist()
    for index, (seq_len, start, end) in enumerate(zip(seq_lens.tolist(), starts[:-1], starts[1:], strict=True)):
        if end > start:
            keys = gather_sequence(key_cache, block_tables[index], seq_len)
            values = gather_sequence(value_cache, block_tables[index], seq_len)
            out[start:end] = causal_attention(query[start:end], keys, values, scale)
    return out


def gather_sequence(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """A sequence's K or V in order, ``[num_kv_heads, seq_len, D]``."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    num_blocks = -(-seq_len // block_size)
    tiles = cache.index_select(0, block_table[:num_blocks])
    return tiles.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)[:, :seq_len]


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One sequence's last n tokens: query ``[n, num_query_heads, D]``, K and V ``[num_kv_heads, len, D]``."""
    num_queries, num_keys = query.shape[0], keys.shape[1]
    position = torch.arange(num_keys - num_queries, num_keys, device=query.device)
    mask = torch.arange(num_keys, device=query.device) <= position[:, None]
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def copy_blocks(kv_cache: Tensor, copies: Tensor) -> None:
    """Copies blocks in all layers, K and V: ``kv_cache[num_layers, 2, num_blocks, …]``, copies ``[C, 2]``.

    A copy is (source, destination). In one call a block may be first a source and then a destination, not the other
    way round, and a destination once.
    """
    source, destination = copies[:, 0].long().to(kv_cache.device), copies[:, 1].long().to(kv_cache.device)
    kv_cache[:, :, destination] = kv_cache[:, :, source]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019), in float32 within.

    With a residual, ``residual + x`` is normed and returned as the new residual; it may reuse the residual's memory.
    """
    total = x if residual is None else residual + x
    return F.rms_norm(total.float(), total.shape[-1:], None, eps).to(x.dtype) * weight, total


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021), the "rotate half" layout of Hugging Face's Llama; may work in place.

    query, key ``[T, heads, D]``; positions integer ``[T]``; cos_sin float32 ``[max_positions, D]`` = cos | sin.
    """
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 * I]``, gate first (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).to(up.dtype) * up


def prepare_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A function that maps ``[T, in]`` to ``[T, out]`` by ``weight[out, in]``, for many calls.

    The product is taken in the weight's dtype and given in the input's.
    """

    def product(x: Tensor) -> Tensor:
        return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

    return product


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    branches: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draws one token for each row, statelessly: int64 ``[R]``.

    logits float32 ``[R, V]``; temperature float32 (0: the best token, the lowest id of equals); top_k int32 (V: off);
    top_p float32 (1.0: off); seeds int64 (bit pattern of the unsigned seed); branches, positions int32; all ``[R]``.

    Order: temperature, then top_k, then top_p of what top_k left, renormalised. Equals share their fate: top_k keeps
    every token whose logit is not below the k-th best, top_p every token for which the tokens strictly likelier than
    it hold less than ``top_p`` of the probability; the best token always stays. The draw is the largest of scaled
    logit + Gumbel noise (Gumbel-max trick; Maddison, Tarlow, Minka 2014). Everything past the logits is float64, so
    that backends agree though their sums and logarithms round differently.
    """
    greedy = logits.argmax(dim=-1)
    drawn = temperature > 0
    scaled = logits.double() / torch.where(drawn, temperature, 1.0)[:, None].double()
    scaled = filter_top_p(filter_top_k(scaled, top_k), top_p)
    noise = gumbel_noise(seeds, branches, positions, logits.shape[-1])
    return torch.where(drawn, (scaled + noise).argmax(dim=-1), greedy)


def filter_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Logits below the row's k-th best become -inf; equals of the k-th best stay."""
    ordered = logits.sort(dim=-1, descending=True).values
    kth = ordered.gather(-1, (top_k.long() - 1).clamp(0, logits.shape[-1] - 1)[:, None])
    return logits.masked_fill(logits < kth, -torch.inf)


def filter_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """A token stays while the tokens strictly likelier than it hold less than top_p; the best always stays."""
    ordered = logits.sort(dim=-1, descending=True).values
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    num_kept = (before < top_p[:, None]).sum(dim=-1).clamp(min=1)
    smallest = ordered.gather(-1, num_kept[:, None] - 1)
    keep = (logits >= smallest) | (top_p[:, None] >= 1.0)
    return logits.masked_fill(~keep, -torch.inf)
