"""A recorder for CPUs, which have no graphs: what was recorded is run again, on the same buffers."""

from __future__ import annotations

from collections.abc import Callable


class Again:
    """Counts. A test can let memory be short, or recording fail."""

    def __init__(self) -> None:
        self.is_full = False
        self.failure: Exception | None = None
        self.num_replays = 0

    def has_room(self, num_bytes: int) -> bool:
        return not self.is_full

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.failure:
            raise self.failure

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay
