"""Policies of the scheduler: in which order waiting sequences are served.

A policy is an object with one question to answer. The scheduler's loop asks; it does not know which policy it has.

Times count in whole nanoseconds: a priority may be any 64-bit number, and a float that has to hold it beside an arrival
would lose the one or the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .errors import ConfigurationError
from .fair_queue import FairQueue
from .sequence import Sequence
from .waiting_queue import HeapQueue, Key, WaitingQueue, expected_prefill_tokens

AGING_S = 60.0
"""Of waiting make up for one unit of priority, unless a flag says otherwise."""

S_PER_TOKEN = 0.06
"""A token of remaining work puts a sequence behind those that arrive so much later: a minute for 1,000 tokens. So what
arrived long ago is not overtaken any more, however long it is."""

_NS_PER_S = 1_000_000_000


class FirstCome:
    """In the order of arrival, whatever the priority."""

    def key(self, sequence: Sequence) -> Key:
        return ()  # of equals the earlier arrival comes first


class PriorityOrder:
    """Lower priority value first, in it first come; a unit of priority is worth ``aging_s`` seconds of waiting.

    So nothing starves: what waits has, after a time, precedence over all that arrives. As everybody who waits ages
    equally, that is the static order of arrival + priority * aging_s.

    Raises ConfigurationError when ``aging_s`` is not a finite number ≥ 0. With 0 the queue
    is in the order of arrival; priorities then only say who gives way for lack of memory.
    """

    def __init__(self, aging_s: float = AGING_S) -> None:
        if not 0.0 <= aging_s < math.inf:
            raise ConfigurationError(f"aging_s is {aging_s}; it must be a finite number of seconds, at least 0")
        self._aging_ns = round(aging_s * _NS_PER_S)

    def key(self, sequence: Sequence) -> Key:
        return (self.effective_arrival_ns(sequence),)

    def effective_arrival_ns(self, sequence: Sequence) -> int:
        """When a sequence of priority 0 would have had to arrive for the same place in the order."""
        return round(sequence.arrival_s * _NS_PER_S) + sequence.request.priority * self._aging_ns


class ShortestRemaining:
    """Least work first, which makes the mean wait shortest; priority counts as in PriorityOrder.

    The work is the tokens to prefill and those that may still be generated, up to ``max_tokens``: how many it will be,
    nobody knows. Each counts as ``S_PER_TOKEN`` of a later arrival.
    """

    _NS_PER_TOKEN = round(S_PER_TOKEN * _NS_PER_S)

    def __init__(self, aging_s: float = AGING_S) -> None:
        self._priority = PriorityOrder(aging_s)

    def key(self, sequence: Sequence) -> Key:
        num_to_generate = sequence.request.sampling.max_tokens - sequence.num_output_tokens
        num_remaining = expected_prefill_tokens(sequence) + max(num_to_generate, 0)
        return (self._priority.effective_arrival_ns(sequence) + num_remaining * self._NS_PER_TOKEN,)


_QUEUES: dict[str, Callable[[float], WaitingQueue]] = {
    "fcfs": lambda aging_s: HeapQueue(FirstCome()),
    "priority": lambda aging_s: HeapQueue(PriorityOrder(aging_s)),
    "shortest": lambda aging_s: HeapQueue(ShortestRemaining(aging_s)),
    "fair": lambda aging_s: FairQueue(PriorityOrder(aging_s)),
}

SCHEDULING_POLICIES: tuple[str, ...] = tuple(_QUEUES)
"""Names for ``make_queue``."""


def make_queue(policy: str, *, aging_s: float = AGING_S) -> WaitingQueue:
    """An empty queue. Raises ConfigurationError when there is no such policy, or for ``aging_s``."""
    if policy not in _QUEUES:
        known = ", ".join(SCHEDULING_POLICIES)
        raise ConfigurationError(f"scheduling policy is {policy!r}; it must be one of {known}")
    return _QUEUES[policy](aging_s)
