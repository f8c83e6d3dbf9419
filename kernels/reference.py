"""Every kernel in plain torch, on any device: what the fast twins are compared with.

Written to be read, not to be fast. Words: T tokens, S sequences, R rows of logits, V vocabulary, D head_dim. A
*slot* is one token's place in the cache, ``block * block_size + offset``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_cache import KVCache, KVPool, quantize_tokens
from .noise import gumbel_noise
from .quantized import DIGIT_RATIO, Fp8Weight, Int8Weight, Weight, dequantize
from .sampling import GREEDY_TEMPERATURE, Logprobs, Penalties, SamplingTensors, TokenRuns


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Writes the K and V of T tokens, ``[T, num_kv_heads, D]``, to their slots, quantised if the cache is.

    Slot -1 marks a padding row.
    """
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows].long()
    block_size = cache.key.shape[2]
    block, offset = slots // block_size, slots % block_size
    for x, target, scales in ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale)):
        if scales is None:
            target[block, :, offset] = x[rows].to(target.dtype)
        else:
            values, scales[block, :, offset] = quantize_tokens(x[rows], target.dtype)
            _indexable(target)[block, :, offset] = _indexable(values)


def _indexable(x: Tensor) -> Tensor:
    """fp8 as its bytes: not every version of torch indexes it on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def paged_attention(
    query: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch against paged K and V.

    ``query`` is ``[T, num_query_heads, D]``; the queries of sequence s are rows ``query_start_loc[s]`` to
    ``query_start_loc[s + 1]``, the last of them at position ``seq_lens[s] - 1``. ``block_tables`` int32
    ``[S, max_blocks]``, ``seq_lens`` int32 ``[S]``, ``query_start_loc`` int32 ``[S + 1]``. Query head h reads KV head
    ``h // (num_query_heads // num_kv_heads)``. Slots past a sequence's length are never read: they may hold NaN.
    A query sees the ``sliding_window`` keys up to its own position, all of them without one; ``soft_cap`` c makes a
    scaled score s c × tanh(s / c) (Gemma 2). Rows that belong to no sequence (padding) are left as they are in ``out``;
    a new tensor's are unspecified. ``max_query_len`` and ``max_seq_len`` are upper bounds, for kernels that size their
    launch by them.
    """
    out = torch.zeros_like(query) if out is None else out
    starts = query_start_loc.tolist()
    for index, (seq_len, start, end) in enumerate(zip(seq_lens.tolist(), starts[:-1], starts[1:], strict=True)):
        if end > start:
            keys = gather_sequence(cache.key, cache.key_scale, block_tables[index], seq_len).to(query.dtype)
            values = gather_sequence(cache.value, cache.value_scale, block_tables[index], seq_len).to(query.dtype)
            out[start:end] = causal_attention(query[start:end], keys, values, scale, sliding_window, soft_cap)
    return out


def gather_sequence(cache: Tensor, scales: Tensor | None, block_table: Tensor, seq_len: int) -> Tensor:
    """A sequence's K or V in order, ``[num_kv_heads, seq_len, D]``; of a quantised cache as float32."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    blocks = block_table[: -(-seq_len // block_size)]
    tiles = _indexable(cache).index_select(0, blocks).view(cache.dtype)
    if scales is not None:
        tiles = tiles.float() * scales.index_select(0, blocks)[..., None]
    return tiles.transpose(0, 1).reshape(num_kv_heads, blocks.numel() * block_size, head_dim)[:, :seq_len]


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """One sequence's last n tokens: query ``[n, num_query_heads, D]``, K and V ``[num_kv_heads, len, D]``."""
    num_queries, num_keys = query.shape[0], keys.shape[1]
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[0], dim=0).float() for x in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", query.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
    key_position = torch.arange(num_keys, device=query.device)
    visible = key_position <= position
    if sliding_window is not None:
        visible &= key_position > position - sliding_window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,hkd->qhd", weights, values).to(query.dtype)


