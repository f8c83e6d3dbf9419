"""The bodies of ``/v1/chat/completions`` and ``/v1/completions``: which fields there are and what each may hold.

A field is honoured or refused by name, never ignored. ``null`` is always the same as leaving a field out. A field that
OpenAI or vLLM knows and that is not built yet is accepted with the values of the last column, which change nothing.
``caller.py`` has the headers.

| field | honoured | accepted because it changes nothing |
|---|---|---|
| model, messages, prompt | yes; up to 64 prompts | |
| n 1..128 | yes; choice i · n + k is output k of prompt i, at most 1,024 choices; one prefill for each prompt | |
| best_of | | n: the number of outputs is that of choices, as in OpenAI's present API |
| use_beam_search, beam_width 1..64 | yes; the latter is Octavo's own, and n by default; see ``beams.py`` | |
| length_penalty -10..10, early_stopping | yes, with beam search | 1, false (without beam search) |
| temperature 0..2, top_p (0, 1], top_k | yes; 1.0, 1.0 and off by default; top_k 0 and -1 mean off, as in vLLM | |
| max_tokens, max_completion_tokens | yes; the latter wins; by default what the context and the server's limit leave | |
| min_tokens, seed (int64), stop_token_ids, ignore_eos | yes | |
| stop | yes; up to 16, each of 1 to 1,000 characters | |
| stream, stream_options.include_usage | yes; stream_options only with stream, as at OpenAI | |
| priority (int64) | yes, before the header; lower is served first; only 0 with ``--scheduling-policy fcfs`` | |
| cache_salt | yes, as in vLLM | |
| timeout | yes; seconds for all; what there is by then is the answer, with finish_reason "timeout" | |
| queue_timeout | yes; seconds until the computing begins, then 429 | |
| cache_prompt | yes, llama.cpp's name; false: the prefix cache is not used for this request | |
| session_id | yes, after the header; then prompt_cache_key, OpenAI's word for it, then user | |
| user | yes: the tenant, after the header, else the API key; safety_identifier is its newer name | |
| messages[].name | yes: handed to the chat template | |
| presence_penalty, frequency_penalty | | 0 |
| repetition_penalty, min_p | | 1, 0 |
| logit_bias, bad_words | | {}, [] |
| logprobs, top_logprobs, prompt_logprobs | | false (chat), 0 (top_logprobs) |
| echo, return_token_ids, … | | false |
| response_format | | {"type": "text"} |
| tools, functions, documents | | [] |
| tool_choice, function_call | | "none", and "auto", which is the same without tools |
| parallel_tool_calls | | either value: there are no tools |
| store | | false |
| metadata | | {}: OpenAI takes it only with store |
| service_tier | | "auto", "default" |
| reasoning_effort | | "none" |
| verbosity | | "medium", OpenAI's default |
| modalities | | ["text"] |
| prompt_cache_retention | | "in_memory" |
| add_generation_prompt, continue_final_message | | true, false |
| add_special_tokens | | chat: false, completions: true |
| skip_special_tokens, spaces_between_special_tokens, detokenize, include_reasoning | | true |
| chat_template, chat_template_kwargs | never from a request: a template is a program | {} (kwargs) |
| audio, prediction, web_search_options, suffix, structured_outputs, allowed_token_ids, … | | null only |
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field

from .fields import (
    MAX_BEAM_WIDTH,
    MAX_CHOICES_OF_PROMPT,
    MAX_LENGTH_PENALTY,
    Body,
    Content,
    Identifier,
    Int64,
    Penalty,
    Prompt,
    Stop,
    StreamOptions,
    TextPart,
    only,
)


class NotBuiltYet(Body):
    """Fields of both endpoints that only a neutral value is accepted for."""

    presence_penalty: Annotated[Penalty | None, only(0)] = None
    frequency_penalty: Annotated[Penalty | None, only(0)] = None
    repetition_penalty: Annotated[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, only(1)] = None
    min_p: Annotated[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None, only(0)] = None
    logit_bias: Annotated[dict[str, Any] | None, only({})] = None
    bad_words: Annotated[list[Any] | None, only([])] = None
    allowed_token_ids: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None
    logits_processors: Annotated[Any, only()] = None
    response_format: Annotated[dict[str, Any] | None, only({"type": "text"})] = None
    structured_outputs: Annotated[Any, only()] = None
    guided_json: Annotated[Any, only()] = None
    guided_regex: Annotated[Any, only()] = None
    guided_choice: Annotated[Any, only()] = None
    guided_grammar: Annotated[Any, only()] = None
    echo: Annotated[bool | None, only(False)] = None
    include_stop_str_in_output: Annotated[bool | None, only(False)] = None
    return_token_ids: Annotated[bool | None, only(False)] = None
    return_tokens_as_token_ids: Annotated[bool | None, only(False)] = None
    skip_special_tokens: Annotated[bool | None, only(True)] = None
    spaces_between_special_tokens: Annotated[bool | None, only(True)] = None
    detokenize: Annotated[bool | None, only(True)] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    request_id: Annotated[Any, only()] = None
    store: Annotated[bool | None, only(False)] = None
    metadata: Annotated[dict[str, Any] | None, only({})] = None
    service_tier: Annotated[str | None, only("auto", "default")] = None
    kv_transfer_params: Annotated[Any, only()] = None
    vllm_xargs: Annotated[Any, only()] = None


class GenerationFields(NotBuiltYet):
    """What both endpoints honour."""

    model: Identifier
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_OF_PROMPT)] | None = None
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Field(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    length_penalty: (
        Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY, allow_inf_nan=False)] | None
    ) = None
    early_stopping: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    max_tokens: Annotated[Int64, Field(ge=1)] | None = None
    min_tokens: Annotated[Int64, Field(ge=0)] | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    priority: Int64 | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds for all of it, from the moment that the prompt is known in tokens."""
    queue_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds that it may wait, in the router and then at a worker group, until its computing begins."""
    cache_prompt: bool | None = None
    cache_salt: Identifier | None = None
    session_id: Identifier | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_retention: Annotated[str | None, only("in_memory")] = None

    @property
    def num_choices(self) -> int:
        """Outputs of each prompt."""
        return self.n or 1

    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def output_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens


class Message(Body):
    """One turn of a chat; its text is one string or a list of text parts."""

    role: Literal["system", "user", "assistant", "developer"]
    content: Content
    name: Identifier | None = None
    refusal: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    tool_calls: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[Any, only()] = None
    reasoning_content: Annotated[Any, only()] = None

    def text(self) -> str:
        """Parts are joined by line breaks, as vLLM does for templates that take a string."""
        return self.content if isinstance(self.content, str) else "\n".join(map(_text_of, self.content))


def _text_of(part: TextPart) -> str:
    return part.text


class ChatCompletionRequest(GenerationFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: Annotated[bool | None, only(False)] = None
    top_logprobs: Annotated[int | None, only(0)] = None
    tools: Annotated[list[Any] | None, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    reasoning_effort: Annotated[str | None, only("none")] = None
    verbosity: Annotated[str | None, only("medium")] = None
    modalities: Annotated[list[Any] | None, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    add_generation_prompt: Annotated[bool | None, only(True)] = None
    continue_final_message: Annotated[bool | None, only(False)] = None
    add_special_tokens: Annotated[bool | None, only(False)] = None
    include_reasoning: Annotated[bool | None, only(True)] = None
    documents: Annotated[list[Any] | None, only([])] = None
    chat_template: Annotated[Any, only()] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, only({})] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, only({})] = None

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().output_limit()


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``."""

    prompt: Prompt
    best_of: Int64 | None = None
    logprobs: Annotated[int | None, only()] = None
    suffix: Annotated[Any, only()] = None
    add_special_tokens: Annotated[bool | None, only(True)] = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each of which becomes ``n`` choices."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)
