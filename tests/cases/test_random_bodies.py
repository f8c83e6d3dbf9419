"""Random bodies against a real cluster: no defect of ours is met, nothing is leaked, and the canary is undisturbed.

500 bodies; ``--hypothesis-profile=long`` sends 10,000 (a quarter of an hour).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import orjson
from api_calls import CHAT, COMPLETION, complete
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_bodies import any_json, chat_bodies, completion_bodies
from serve_process import OneModel, wait_until

BODIES_AT_ONCE = 20
BATCHES = max(25, settings.get_profile("default").max_examples // 20, settings().max_examples // BODIES_AT_ONCE)


requests = (
    st.tuples(st.just(CHAT), chat_bodies)
    | st.tuples(st.just(COMPLETION), completion_bodies)
    | st.tuples(st.sampled_from([CHAT, COMPLETION]), any_json)
)


def test_random_bodies(plain: OneModel) -> None:
    server = plain
    canary = complete(server, "The capital of France is", max_tokens=8, temperature=0).text
    headers = {"content-type": "application/json"}
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=server.url, timeout=120) as http, ThreadPoolExecutor(BODIES_AT_ONCE) as threads:

        def send(request: tuple[str, Any]) -> tuple[int, bytes, Any]:
            path, body = request
            answer = http.post(path, content=orjson.dumps(body), headers=headers)
            return answer.status_code, answer.content, body

        @settings(max_examples=BATCHES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(st.lists(requests, min_size=BODIES_AT_ONCE, max_size=BODIES_AT_ONCE))
        def run(batch: list[tuple[str, Any]]) -> None:
            for status, content, body in threads.map(send, batch):
                statuses[status] = statuses.get(status, 0) + 1
                assert status == 200 or 400 <= status < 500, (status, content, body)
                assert status == 200 or orjson.loads(content)["error"]["message"]

        run()
    print(statuses)
    assert statuses[200] > 20
    names = ("octavo_num_requests_running", "octavo_num_requests_waiting", "octavo_kv_cache_usage_perc")
    wait_until(lambda: all(server.gauge(name) == 0 for name in names), timeout_s=15, what="nothing held")
    assert complete(server, "The capital of France is", max_tokens=8, temperature=0).text == canary
