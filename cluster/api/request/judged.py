"""From a valid body to judged requests in token ids: the last place where a request is refused before work is done."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....worker.errors import InvalidRequest
from ....worker.messages import Pooling, SamplingParams
from ..answer.output import Ends, OutputText
from ..chat.plan import plan_chat
from ..grammar.structured import FieldGrammar, StructuredOutputs
from ..http.caller import Caller
from ..service import GenerationRequest, RouteWishes, ServedModel
from ..text.processor import TextProcessor
from .answer_options import AnswerOptions
from .fields import MAX_CHOICES
from .sampling import PreparedFields, SamplingJudge
from .schemas import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, GenerationFields, RoutedFields


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """What to generate for one HTTP request: one generation for each prompt."""

    completion_id: str
    model: str
    generations: tuple[GenerationRequest, ...]
    answer: AnswerOptions

    def output_text(self, text: TextProcessor, generation: GenerationRequest) -> OutputText:
        """The output side of one branch of ``generation``."""
        answer, sampling = self.answer, generation.sampling
        ends = Ends(
            answer.stop_strings, sampling.stop_token_ids, answer.include_stop, text.eos_token_ids, sampling.min_tokens
        )
        prompt = generation.prompt_token_ids
        detokenizer = text.detokenizer(prompt, skip_special_tokens=answer.skip_special_tokens)
        reasoning = None if answer.reasoning_tokens is None else answer.reasoning_tokens()
        return OutputText(detokenizer, ends, keeps_tokens=answer.tells_tokens, reasoning=reasoning)


MAX_PROMPT_LOGPROBS = 2**22
"""In one answer, in which each choice repeats those of its prompt."""


class RequestJudge:
    """Turns bodies for one model into ``JudgedRequest``, or raises InvalidRequest or ContextLengthExceeded."""

    def __init__(self, text: TextProcessor, model: ServedModel) -> None:
        self._text = text
        self._model = model
        self._sampling = SamplingJudge(model, text.vocab_size, text.eos_token_ids)
        self._structured = StructuredOutputs(text.grammars)

    @property
    def text(self) -> TextProcessor:
        return self._text

    @property
    def model(self) -> ServedModel:
        return self._model

    def close(self) -> None:
        """End the threads."""
        self._structured.close()

    async def judge_chat(self, body: ChatCompletionRequest, caller: Caller) -> JudgedRequest:
        self._check_combinations(body, caller)
        if body.top_logprobs and not body.logprobs:
            message = f"top_logprobs is {body.top_logprobs}, but logprobs is not true."
            raise InvalidRequest(message, param="top_logprobs")
        answer_grammar = await self._structured.grammar(body)
        plan = await plan_chat(self._text, body, max_tokens=self._prompt_limit(body), answer_grammar=answer_grammar)
        grammar = plan.grammar
        if grammar is not None:
            grammar = await self._structured.check(grammar)
        answer = replace(
            _answer(body),
            message_parser=plan.message_parser,
            reasoning_tokens=plan.reasoning_tokens,
            skip_special_tokens=plan.skip_special_tokens,
        )
        return await self._judge(body, "chatcmpl", [plan.prompt_token_ids], "messages", caller, grammar, answer)

    async def judge_completion(self, body: CompletionRequest, caller: Caller) -> JudgedRequest:
        self._check_combinations(body, caller)
        _check_num_choices(body)
        prompts = await asyncio.gather(*(self._token_ids(prompt, body, "prompt") for prompt in body.prompts()))
        grammar = await self._structured.grammar(body)
        return await self._judge(body, "cmpl", prompts, "prompt", caller, grammar, _answer(body))

    async def judge_embedding(self, body: EmbeddingRequest, caller: Caller) -> JudgedRequest:
        """One generation, of no token, for each input."""
        self._check_priority(body, caller)
        prompts = await asyncio.gather(*(self._token_ids(prompt, body, "input") for prompt in body.inputs()))
        embedding_id, pooling = _new_id("embd"), Pooling(body.pooling or self._model.pooling)
        requests = []
        for index, prompt in enumerate(_cut(prompts, body.truncate_prompt_tokens)):
            self._sampling.check_prompt(prompt, "input")
            requests.append(replace(self._request(body, caller, f"{embedding_id}-{index}", prompt), pooling=pooling))
        return JudgedRequest(embedding_id, self._model.name, tuple(requests), AnswerOptions())

    def _check_combinations(self, body: GenerationFields, caller: Caller) -> None:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true.", param="stream_options")
        self._check_priority(body, caller)

    def _check_priority(self, body: RoutedFields, caller: Caller) -> None:
        if (priority := _priority(body, caller)) and self._model.scheduling_policy == "fcfs":
            raise InvalidRequest(
                f"priority is {priority}, but the server schedules first come, first served; start it with "
                "--scheduling-policy priority.",
                param="priority",
            )

    def _prompt_limit(self, body: RoutedFields) -> int | None:
        """Tokens beyond which a prompt need not be tokenized to be refused; one that is cut may be of any length."""
        return self._model.max_model_len if body.truncate_prompt_tokens is None else None

    async def _token_ids(
        self, prompt: str | list[int], body: CompletionRequest | EmbeddingRequest, param: str
    ) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        special_tokens = body.add_special_tokens is not False
        return await self._text.encode(
            prompt, max_tokens=self._prompt_limit(body), special_tokens=special_tokens, param=param
        )

    async def _judge(
        self,
        body: GenerationFields,
        prefix: str,
        prompts: Sequence[Sequence[int]],
        param: str,
        caller: Caller,
        grammar: FieldGrammar | None,
        answer: AnswerOptions,
    ) -> JudgedRequest:
        what, whose = (None, None) if grammar is None else (grammar.text, grammar.field)
        prepared = PreparedFields(await self._text.encode_words(body.bad_words or []), what)
        answer = replace(answer, grammar_field=whose)
        completion_id = _new_id(prefix)
        generations = tuple(
            replace(
                self._request(body, caller, f"{completion_id}-{index}", prompt),
                sampling=self._sampling.sampling(body, prompt, param, _seed(body), prepared),
                num_branches=body.num_choices,
            )
            for index, prompt in enumerate(_cut(prompts, body.truncate_prompt_tokens))
        )
        _check_num_logprobs(generations, param)
        return JudgedRequest(completion_id, self._model.name, generations, answer)

    def _request(self, body: RoutedFields, caller: Caller, request_id: str, prompt: Sequence[int]) -> GenerationRequest:
        """What is the same for all kinds of requests; nothing is said of sampling yet."""
        return GenerationRequest(
            request_id=request_id,
            model=self._model.name,
            prompt_token_ids=tuple(prompt),
            sampling=_NOTHING_DRAWN,
            priority=_priority(body, caller),
            timeout_s=body.timeout,
            cache_salt=body.cache_salt,
            wishes=_wishes(body, caller),
            tenant=caller.tenant or body.user or body.safety_identifier or caller.api_key_tenant,
            use_prefix_cache=body.cache_prompt is not False,
            queue_timeout_s=body.queue_timeout,
        )


_NOTHING_DRAWN = SamplingParams(max_tokens=0, seed=0)


def _new_id(prefix: str) -> str:
    """The engine's key is always ours: two clients may send the same x-request-id."""
    return f"{prefix}-{secrets.token_hex(16)}"