def copy_blocks(pool: KVPool, copies: Tensor) -> None:
    """Copies blocks in all layers, K and V and scales; copies int32 ``[C, 2]``.

    A copy is (source, destination). In one call a block may be first a source and then a destination, not the other
    way round, and a destination once.
    """
    source, destination = copies[:, 0].long().to(pool.data.device), copies[:, 1].long().to(pool.data.device)
    for tensor in map(_indexable, pool.tensors()):
        tensor[:, :, destination] = tensor[:, :, source]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019), in float32 within.

    With a residual, ``residual + x`` is normed and returned as the new residual; it may reuse the residual's memory.
    What is multiplied by the weight is rounded to the weight's dtype first: x's, as Llama does, or float32, as Gemma.
    """
    total = x if residual is None else residual + x
    return _normed(total, weight, eps), total


def norm_heads(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of each head by itself (Dehghani et al. 2023, query/key normalisation); may work in place.

    query, key ``[T, heads, D]``; the weights ``[D]``, both of one dtype.
    """
    return _normed(query, query_weight, eps), _normed(key, key_weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps).to(weight.dtype) * weight).to(x.dtype)


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021), the "rotate half" layout of Hugging Face's Llama; may work in place.

    query, key ``[T, heads, D]``; positions integer ``[T]``; cos_sin float32 ``[max_positions, R]`` = cos | sin. Of each
    head the first R numbers are rotated, R <= D, the others left as they are.
    """
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, kept = x.split_with_sizes([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    low, high = rotated.float().chunk(2, dim=-1)
    return torch.cat(((low * cos - high * sin).to(x.dtype), (high * cos + low * sin).to(x.dtype), kept), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[T, 2 * I]``, gate first (SwiGLU, Shazeer 2020)."""
    return _gated(F.silu, gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up``, with GELU's tanh approximation ("gelu_pytorch_tanh"; Hendrycks and Gimpel 2016)."""
    return _gated(partial(F.gelu, approximate="tanh"), gate_up)


def gelu_erf_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up``, with GELU by its definition ("gelu")."""
    return _gated(F.gelu, gate_up)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate.float()).to(up.dtype) * up


def prepare_linear(weight: Weight, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A function that maps ``[T, in]`` to ``[T, out]`` by ``weight[out, in]``, for many calls.

    The product is given in the input's dtype. With a plain weight it is taken in the weight's; with int8 and fp8 the
    input is quantised too, each token by its largest value, and what is left of the sum's error is its rounding.
    """
    plain = dequantize(weight)
    dtype_of_input = weight.values.dtype if isinstance(weight, Int8Weight | Fp8Weight) else None
    num_digits = weight.input_digits if isinstance(weight, Int8Weight) else 1

    def product(x: Tensor) -> Tensor:
        if dtype_of_input is None:
            return F.linear(x.to(plain.dtype), plain, bias).to(x.dtype)
        rows = F.linear(_rounded_input(x, dtype_of_input, num_digits), plain)
        return (rows if bias is None else rows + bias).to(x.dtype)

    return product


def _rounded_input(x: Tensor, dtype: torch.dtype, num_digits: int) -> Tensor:
    """What is multiplied with a quantised weight in x's place, float32."""
    values, scales = quantize_tokens(x, dtype)
    rounded = values.float() * scales[:, None]
    if num_digits == 1:
        return rounded
    unit = scales[:, None] / DIGIT_RATIO
    return rounded + ((x.float() - rounded) / unit).round() * unit


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """Draws one token for each row of logits, float32 ``[R, V]``, statelessly. The logits are left as they are.

    Returns int64 ``[R]``: -1 where a row holds NaN, its largest logit is not finite, or all tokens are banned.

    Order: penalties, bias, bans and the allow-mask, temperature, min_p, top_k, then top_p of what these left,
    renormalised (vLLM's order). Equals share their fate: min_p keeps every token with at least ``min_p`` times the best
    token's probability, top_k every token whose logit is not below the k-th best, top_p every token for which the
    tokens strictly likelier than it hold less than ``top_p`` of the probability; the best token always stays. The draw
    is the largest of scaled logit + Gumbel noise (Gumbel-max trick; Maddison, Tarlow, Minka 2014). Everything past the
    temperature is float64, so that backends agree though their sums and logarithms round differently.
    """
    edited = edit_logits(logits, how)
    is_valid = logits.amax(dim=-1).isfinite() & edited.amax(dim=-1).isfinite()
    drawn = how.temperature > GREEDY_TEMPERATURE
    scaled = edited.double() / torch.where(drawn, how.temperature, 1.0)[:, None].double()
    scaled = filter_top_p(filter_top_k(filter_min_p(scaled, how.min_p), how.top_k), how.top_p)
    noise = gumbel_noise(how.seeds, how.branches, how.positions, logits.shape[-1])
    token_ids = torch.where(drawn, (scaled + noise).argmax(dim=-1), edited.argmax(dim=-1))
    return torch.where(is_valid, token_ids, -1)


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Logprobs:
    """Log-probabilities of one token, int64 ``[R]``, and of the ``k`` likeliest, in each row of float32 ``[R, V]``.

    ``k`` is 0 to V. A token id outside of the vocabulary stands for none.
    """
    vocab_size, is_valid = logits.shape[-1], logits.amax(dim=-1).isfinite()
    has_token = is_valid & (token_ids >= 0) & (token_ids < vocab_size)
    every = logits.double().log_softmax(dim=-1).float()
    chosen = token_ids.clamp(0, vocab_size - 1)[:, None]
    ranks = 1 + (logits > logits.gather(-1, chosen)).sum(dim=-1)
    top = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return Logprobs(
        torch.where(has_token, every.gather(-1, chosen).squeeze(-1), torch.nan),
        torch.where(has_token, ranks, 0).int(),
        torch.where(is_valid[:, None], top, -1).int(),
        torch.where(is_valid[:, None], every.gather(-1, top), torch.nan),
    )


def edit_logits(logits: Tensor, how: SamplingTensors) -> Tensor:
    """The logits with penalties and bias, and -inf for tokens that are banned or not allowed."""
    if how.penalties is not None:
        row, token = row_of_each(how.penalties.seen), how.penalties.seen.tokens.long()
        logits = logits.index_put((row, token), penalised(logits[row, token], row, how.penalties))
    if how.bias is not None:
        biased = row_of_each(how.bias.runs), how.bias.runs.tokens.long()
        logits = logits.index_put(biased, how.bias.values, accumulate=True)
    if how.banned is not None:
        banned = row_of_each(how.banned), how.banned.tokens.long()
        logits = logits.index_put(banned, logits.new_tensor(-torch.inf))
    if how.allowed is not None:
        logits = logits.masked_fill(~unpacked(how.allowed, logits.shape[-1]), -torch.inf)
    return logits


def unpacked(words: Tensor, count: int) -> Tensor:
    """int32 ``[R, ceil(count / 32)]`` → bool ``[R, count]``: bit i % 32 of word i // 32."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> bits) & 1).bool().flatten(1)[:, :count]


def row_of_each(runs: TokenRuns) -> Tensor:
    """int64 ``[N]``."""
    lens = runs.starts.diff()
    return torch.arange(lens.numel(), device=lens.device).repeat_interleave(lens)


def penalised(x: Tensor, row: Tensor, penalties: Penalties) -> Tensor:
    """``x`` ``[N]``: the logits of ``penalties.seen``, whose rows are ``row``."""
    repetition, counts = penalties.repetition[row], penalties.counts
    x = torch.where(x > 0, x / repetition, x * repetition)
    return x - counts * penalties.frequency[row] - (counts > 0) * penalties.presence[row]


def filter_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Tokens with less than ``min_p`` times the best one's probability become -inf."""
    smallest = logits.amax(dim=-1, keepdim=True) + min_p[:, None].double().log()
    return logits.masked_fill(logits < smallest, -torch.inf)


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
