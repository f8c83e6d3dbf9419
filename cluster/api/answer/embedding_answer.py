"""OpenAI's answer of ``/v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from .run import Run

EncodingFormat = Literal["float", "base64"]


async def embedding_answer(run: Run, model: str, encoding_format: EncodingFormat) -> bytes:
    """The answer of a run of ``pooling`` requests, when the last vector is there. Raises what ``run.next`` does."""
    with run:
        while await run.next():
            pass
    return await asyncio.to_thread(embedding_body, run.embeddings(), model, run.usage().prompt_tokens, encoding_format)


def embedding_body(
    vectors: Sequence[bytes], model: str, num_prompt_tokens: int, encoding_format: EncodingFormat
) -> bytes:
    """``vectors`` (float32, little endian) in the order of the inputs; the answer has them with Euclidean length 1.

    As ``base64`` they are the same float32 bytes. A vector of zeros stays as it is.
    """
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(normalised(vector), encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens}
    body = {"object": "list", "data": data, "model": model, "usage": usage}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def normalised(vector: bytes) -> NDArray[np.float32]:
    values = np.frombuffer(vector, "<f4").astype(np.float64)
    length = np.linalg.norm(values)
    return (values / length if length > 0 else values).astype("<f4")


def _encoded(vector: NDArray[np.float32], encoding_format: EncodingFormat) -> NDArray[np.float32] | str:
    return base64.b64encode(vector.tobytes()).decode() if encoding_format == "base64" else vector
