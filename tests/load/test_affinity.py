"""What ``octavo bench affinity`` makes of a cluster's counters, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from click.testing import CliRunner
from load_plays import run_of, sample
from scripted_api import ScriptedApi

from octavo.cluster.cli import main
from octavo.cluster.load.affinity import Trial, cpu_rows, rows, serve_flags
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
    trial = Trial(
        Result("cost", {}, None, (run, run)), PrefillCounts({"a": 300.0, "b": 100.0}, {"a": 200.0}), {}, False
    )
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


def test_cpu_is_told_of_each_kind_of_process_and_policy() -> None:
    run = run_of([sample(), sample()], wall_s=2.0)
    counts = PrefillCounts({}, {})
    one = Trial(Result("cost", {}, None, (run,)), counts, {"router": 0.5, "gateway": 1.0, "proxy": 0.0}, False)
    two = Trial(Result("round_robin", {}, None, (run,)), counts, {"gateway": 2.0}, False)
    assert cpu_rows({"cost": one, "round_robin": two}) == [
        ("CPU, ms/request (cores)", "cost", "round_robin"),
        ("gateway", "500.00 (0.50)", "1000.00 (1.00)"),
        ("router", "250.00 (0.25)", "0.00 (0.00)"),
    ]


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, ["--replicas", "2"]),
        ({"replicas": 3, "serve_flags": ("--dtype", "auto")}, ["--dtype", "auto", "--replicas", "3"]),
        ({"fake_groups": 200}, ["--fake-engine", "h100-8b", "--replicas", "200"]),
        (
            {"fake_groups": 9, "serve_flags": ("--fake-engine=h200-8b",)},
            ["--fake-engine=h200-8b", "--replicas", "9"],
        ),
    ],
)
def test_groups_are_real_ones_or_fake_ones(given: dict[str, Any], flags: list[str]) -> None:
    assert serve_flags({"serve_flags": (), "replicas": None, "fake_groups": None} | given) == flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--", "--routing-policy=cost"), "--routing-policy=cost: the comparison sets it itself"),
        (("--dataset-name", "trace"), "--dataset-path: must be said with --dataset-name trace"),
        (("--num-turns", "3"), "--num-turns: says nothing with --dataset-name prefix_repetition"),
        (("--replicas", "2", "--fake-groups", "9"), "--replicas: says nothing with --fake-groups 9"),
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
