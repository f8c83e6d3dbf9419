"""Chaos: one round of each fault under forty streams; ``tests/support/chaos.py`` runs as many as there is time for."""

from __future__ import annotations

import random

import chaos
import pytest

SEED = 7
FAULTS = (
    "SIGKILL of a raylet",
    "SIGKILL of a leader",
    "SIGSTOP of a rank",
    "SIGKILL of a rank",
    "SIGKILL of the router",
)


@pytest.mark.timeout(600)
def test_every_stream_comes_out_as_if_nothing_had_happened() -> None:
    """And nothing of the cluster is left when it has been stopped."""
    with chaos.cluster() as cluster:
        results = chaos.run_rounds(cluster, iter(FAULTS), random.Random(SEED), len(FAULTS))
    assert [result.differences for result in results] == [[]] * len(FAULTS), "\n".join(map(chaos.Result.line, results))
    assert sum(result.num_moved for result in results) > 0, "no request had to move: this has shown nothing"
