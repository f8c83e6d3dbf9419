"""What a test asks a Ray cluster whose token its own process does not have: answered by a driver in another process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


class RayProbe:
    """``close`` ends the driver."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, address]
        self._driver = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, question: str) -> Any:
        """``leaders``: process numbers; ``held``: placement groups and CPUs that are taken."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        print(question, file=self._driver.stdin, flush=True)
        return json.loads(self._driver.stdout.readline())

    def close(self) -> None:
        self._driver.kill()
        self._driver.communicate()


def _leaders() -> list[int]:
    import ray
    from ray.exceptions import RayError

    from octavo.cluster.plan import NAMESPACE, router_names

    router = ray.get_actor(router_names("octavo", 1)[0], NAMESPACE)
    _, leaders = ray.get(router.registry.remote(), timeout=30)
    places = []
    for leader in leaders:
        with contextlib.suppress(RayError):  # it has just died
            places.append(ray.get(leader.process.remote(), timeout=30))
    return [pid for _, pid, _ in places]


def _held() -> dict[str, Any]:
    import ray
    from ray.util import placement_group_table

    states = [group["state"] for group in placement_group_table().values()]
    cpus = ray.cluster_resources().get("CPU", 0.0) - ray.available_resources().get("CPU", 0.0)
    return {"placement_groups": sum(state != "REMOVED" for state in states), "cpus": round(cpus, 3)}


def _patiently(answer: Callable[[], Any]) -> Any:
    """A router may just have been killed: then there is an answer a while later."""
    from ray.exceptions import RayError

    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return answer()
        except (RayError, ValueError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where Ray prints what it thinks people should know

    import ray

    ray.init(sys.argv[1], namespace="octavo", log_to_driver=False, logging_level="ERROR")
    for line in sys.stdin:
        print(json.dumps(_patiently({"leaders": _leaders, "held": _held}[line.strip()])), file=answers, flush=True)


if __name__ == "__main__":
    main()
