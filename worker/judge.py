"""What an engine refuses before it begins: requests that it could never serve. The gateway has judged all else."""

from __future__ import annotations

from .errors import InvalidRequest
from .messages import Request
from .scheduler import Scheduler


def judge(request: Request, scheduler: Scheduler) -> None:
    """Raises InvalidRequest with what is wrong with ``request``, values and limits."""
    sampling = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt has no tokens; at least 1 is needed", param="prompt")
    if not request.branches:
        raise InvalidRequest("the request has no branches; at least 1 is needed", param="n")
    if sampling.beam_width is not None and len(request.branches) > sampling.beam_width:
        raise InvalidRequest(
            f"n is {len(request.branches)}, but beam_width is {sampling.beam_width}", param="beam_width"
        )
    if request.pooling is not None:
        _judge_embedding(request)
    elif sampling.max_tokens == 0 and sampling.num_prompt_logprobs is None:
        raise InvalidRequest(
            "max_tokens is 0, and no log-probabilities of the prompt are wanted: nothing would be answered",
            param="max_tokens",
        )
    max_tokens = 0 if request.pooling else sampling.max_tokens
    scheduler.check_fits(len(request.prompt_token_ids), max_tokens, sampling.beam_width)


def _judge_embedding(request: Request) -> None:
    """It is one vector, of one pass over the prompt."""
    sampling = request.sampling
    if len(request.branches) > 1:
        raise InvalidRequest(f"an embedding is one vector, but n is {len(request.branches)}", param="n")
    if sampling.beam_width is not None:
        raise InvalidRequest(
            f"an embedding has no output to search for, but beam_width is {sampling.beam_width}", param="beam_width"
        )
    if sampling.num_prompt_logprobs is not None:
        raise InvalidRequest("an embedding comes without log-probabilities of the prompt", param="prompt_logprobs")
