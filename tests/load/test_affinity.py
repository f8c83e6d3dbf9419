"""What ``octavo bench affinity`` makes of a cluster's counters, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner
from load_plays import run_of, sample
from scripted_api import ScriptedApi

from octavo.cluster.cli import main
from octavo.cluster.load.affinity import Trial, rows
from octavo.cluster.load.client import Client
from octavo.cluster.load.prefill_counts import PrefillCounts, read_counts, read_grown_counts
from octavo.cluster.load.result import Result
from octavo.cluster.load.served import NotServed, served
from octavo.cluster.load.target import Server


def exposition(**groups: tuple[int, int]) -> str:
    """Group → prompt tokens looked up, and found."""
    names = ("octavo_prefix_cache_queries_total", "octavo_prefix_cache_hits_total")
    lines = [
        f'{name}{{group="{group}",model_name="m"}} {value}'
        for group, values in groups.items()
        for name, value in zip(names, values, strict=True)
    ]
    return "\n".join(lines) + "\n"


def test_counts_are_what_was_added_since_by_group() -> None:
    before = PrefillCounts({"a": 100.0}, {"a": 20.0})
    counts = PrefillCounts({"a": 400.0, "b": 100.0}, {"a": 220.0, "b": 0.0}).since(before)
    assert counts.computed == {"a": 100.0, "b": 100.0}
    assert counts.hit_rate == 0.5
    assert counts.imbalance == 1.0


def test_a_group_that_did_nothing_counts_in_the_imbalance() -> None:
    assert PrefillCounts({"a": 90.0, "b": 0.0, "c": 0.0}, {}).imbalance == 3.0


def test_counts_are_read_until_groups_have_reported_all_of_it(api: ScriptedApi) -> None:
    api.metrics = [exposition(a=(10, 5)), exposition(a=(40, 5)), exposition(a=(110, 55), b=(20, 0))]

    async def read() -> PrefillCounts:
        async with Client(Server(api.url, {})) as client:
            return await read_grown_counts(client, await read_counts(client), 120)

    counts = asyncio.run(read())
    assert counts.computed == {"a": 50.0, "b": 20.0}
    assert not api.metrics


def test_each_policy_is_a_row() -> None:
    run = run_of([sample()], wall_s=2.0)
    trial = Trial(Result("cost", {}, None, (run, run)), PrefillCounts({"a": 300.0, "b": 100.0}, {"a": 200.0}), False)
    (headings, row) = rows({"cost": trial})
    assert dict(zip(headings, row, strict=True)) == {
        "policy": "cost",
        "cache hits": "50.0%",
        "prefill tokens": "100",
        "TTFT p50, s": "1.000 ± 0.000",
        "TTFT p99, s": "1.000 ± 0.000",
        "requests/s": "0.500 ± 0.000",
        "output tokens/s": "1.500 ± 0.000",
        "most / mean": "1.00",
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--", "--routing-policy=cost"), "--routing-policy=cost: the comparison sets it itself"),
        (("--dataset-name", "trace"), "--dataset-path: must be said with --dataset-name trace"),
        (("--num-turns", "3"), "--num-turns: says nothing with --dataset-name prefix_repetition"),
        (("--json", "nowhere/a.json"), "--json: nowhere/a.json: No such file"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_started(flags: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "affinity", *flags])
    assert result.exit_code == 2, result.output
    assert result.output.startswith(f"octavo bench affinity: error: {message}")


def test_a_cluster_that_does_not_come_up_is_told_by_its_last_line() -> None:
    message = r"did not come up: octavo serve: error: .*--block-size"
    with pytest.raises(NotServed, match=message), served(["--block-size", "0"]):
        raise AssertionError