def _seed(body: GenerationFields) -> int:
    """A new one for each prompt where none is given: equal prompts have different outputs."""
    return secrets.randbits(64) if body.seed is None else body.seed % 2**64


def _check_num_logprobs(generations: Sequence[GenerationRequest], param: str) -> None:
    count = sum(
        each.num_branches * len(each.prompt_token_ids) * (each.sampling.num_prompt_logprobs + 1)
        for each in generations
        if each.sampling.num_prompt_logprobs is not None
    )
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"The answer would have {count} log-probabilities of the {param}, over all alternatives and choices; at "
            f"most {MAX_PROMPT_LOGPROBS} are allowed.",
            param=param,
        )


def _cut(prompts: Sequence[Sequence[int]], num_tokens: int | None) -> Sequence[Sequence[int]]:
    """The last ``num_tokens`` of each."""
    return prompts if num_tokens is None else [prompt[-num_tokens:] for prompt in prompts]


def _answer(body: GenerationFields) -> AnswerOptions:
    stream = body.stream_options
    return AnswerOptions(
        stop_strings=body.stop_strings(),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        echo=body.wants_echo,
        prompt_texts=_prompt_texts(body) if body.wants_echo else (),
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        include_usage=stream is not None and bool(stream.include_usage or stream.continuous_usage_stats),
        continuous_usage=stream is not None and bool(stream.continuous_usage_stats),
    )


def _prompt_texts(body: GenerationFields) -> tuple[str | None, ...]:
    """Prompts that came as texts and are computed as they came; what a cut one says is in its tokens alone."""
    if not isinstance(body, CompletionRequest) or body.truncate_prompt_tokens is not None:
        return ()
    return tuple(prompt if isinstance(prompt, str) else None for prompt in body.prompts())


def _priority(body: RoutedFields, caller: Caller) -> int:
    return (caller.priority or 0) if body.priority is None else body.priority


def _wishes(body: RoutedFields, caller: Caller) -> RouteWishes:
    """The session is what comes first of the header and the body's fields, the most particular one first."""
    session_id = caller.wishes.session_id or body.session_id or body.prompt_cache_key or body.user
    return replace(caller.wishes, session_id=session_id or None)


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
