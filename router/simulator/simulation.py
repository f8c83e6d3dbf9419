"""One policy, one trace, one cluster, under a virtual clock.

    trace ── gateway: policy.route ── submit_delay ──▶ group: engine, step by step
                        ▲                                │
                        └───────── report_delay ─────────┘   reports as a leader sends them

Nothing is sent, lost or late beyond the delays and the faults that were asked for.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...worker.errors import ConfigurationError
from ...worker.routing_hash import RoutingHasher
from .clock import Clock, Rank
from .faults import EventChannel, Faults
from .gateway import Gateway
from .group import GroupConfig, SimulatedGroup
from .line import Line, Reporting
from .metrics import Result, Results
from .policies import Policy
from .prompts import Prompts
from .traces import Trace

_HASH_KEY = b"octavo simulates"


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Of a cluster whose groups are all alike."""

    num_groups: int
    group: GroupConfig
    submit_delay_s: float = 0.002
    """From the arrival of a request until its group has it."""
    report_delay_s: float = 0.010
    report_pause_s: float = 0.010
    report_period_s: float = 1.0
    blocks_pause_s: float = 0.1
    """See ``Reporting``."""
    seed: int = 0
    """Of faults, and of what policies choose at random."""
    faults: Faults = field(default_factory=Faults)

    def check(self, trace: Trace) -> None:
        """Raises ConfigurationError when a request could never be served, or a fault is impossible."""
        self.faults.events.check()
        size = self.group.block_size
        for number, request in enumerate(trace.requests, 1):
            num_tokens = request.num_prompt_tokens + request.num_output_tokens
            if -(-num_tokens // size) > self.group.num_blocks:
                raise ConfigurationError(
                    f"--kv-tokens: request {number} of {trace.name} has {num_tokens} tokens,"
                    f" but a group has room for {self.group.num_blocks * size}"
                )

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple([f"group-{number}" for number in range(self.num_groups)])


class Simulation:
    """``new_policy(rng)`` makes the policy, and another one after each death of the router.

    ``on_finished()`` is called whenever a request has ended.
    """

    def __init__(
        self,
        config: SimulationConfig,
        trace: Trace,
        new_policy: Callable[[random.Random], Policy],
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        config.check(trace)
        self._config = config
        self._clock = Clock()
        self._new_policy = new_policy
        self._rng = random.Random(config.seed)
        self._generations = itertools.count(1)
        self._hasher = RoutingHasher(_HASH_KEY, config.group.block_size)
        self._results = Results(trace, config.group_names, config.group.block_size, on_finished)
        self._gateway = Gateway(
            trace,
            Prompts(self._hasher, trace.block_size),
            self._clock,
            self._results,
            new_policy(self._rng),
            lambda group: self.lines[group],
            submit_delay_s=config.submit_delay_s,
            most_tokens=config.group.num_blocks * config.group.block_size,
        )
        self.lines = {name: self._start(name) for name in config.group_names}
        self._ended: list[SimulatedGroup] = []
        """Generations that died."""

    @property
    def policy(self) -> Policy:
        """The present one."""
        return self._gateway.policy

    def run(self) -> Result:
        """All of the trace, until the last request has ended."""
        for _ in self.steps():
            pass
        return self.summary()

    def summary(self) -> Result:
        """When all requests have ended."""
        groups = [*self._ended, *[line.group for line in self.lines.values()]]
        return self._results.summary(groups, self._clock.now)

    def steps(self) -> Iterator[float]:
        """The same as ``run``, piece by piece; gives the time after each."""
        for line in self.lines.values():
            line.introduce()
        self._gateway.expect()
        self._expect_faults()
        while self._results.num_left:
            self._clock.advance()
            yield self._clock.now

    # ---- faults ----

    def _expect_faults(self) -> None:
        for time_s in self._config.faults.router_deaths_s:
            self._clock.at(time_s, Rank.REPORT, self._replace_router)
        for time_s, name in self._config.faults.group_deaths:
            self._clock.at(time_s, Rank.REPORT, functools.partial(self._kill, name))

    def _replace_router(self) -> None:
        self._gateway.change_policy(self._new_policy(self._rng))

    def _kill(self, name: str) -> None:
        line = self.lines[name]
        if line.is_dead:
            return
        lost = line.die()
        self._ended.append(line.group)
        self._clock.at(
            self._clock.now + self._config.faults.group_start_s, Rank.REPORT, functools.partial(self._restart, name)
        )
        self._gateway.move(lost, line.group.generation)

    def _restart(self, name: str) -> None:
        self.lines[name] = self._start(name)
        self.lines[name].introduce()

    def _start(self, name: str) -> Line:
        config, generation = self._config, next(self._generations)
        group = SimulatedGroup(
            name, generation, config.group, self._hasher, self._results.note_update, self._results.note_coasted
        )
        return Line(
            group,
            self._clock,
            Reporting(config.report_delay_s, config.report_pause_s, config.report_period_s, config.blocks_pause_s),
            EventChannel(config.faults.events, random.Random(f"{config.seed} {generation}")),
            self._gateway.report,
        )
