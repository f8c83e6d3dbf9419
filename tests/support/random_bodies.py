"""Random bodies of the endpoints that generate: half of them meant to be good, so that what lies behind the schemas is
met as well."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from octavo.cluster.api.request.schemas import ChatCompletionRequest, CompletionRequest

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2, 3)
words = st.text(max_size=8) | st.sampled_from(["text", "user", "system", "smollm2", "none", "auto", "json_object"])
json = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from(["system", "user", "assistant", "developer"])
good_messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=20)}), min_size=1, max_size=3
)
messages = good_messages | st.lists(
    st.fixed_dictionaries({"role": roles | json}, optional={"content": json, "name": json, "extra": json}), max_size=2
)
prompts = st.text(max_size=20) | st.lists(st.integers(0, 60_000), max_size=3) | st.lists(st.text(max_size=5)) | json
token_ids = st.lists(st.integers(0, 50_000), min_size=1, max_size=3)
stops = st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3)
good_fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 2**63 - 1),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(st.integers(0, 50_000).map(str), st.floats(-100, 100), max_size=3),
        "allowed_token_ids": token_ids,
        "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "max_tokens": st.integers(0, 40),
        "n": st.integers(1, 5),
        "use_beam_search": st.booleans(),
        "beam_width": st.integers(1, 40),
        "cache_prompt": st.booleans(),
        "queue_timeout": st.floats(0.1, 1e9),
        "min_tokens": st.integers(0, 3),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": stops,
        "stop_token_ids": token_ids,
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "prompt_logprobs": st.integers(0, 21),
        "return_token_ids": st.booleans(),
        "truncate_prompt_tokens": st.integers(1, 8),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
        "structured_outputs": st.sampled_from([{"choice": ["a", "b"]}, {"regex": "[ab]{2}"}, {"regex": "("}, {}]),
        "stream": st.booleans(),
        "timeout": st.floats(0.1, 1e9),
        "user": words,
    },
)
good_chat_fields = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 21),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        "tool_choice": st.sampled_from(["none", "auto", "required"]),
    },
)
good_completion_fields = st.fixed_dictionaries(
    {}, optional={"logprobs": st.integers(0, 21), "echo": st.booleans(), "add_special_tokens": st.booleans()}
)


def _bodies(schema: Any, good: st.SearchStrategy[Any], **required: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A model and what else is required, good fields, and perhaps known or unknown fields of any value."""
    names = st.sampled_from(sorted(schema.model_fields)) | words
    bad_fields = st.dictionaries(names, json, max_size=0) | st.dictionaries(names, json, max_size=3)
    base = st.fixed_dictionaries({"model": st.just("smollm2"), **required})
    return st.builds(
        lambda *parts: {k: v for part in parts for k, v in part.items()}, base, good_fields, good, bad_fields
    )


chat_bodies = _bodies(ChatCompletionRequest, good_chat_fields, messages=messages)
completion_bodies = _bodies(CompletionRequest, good_completion_fields, prompt=prompts)
any_json = json
