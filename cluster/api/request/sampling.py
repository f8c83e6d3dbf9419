"""From the fields of a request to ``SamplingParams``: defaults, limits of the model, and contradictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ....worker.errors import ContextLengthExceeded, InvalidRequest
from ....worker.messages import SamplingParams
from ..service import ServedModel
from .beams import with_beam_search
from .schemas import GenerationFields


@dataclass(frozen=True, slots=True)
class PreparedFields:
    """What took a thread to find out about a request, the same for all of its prompts."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None


class SamplingJudge:
    """Raises InvalidRequest that names a field; ContextLengthExceeded."""

    def __init__(self, model: ServedModel, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def sampling(
        self, body: GenerationFields, prompt: Sequence[int], param: str, seed: int, prepared: PreparedFields
    ) -> SamplingParams:
        """For one of the request's prompts, which came in the field ``param``."""
        self.check_token_ids(prompt, param)
        max_tokens = self._max_tokens(body, len(prompt), param, prepared)
        defaults = self._model.defaults
        top_k = _or(body.top_k, defaults.top_k)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=_or(body.temperature, defaults.temperature),
            top_p=_or(body.top_p, defaults.top_p),
            top_k=top_k if top_k > 0 else None,
            min_p=_or(body.min_p, defaults.min_p),
            min_tokens=self._min_tokens(body, max_tokens, prepared),
            stop_token_ids=self._stop_token_ids(body, prepared),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
            logit_bias=self._logit_bias(body),
            allowed_token_ids=self._allowed_token_ids(body),
            bad_words=prepared.bad_words,
            grammar=prepared.grammar,
            num_logprobs=self._num_logprobs(body),
            num_prompt_logprobs=self._num_prompt_logprobs(body, max_tokens),
        )
        _check_something_is_left(sampling)
        return with_beam_search(sampling, body, self._model.max_num_seqs)

    def check_prompt(self, prompt: Sequence[int], param: str) -> None:
        """Raises as ``sampling`` does for a prompt that nothing is generated for."""
        self.check_token_ids(prompt, param)
        if len(prompt) > self._model.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._model.max_model_len} tokens, but an {param} has "
                f"{len(prompt)}.",
                param=param,
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest unless there are some, all of the vocabulary."""
        if not token_ids:
            raise InvalidRequest("The prompt is empty: it has no token to continue from.", param=param)
        size = self._vocab_size
        bad = next((token_id for token_id in (min(token_ids), max(token_ids)) if not 0 <= token_id < size), None)
        if bad is not None:
            message = f"Token id {bad} in {param} is not in the vocabulary: ids are 0 to {size - 1}."
            raise InvalidRequest(message, param=param)

    def _max_tokens(self, body: GenerationFields, num_prompt_tokens: int, param: str, prepared: PreparedFields) -> int:
        """The bound that the request names, or all that the context and the operator's limit leave."""
        limit, cap = self._model.max_model_len, self._model.max_output_tokens
        field, requested = body.output_limit()
        if requested == 0:
            _check_nothing_to_generate(body, field, prepared)
        if cap is not None and requested is not None and requested > cap:
            raise InvalidRequest(
                f"{field} is {requested}, but this server generates at most {cap} tokens for a choice.", param=field
            )
        at_least = 1 if requested is None else requested
        if num_prompt_tokens + at_least <= limit:
            return min(limit - num_prompt_tokens, cap or limit) if requested is None else requested
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + at_least} tokens ({num_prompt_tokens} in the {param}, {at_least} in "
            f"the output{f', by {field}' if requested else ' at least'}).",
            param=param,
        )

    def _min_tokens(self, body: GenerationFields, max_tokens: int, prepared: PreparedFields) -> int:
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, but only {max_tokens} tokens may be generated.", param="min_tokens"
            )
        if min_tokens and prepared.grammar is not None:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, but the output ends where its format does; leave one of them out.",
                param="min_tokens",
            )
        return min_tokens

    def _stop_token_ids(self, body: GenerationFields, prepared: PreparedFields) -> tuple[int, ...]:
        own = body.stop_token_ids or []
        if own:
            self.check_token_ids(own, "stop_token_ids")
        if body.ignore_eos and prepared.grammar is not None:
            raise InvalidRequest(
                "ignore_eos is true, but the output ends where its format does; leave one of them out.",
                param="ignore_eos",
            )
        eos = () if body.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *own)))

    def _logit_bias(self, body: GenerationFields) -> tuple[tuple[int, float], ...]:
        bias = {int(key): float(value) for key, value in (body.logit_bias or {}).items()}
        if bias:
            self.check_token_ids(list(bias), "logit_bias")
        return tuple((token_id, value) for token_id, value in bias.items() if value)

    def _allowed_token_ids(self, body: GenerationFields) -> tuple[int, ...] | None:
        if body.allowed_token_ids is None:
            return None
        self.check_token_ids(body.allowed_token_ids, "allowed_token_ids")
        return tuple(sorted(set(body.allowed_token_ids)))

    def _num_logprobs(self, body: GenerationFields) -> int | None:
        if body.num_logprobs is not None:
            self._check_num_logprobs(body.num_logprobs, body.logprobs_field)
        return body.num_logprobs

    def _num_prompt_logprobs(self, body: GenerationFields, max_tokens: int) -> int | None:
        """Also those that an echo shows; and a prompt that is judged alone needs a reason to be computed."""
        if body.prompt_logprobs is not None:
            self._check_num_logprobs(body.prompt_logprobs, "prompt_logprobs")
        wanted = [body.prompt_logprobs, body.num_logprobs if body.wants_echo else None, None if max_tokens else 0]
        return max((number for number in wanted if number is not None), default=None)

    def _check_num_logprobs(self, number: int, field: str) -> None:
        limit = self._model.max_logprobs
        if number > limit:
            raise InvalidRequest(
                f"{field} is {number}, but this server gives at most {limit} alternatives (--max-logprobs).",
                param=field,
            )


N = TypeVar("N", int, float)


def _or(value: N | None, default: N) -> N:
    return default if value is None else value


def _check_nothing_to_generate(body: GenerationFields, field: str, prepared: PreparedFields) -> None:
    if prepared.grammar is not None:
        message = f"{field} is 0, but the output has to follow a format: there is none."
        raise InvalidRequest(message, param=field)
    if not body.wants_echo and body.prompt_logprobs is None:
        raise InvalidRequest(
            f"{field} is 0, but nothing would be answered: only with echo or prompt_logprobs it can be 0.", param=field
        )


def _check_something_is_left(sampling: SamplingParams) -> None:
    """Contradictions that can be seen before anything is computed."""
    if sampling.allowed_token_ids is None:
        return
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned.update(sampling.stop_token_ids)
    if banned.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids leaves nothing to generate: bad_words, or min_tokens, exclude each of its tokens.",
            param="allowed_token_ids",
        )
