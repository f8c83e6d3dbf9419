"""The answer of /v1/embeddings."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
import orjson
import pytest

from octavo.cluster.api.answer.embedding_answer import embedding_answer, embedding_body
from octavo.cluster.api.answer.run import Run
from octavo.cluster.api.metrics import GatewayMetrics
from octavo.cluster.api.request.answer_options import AnswerOptions
from octavo.cluster.api.request.judged import JudgedRequest
from octavo.cluster.api.service import GenerationRequest, TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
from octavo.worker.errors import GenerationFailed
from octavo.worker.messages import FinishReason, Pooling, SamplingParams

VECTORS = [np.array([3, 4, 0], "<f4"), np.array([0, 0, 0], "<f4"), np.array([0, -2, 0], "<f4")]
UNITS = [[0.6, 0.8, 0.0], [0.0, 0.0, 0.0], [0.0, -1.0, 0.0]]


def test_both_encodings_are_the_same_unit_vectors() -> None:
    raw = [vector.tobytes() for vector in VECTORS]
    plain = orjson.loads(embedding_body(raw, "m", 7, "float"))
    packed = orjson.loads(embedding_body(raw, "m", 7, "base64"))
    assert [each["index"] for each in plain["data"]] == [0, 1, 2]
    assert plain["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    for unit, one, other in zip(UNITS, plain["data"], packed["data"], strict=True):
        assert one["embedding"] == pytest.approx(unit)
        decoded = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert np.array_equal(decoded, np.array(one["embedding"], "<f4"))


def judged(num_prompts: int) -> JudgedRequest:
    nothing = SamplingParams(max_tokens=0, seed=0)
    requests = tuple(
        GenerationRequest(f"r-{index}", "m", (5, 6, 7), nothing, pooling=Pooling.LAST) for index in range(num_prompts)
    )
    return JudgedRequest("embd-1", "m", requests, AnswerOptions())


async def test_vectors_come_in_the_order_of_the_inputs(service: Any, text: TextProcessor) -> None:
    def script(request: GenerationRequest) -> list[TokenDelta]:
        vector = VECTORS[int(request.request_id[-1])]
        return [TokenDelta((), FinishReason.STOP, num_cached_tokens=0, embedding=vector.tobytes())]

    service.script = script
    metrics = GatewayMetrics("m", "alone")
    run = await Run.start(judged(3), service, text, metrics, time.perf_counter())
    answer = orjson.loads(await embedding_answer(run, "m", "float"))
    assert [each["embedding"] for each in answer["data"]] == [pytest.approx(unit) for unit in UNITS]
    assert answer["usage"]["prompt_tokens"] == 9
    assert 'octavo_prompt_tokens_total{gateway="alone",model_name="m"} 9.0' in metrics.text()


async def test_an_engine_without_a_vector_is_an_error(service: Any, text: TextProcessor) -> None:
    service.script = lambda _: [TokenDelta((), FinishReason.STOP)]
    run = await Run.start(judged(1), service, text, GatewayMetrics("m", "alone"), time.perf_counter())
    with pytest.raises(GenerationFailed):
        await embedding_answer(run, "m", "float")
