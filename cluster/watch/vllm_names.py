"""Metrics by vLLM's names beside Octavo's, where they mean the same: for dashboards and autoscalers made for vLLM.

A series' worker group or gateway becomes its ``engine``. Histograms have vLLM's buckets, or more of them. Also the two
names are given that vLLM has replaced and that many dashboards still use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_SAME = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success"),
    *("prompt_tokens", "generation_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_time_per_output_token_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_params_n", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
)

VLLM_NAMES: dict[str, tuple[str, ...]] = {
    **{f"octavo_{name}": (f"vllm:{name}",) for name in _SAME},
    "octavo_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "octavo_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "octavo_engine_step_tokens": ("vllm:iteration_tokens_total",),
    "octavo_prompt_cached_tokens": ("vllm:prompt_tokens_cached",),
    "octavo_router_queued_requests": ("vllm:num_requests_waiting",),
}
"""Family → vLLM's. Who waits in the router waits for vLLM too: autoscalers look at the sum."""

_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")
_FULL = {name + suffix: tuple(v + suffix for v in names) for name, names in VLLM_NAMES.items() for suffix in _SUFFIXES}
_SERIES = re.compile(r"^((?:# (?:HELP|TYPE) )?)([A-Za-z_:]\w*)(.*)$", re.MULTILINE)
_ENGINE = re.compile(r'([{,])(?:group|gateway)="')
_MODEL = re.compile(r'([{,])model="')


def vllm_lines(text: str) -> str:
    """What ``text``, a whole exposition, says in vLLM's names; to be merged with it."""
    return "".join(f"{line}\n" for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
    for comment, name, rest in _SERIES.findall(text):
        for theirs in _FULL.get(name, ()):
            yield f"{comment}{theirs}{rest if comment else _relabelled(name, rest)}"


def _relabelled(name: str, rest: str) -> str:
    if name.startswith("octavo_router_"):
        return _MODEL.sub(r'\1engine="router",model_name="', rest, count=1)
    return _ENGINE.sub(r'\1engine="', rest, count=1)
