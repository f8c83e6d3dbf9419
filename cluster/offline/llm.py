"""LLM: a model in this process, with the fields of the HTTP API and neither Ray nor HTTP.

from octavo import LLM

with LLM() as llm:
    for result in llm.generate(["One, two,", "Once upon a time"], max_tokens=16):
        print(result.outputs[0].text)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from .calls import answer_chats, answer_prompts, embed
from .config import plan_of
from .inputs import Params, Prompt, bodies_of, listed_chats, listed_prompts
from .model import LocalModel
from .results import EmbeddingOutput, RequestOutput


class LLM:
    """``model``: a folder in Hugging Face format, a hub id, a GGUF file or gemma-3-270m; None: the embedded
    SmolLM2-135M-Instruct.

    ``flags`` are those of ``octavo serve`` that mean something in one process, by the names of ServeConfig's fields:
    ``max_model_len``, ``kv_cache_memory_bytes`` and so on. Raises ConfigurationError for what cannot work.

    Methods may be called from any thread, several at a time; where an event loop runs, it waits. What one call has
    computed the next one finds in the prefix cache.
    """

    def __init__(self, model: str | Path | None = None, **flags: Any) -> None:
        self._model: LocalModel | None = LocalModel.load(plan_of(model, flags))
        self._end = weakref.finalize(self, self._model.close)

    def close(self) -> None:
        """End the engine and free its memory; harmless when repeated. Later calls raise RuntimeError."""
        self._end()
        self._model = None
        gc.collect()  # an engine and its parts know each other

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, use_tqdm: bool | None = None, **fields: Any
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts, each of which is a text or a list of token ids.

        ``fields`` are those of ``/v1/completions``, for all prompts; ``params`` the same as a mapping, or as a list of
        mappings, one for each prompt. ``use_tqdm`` None: a progress bar where stderr is a terminal.

        Raises InvalidRequest or ContextLengthExceeded, which name the field, before anything is computed;
        GenerationFailed when the engine has failed. Ctrl-C ends the requests, and the engine goes on.
        """
        model = self._open()
        bodies = bodies_of("prompt", listed_prompts(prompts), params, fields)
        return model.run(answer_prompts(model, bodies, use_tqdm))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: Params = None,
        *,
        use_tqdm: bool | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, with the fields of ``/v1/chat/completions``; else as ``generate``."""
        model = self._open()
        bodies = bodies_of("messages", listed_chats(messages), params, fields)
        return model.run(answer_chats(model, bodies, use_tqdm))

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        pooling: Literal["last", "mean"] | None = None,
        use_tqdm: bool | None = None,
        **fields: Any,
    ) -> list[EmbeddingOutput]:
        """Vectors of the inputs, of Euclidean length 1, with the fields of ``/v1/embeddings``; else as ``generate``.

        Raises GenerationFailed as well when one of them could not be computed.
        """
        model = self._open()
        bodies = bodies_of("input", listed_prompts(inputs), None, {"pooling": pooling, **fields})
        return model.run(embed(model, bodies, use_tqdm))

    def reset_prefix_cache(self) -> int:
        """Forget what is cached and used by nobody; how many blocks that was."""
        model = self._open()
        return sum(num or 0 for num in model.run(model.service.reset_prefix_cache()).values())

    def _open(self) -> LocalModel:
        if self._model is None:
            raise RuntimeError("this LLM was closed")
        return self._model
