"""The bodies of ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``: which fields there are and what
each may hold.

A field is honoured or refused by name, never ignored. ``null`` is always the same as leaving a field out. A field that
OpenAI or vLLM knows and that means nothing here is accepted with the values of the last column, which change nothing.
``caller.py`` has the headers.

| field | honoured | accepted because it changes nothing |
|---|---|---|
| model; messages, prompt, input | yes; up to 64 prompts or inputs | |
| n 1..128 | yes; choice i · n + k is output k of prompt i, at most 1,024 choices; one prefill for each prompt | |
| best_of | | n: the number of outputs is that of choices, as in OpenAI's present API |
| use_beam_search, beam_width 1..64 | yes; the latter is Octavo's own, and n by default; see ``beams.py`` | |
| length_penalty -10..10, early_stopping | yes, with beam search | 1, false (without beam search) |
| temperature 0..2, top_p (0, 1], top_k, min_p 0..1 | yes; defaults by ``generation_defaults.py``; top_k 0, -1: off | |
| presence_penalty, frequency_penalty -2..2, repetition_penalty 0.01..100 | yes | |
| logit_bias, allowed_token_ids, bad_words | yes; up to 4,096 biases of -100..100, 256 words | |
| max_tokens, max_completion_tokens | yes; the latter wins; by default what the context and the server's limit leave | |
| max_tokens 0 | yes, with echo or prompt_logprobs | |
| min_tokens, seed (int64), stop_token_ids, ignore_eos | yes; the first and the last not with a format | |
| stop, include_stop_str_in_output | yes; up to 16, each of 1 to 1,000 characters | |
| skip_special_tokens | yes | |
| spaces_between_special_tokens | | either value: tokenizers of this kind put none |
| logprobs, top_logprobs, prompt_logprobs | yes; up to ``--max-logprobs`` alternatives | |
| echo | in completions | chat: false |
| return_token_ids, return_tokens_as_token_ids | yes, as in vLLM | |
| truncate_prompt_tokens | yes; the last so many tokens of each prompt | |
| response_format, structured_outputs, guided_json, guided_regex, … | yes, one of them; see ``grammar/`` | |
| tools, tool_choice, parallel_tool_calls | yes; see ``chat_messages.py`` | |
| functions, function_call | the older words for tools | [], "none", "auto" |
| stream, stream_options.include_usage, continuous_usage_stats | yes; stream_options only with stream, as at OpenAI | |
| priority (int64) | yes, before the header; lower is served first; only 0 with ``--scheduling-policy fcfs`` | |
| cache_salt | yes, as in vLLM | |
| timeout | yes; seconds for all; what there is by then is the answer, with finish_reason "timeout" | |
| queue_timeout | yes; seconds until the computing begins, then 429 | |
| cache_prompt | yes, llama.cpp's name; false: the prefix cache is not used for this request | |
| session_id | yes, after the header; then prompt_cache_key, OpenAI's word for it, then user | |
| user | yes: the tenant, after the header, else the API key; safety_identifier is its newer name | |
| messages[].name, tool_calls, tool_call_id, reasoning_content | yes: handed to the chat template | |
| add_generation_prompt, continue_final_message | yes | |
| documents, chat_template_kwargs | yes, if the template reads them | |
| chat_template | with ``--trust-request-chat-template``: a template is a program | |
| reasoning_effort | where the template has a variable for it | "none" |
| include_reasoning | yes | |
| add_special_tokens | yes, in completions and embeddings | chat: false |
| encoding_format, pooling (embeddings) | yes; float or base64, last or mean | |
| store | | false |
| metadata | | {}: OpenAI takes it only with store |
| service_tier | | "auto", "default" |
| verbosity | | "medium", OpenAI's default |
| modalities | | ["text"] |
| prompt_cache_retention | | "in_memory" |
| detokenize | | true |
| audio, prediction, web_search_options, suffix, dimensions, logits_processors, … | | null only |
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field

from .chat_messages import ChatMessage, ToolChoice, Tools
from .fields import (
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_CHOICES_OF_PROMPT,
    MAX_DOCUMENTS,
    MAX_LENGTH_PENALTY,
    MAX_TEMPLATE_CHARS,
    Body,
    Identifier,
    Int64,
    LogitBias,
    Penalty,
    Prompt,
    RepetitionPenalty,
    Stop,
    StopText,
    StreamOptions,
    TokenIds,
    only,
)


class RoutedFields(Body):
    """What all endpoints that compute honour: whom a request counts for, when and where it is computed."""

    model: Identifier
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
    truncate_prompt_tokens: Annotated[Int64, Field(ge=1)] | None = None


class RefusedFields(Body):
    """Fields of both endpoints that clients know and that only a neutral value is accepted for."""

    logits_processors: Annotated[Any, only()] = None
    detokenize: Annotated[bool | None, only(True)] = None
    request_id: Annotated[Any, only()] = None
    store: Annotated[bool | None, only(False)] = None
    metadata: Annotated[dict[str, Any] | None, only({})] = None
    service_tier: Annotated[str | None, only("auto", "default")] = None
    kv_transfer_params: Annotated[Any, only()] = None
    vllm_xargs: Annotated[Any, only()] = None
    prompt_cache_retention: Annotated[str | None, only("in_memory")] = None


class GenerationFields(RefusedFields, RoutedFields):
    """What both endpoints that generate honour."""

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
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS)] | None = None
    max_tokens: Annotated[Int64, Field(ge=0)] | None = None
    min_tokens: Annotated[Int64, Field(ge=0)] | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        """Outputs of each prompt."""
        return self.n or 1

    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def output_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted for each output token; None: no log-probabilities are."""
        return None

    @property
    def logprobs_field(self) -> str:
        """The field that says how many."""
        return "logprobs"

    @property
    def wants_echo(self) -> bool:
        return False


class ChatCompletionRequest(GenerationFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: Annotated[bool | None, only(False)] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Annotated[str | None, only("medium")] = None
    modalities: Annotated[list[Any] | None, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[bool | None, only(False)] = None
    include_reasoning: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, only({})] = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def logprobs_field(self) -> str:
        return "top_logprobs"

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().output_limit()


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``."""

    prompt: Prompt
    best_of: Int64 | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    suffix: Annotated[Any, only()] = None
    add_special_tokens: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wants_echo(self) -> bool:
        return bool(self.echo)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each of which becomes ``n`` choices."""
        return prompts_of(self.prompt)


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Each of them, however few there are."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


class EmbeddingRequest(RoutedFields):
    """``POST /v1/embeddings``: a vector for each input, made of the model's last hidden states."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean"] | None = None
    """Which hidden states: that of the last token, or the mean of all. Default: --pooling."""
    dimensions: Annotated[Any, only()] = None
    add_special_tokens: bool | None = None

    def inputs(self) -> list[str | list[int]]:
        return prompts_of(self.input)
