"""What a request wants of its answer beside the tokens themselves; judged, and the same for all of its choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..answer.message import MessageParser, PlainMessage
from ..chat.reasoning import ReasoningTokens


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    """The stop string that ended a text, and the text of the stop token that did unless it is one of the model's own
    ends, stay at its end."""
    skip_special_tokens: bool = True
    num_logprobs: int | None = None
    """So many alternatives for each output token; None: no log-probabilities are answered."""
    num_prompt_logprobs: int | None = None
    """vLLM's ``prompt_logprobs``, answered beside the choices."""
    echo: bool = False
    """Completions: the text, and the log-probabilities, begin with the prompt's."""
    prompt_texts: tuple[str | None, ...] = ()
    """For ``echo``: what each generation's prompt said; None, or no entry, where it came in token ids."""
    return_token_ids: bool = False
    """vLLM's ``token_ids`` of each choice and ``prompt_token_ids``."""
    tokens_as_ids: bool = False
    """Log-probabilities name tokens as ``token_id:17``."""
    include_usage: bool = False
    """A stream ends with the usage."""
    continuous_usage: bool = False
    """Each chunk of it has the usage so far."""
    grammar_field: str | None = None
    """The field of the request that the output's grammar comes from."""
    message_parser: Callable[[], MessageParser] = PlainMessage
    """Chats: makes what takes one choice's text apart."""
    reasoning_tokens: Callable[[], ReasoningTokens] | None = None
    """Chats in which there may be reasoning: makes what counts one choice's, for the usage."""

    @property
    def tells_tokens(self) -> bool:
        """The answer speaks of single output tokens."""
        return self.num_logprobs is not None or self.return_token_ids
