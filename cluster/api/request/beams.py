"""Beam search in a request: which fields ask for it, and which do not go with it.

``use_beam_search`` is vLLM's word, with n beams where ``beam_width`` does not say otherwise; ``beam_width`` alone asks
for it too. The search maximises log-probability, so it has no use for what bends or draws from the distribution; such a
field is refused unless it has the value that changes nothing. Its outputs are known only when it has ended, so that a
stop string, which is text and is found at the gateway, could end none of them in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....worker.errors import InvalidRequest
from ....worker.messages import SamplingParams
from .fields import MAX_BEAM_WIDTH
from .schemas import GenerationFields

NEUTRAL_LENGTH_PENALTY = 1.0

_BENDING = ("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs")


def with_beam_search(sampling: SamplingParams, body: GenerationFields, max_num_seqs: int) -> SamplingParams:
    """``sampling`` with the beam search that the body asks for, if it does.

    ``max_num_seqs`` is what one worker group runs at once. Raises InvalidRequest.
    """
    width = _beam_width(body)
    if width is None:
        _check_no_search(body)
        return sampling
    _check_width(body, width, max_num_seqs)
    for field, state, remedy in _misfits(body):
        raise InvalidRequest(f"{field} {state}, but beam search {remedy}.", param=field)
    if sampling.grammar is not None:
        message = "The output has to follow a format or to call a tool, but beam search cannot: leave one of them out."
        raise InvalidRequest(message, param="use_beam_search" if body.use_beam_search else "beam_width")
    if sampling.max_tokens == 0:
        raise InvalidRequest("max_tokens is 0, but beam search needs tokens to search for.", param="max_tokens")
    penalty = NEUTRAL_LENGTH_PENALTY if body.length_penalty is None else body.length_penalty
    sampling = replace(sampling, repetition_penalty=1.0)  # a default of the model's
    return replace(sampling, beam_width=width, length_penalty=penalty, early_stopping=bool(body.early_stopping))


def _beam_width(body: GenerationFields) -> int | None:
    """None: the request asks for no beam search."""
    if body.use_beam_search is False and body.beam_width is not None:
        raise InvalidRequest(
            f"beam_width is {body.beam_width}, but use_beam_search is false: leave one of them out.", param="beam_width"
        )
    if body.beam_width is not None:
        return body.beam_width
    return body.num_choices if body.use_beam_search else None


def _check_no_search(body: GenerationFields) -> None:
    remedy = "but only beam search honours it: set beam_width, or use_beam_search to true"
    if body.length_penalty not in (None, NEUTRAL_LENGTH_PENALTY):
        raise InvalidRequest(f"length_penalty is {body.length_penalty}, {remedy}.", param="length_penalty")
    if body.early_stopping:
        raise InvalidRequest(f"early_stopping is true, {remedy}.", param="early_stopping")


def _check_width(body: GenerationFields, width: int, max_num_seqs: int) -> None:
    if body.num_choices > width:
        raise InvalidRequest(
            f"n is {body.num_choices}, but a search with beam_width {width} has only {width} outputs.", param="n"
        )
    name = "n" if body.beam_width is None else "beam_width"
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequest(f"{name} is {width}, but a beam search has at most {MAX_BEAM_WIDTH} beams.", param=name)
    if width > max_num_seqs:
        raise InvalidRequest(
            f"{name} is {width}, but this server's worker groups run at most {max_num_seqs} sequences at once "
            "(--max-num-seqs), and each beam is one.",
            param=name,
        )


def _misfits(body: GenerationFields) -> Iterator[tuple[str, str, str]]:
    """Fields that a beam search cannot honour: name, what it says, and what may be done about it."""
    if body.temperature not in (None, 0, 1):
        yield "temperature", f"is {body.temperature}", "draws nothing: leave it out, or send 0 or 1"
    if body.top_p not in (None, 1):
        yield "top_p", f"is {body.top_p}", "draws nothing: leave it out, or send 1"
    if body.top_k not in (None, -1, 0):
        yield "top_k", f"is {body.top_k}", "draws nothing: leave it out, or send 0"
    if body.seed is not None:
        yield "seed", f"is {body.seed}", "draws nothing: leave it out"
    if body.min_p:
        yield "min_p", f"is {body.min_p}", "draws nothing: leave it out, or send 0"
    for field, value, neutral in (
        ("presence_penalty", body.presence_penalty, 0),
        ("frequency_penalty", body.frequency_penalty, 0),
        ("repetition_penalty", body.repetition_penalty, 1),
    ):
        if value not in (None, neutral):
            yield field, f"is {value}", f"keeps the model's probabilities: leave it out, or send {neutral}"
    for field in _BENDING:
        if getattr(body, field) not in (None, {}, []):
            yield field, "is set", "keeps the model's probabilities: leave it out"
    if body.num_logprobs is not None:
        yield "logprobs", "is set", "gives none: leave it out"
    if strings := body.stop_strings():
        yield (
            "stop",
            f"has {len(strings)} string{'s' if len(strings) > 1 else ''}",
            "cannot watch for text: use stop_token_ids",
        )
