"""From a valid body to judged requests in token ids: the last place where a request is refused before work is done."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...worker.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from ...worker.messages import SamplingParams
from .answer_options import AnswerOptions
from .beams import with_beam_search
from .caller import Caller
from .fields import MAX_CHOICES
from .output import OutputText
from .schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from .service import GenerationRequest, RouteWishes, ServedModel
from .text import TextProcessor


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """What to generate for one HTTP request: one generation for each prompt."""

    completion_id: str
    model: str
    generations: tuple[GenerationRequest, ...]
    answer: AnswerOptions

    def output_text(self, text: TextProcessor, generation: GenerationRequest) -> OutputText:
        """The output side of one branch of ``generation``."""
        return OutputText(
            text.detokenizer(generation.prompt_token_ids),
            self.answer.stop_strings,
            min_tokens=generation.sampling.min_tokens,
            stop_token_ids=generation.sampling.stop_token_ids,
        )


class RequestJudge:
    """Turns bodies into ``JudgedRequest``, or raises InvalidRequest, ContextLengthExceeded or ModelNotFound."""

    def __init__(self, text: TextProcessor, model: ServedModel) -> None:
        self._text = text
        self._model = model

    async def judge_chat(self, body: ChatCompletionRequest, caller: Caller) -> JudgedRequest:
        check_model(body.model, self._model)
        self._check_combinations(body, caller)
        messages = [_template_message(message.role, message.text(), message.name) for message in body.messages]
        prompt = await self._text.render_chat(messages, max_tokens=self._model.max_model_len)
        return self._judge(body, "chatcmpl", [prompt], "messages", caller)

    async def judge_completion(self, body: CompletionRequest, caller: Caller) -> JudgedRequest:
        check_model(body.model, self._model)
        self._check_combinations(body, caller)
        _check_num_choices(body)
        prompts = await asyncio.gather(*(self._token_ids(prompt) for prompt in body.prompts()))
        return self._judge(body, "cmpl", prompts, "prompt", caller)

    def _check_combinations(self, body: GenerationFields, caller: Caller) -> None:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true.", param="stream_options")
        if (priority := _priority(body, caller)) and self._model.scheduling_policy == "fcfs":
            raise InvalidRequest(
                f"priority is {priority}, but the server schedules first come, first served; start it with "
                "--scheduling-policy priority.",
                param="priority",
            )

    async def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._text.encode(prompt, max_tokens=self._model.max_model_len)
        return prompt

    def _judge(
        self,
        body: GenerationFields,
        prefix: str,
        prompts: Sequence[Sequence[int]],
        param: str,
        caller: Caller,
    ) -> JudgedRequest:
        # The engine's key is always ours: two clients may send the same x-request-id.
        completion_id = f"{prefix}-{secrets.token_hex(16)}"
        seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
        generations = tuple(
            GenerationRequest(
                request_id=f"{completion_id}-{index}",
                model=self._model.name,
                prompt_token_ids=tuple(prompt),
                sampling=self._sampling(body, prompt, param, seed),
                priority=_priority(body, caller),
                timeout_s=body.timeout,
                cache_salt=body.cache_salt,
                wishes=_wishes(body, caller),
                tenant=caller.tenant or body.user or body.safety_identifier or caller.api_key_tenant,
                num_branches=body.num_choices,
                use_prefix_cache=body.cache_prompt is not False,
                queue_timeout_s=body.queue_timeout,
            )
            for index, prompt in enumerate(prompts)
        )
        return JudgedRequest(completion_id, self._model.name, generations, AnswerOptions(body.stop_strings()))

    def _sampling(self, body: GenerationFields, prompt: Sequence[int], param: str, seed: int) -> SamplingParams:
        self._check_token_ids(prompt, param)
        max_tokens = self._max_tokens(body, len(prompt), param)
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, but only {max_tokens} tokens may be generated.", param="min_tokens"
            )
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
            min_tokens=min_tokens,
            stop_token_ids=self._stop_token_ids(body),
        )
        return with_beam_search(sampling, body, self._model.max_num_seqs)

    def _check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        if not token_ids:
            raise InvalidRequest("The prompt is empty: it has no token to continue from.", param=param)
        size = self._text.vocab_size
        bad = next((token_id for token_id in (min(token_ids), max(token_ids)) if not 0 <= token_id < size), None)
        if bad is not None:
            message = f"Token id {bad} in {param} is not in the vocabulary: ids are 0 to {size - 1}."
            raise InvalidRequest(message, param=param)

    def _max_tokens(self, body: GenerationFields, num_prompt_tokens: int, param: str) -> int:
        """The bound that the request names, or all that the context and the operator's limit leave."""
        limit, cap = self._model.max_model_len, self._model.max_output_tokens
        field, requested = body.output_limit()
        if cap is not None and requested is not None and requested > cap:
            raise InvalidRequest(
                f"{field} is {requested}, but this server generates at most {cap} tokens for a choice.", param=field
            )
        if num_prompt_tokens + (requested or 1) <= limit:
            return requested or min(limit - num_prompt_tokens, cap or limit)
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + (requested or 1)} tokens ({num_prompt_tokens} in the {param}, {requested or 1} in "
            f"the output{f', by {field}' if requested else ' at least'}).",
            param=param,
        )

    def _stop_token_ids(self, body: GenerationFields) -> tuple[int, ...]:
        own = body.stop_token_ids or []
        if own:
            self._check_token_ids(own, "stop_token_ids")
        eos = () if body.ignore_eos else self._text.eos_token_ids
        return tuple(dict.fromkeys((*eos, *own)))


def _priority(body: GenerationFields, caller: Caller) -> int:
    return (caller.priority or 0) if body.priority is None else body.priority


def _wishes(body: GenerationFields, caller: Caller) -> RouteWishes:
    """The session is what comes first of the header and the body's fields, the most particular one first."""
    session_id = caller.wishes.session_id or body.session_id or body.prompt_cache_key or body.user
    return replace(caller.wishes, session_id=session_id or None)


def check_model(name: str, served: ServedModel) -> None:
    """Raises ModelNotFound for any other name than the served one."""
    if name != served.name:
        raise ModelNotFound(f"The model '{name[:64]}' does not exist; this server has '{served.name}'.")


def _check_num_choices(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != body.num_choices:
        raise InvalidRequest(
            f"best_of is {body.best_of}, but n is {body.num_choices}: outputs that are not returned are not generated, "
            "so best_of must be n. beam_width is how many candidates a beam search keeps.",
            param="best_of",
        )
    num_prompts = len(body.prompts())
    if num_prompts * body.num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"n is {body.num_choices} with {num_prompts} prompts: that is {num_prompts * body.num_choices} choices, at "
            f"most {MAX_CHOICES} are allowed.",
            param="n",
        )


def _template_message(role: str, text: str, name: str | None) -> dict[str, str]:
    return {"role": role, "content": text} | ({"name": name} if name else {})
