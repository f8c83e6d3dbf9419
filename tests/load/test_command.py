"""``octavo bench serve`` and ``compare`` from flags to files."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from scripted_api import Reply, ScriptedApi

from octavo.cluster.cli import main

FEW = ("--num-prompts", "12", "--max-concurrency", "4", "--input-len", "8", "--output-len", "3")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def load(api: ScriptedApi, *arguments: str) -> Result:
    return bench("serve", "--base-url", api.url, *arguments)


def test_a_load_ends_in_a_table_a_file_a_figure_and_a_page(api: ScriptedApi, tmp_path: Path) -> None:
    api.reply = lambda seen, number: Reply(group=f"g{number % 2}", num_cached_tokens=4)
    png, html, figures = tmp_path / "figure.png", tmp_path / "page.html", tmp_path / "figures.json"
    files = ("--plot", str(png), "--html", str(html), "--json", str(figures))
    result = load(api, *FEW, *files, "--slo", "ttft=60s", "--repeat", "2", "--num-warmups", "3")
    assert result.exit_code == 0, result.output
    assert len(api.seen) == 3 + 2 * 12
    for part in ("time to first token, ms", "24 of 24 answered", "goodput: 100.0%", "50.0% of their tokens", "g0 6"):
        assert part in result.output
    value = json.loads(figures.read_text())
    assert value["figures"]["output_tokens_per_s"]["deviation"] > 0.0
    assert [len(run["samples"]) for run in value["runs"]] == [12, 12]
    assert value["conditions"]["model"] == "scripted"
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)|url\((?!#)|@import|<script", page)
    assert page.count("<svg") == 6
    assert "prefers-color-scheme" in page
    assert "viewport" in page


def test_all_of_a_request_is_said(api: ScriptedApi) -> None:
    api.key = "secret"
    flags = ("--api-key", "secret", "--header", "x-test=1", "--temperature", "0.5", "--ignore-eos")
    chat = ("--endpoint", "/v1/chat/completions", "--extra-body", '{"logit_bias": {"1": 2}}', "--json", "-")
    result = load(api, *FEW, *flags, *chat)
    assert result.exit_code == 0, result.output
    assert "secret" not in result.output
    seen = api.seen[0]
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["x-test"] == "1"
    fields = {"temperature": 0.5, "ignore_eos": True, "logit_bias": {"1": 2}, "max_completion_tokens": 3}
    assert {name: seen.body[name] for name in fields} == fields
    assert json.loads(result.stdout)["conditions"]["extra_body"] == '{"logit_bias": {"1": 2}}'


def test_lengths_are_those_of_the_servers_tokenizer_where_it_has_one(api: ScriptedApi) -> None:
    api.count = lambda text: 2 * len(text.split())
    result = load(api, *FEW, "--json", "-")
    assert json.loads(result.stdout)["conditions"]["lengths"] == "estimated, 2.00 tokens a word by /tokenize"
    assert {len(seen.text.split()) for seen in api.seen} == {4}


def test_two_files_are_compared(api: ScriptedApi, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for file, length in zip(files, ("8", "9"), strict=True):
        assert load(api, *FEW, "--input-len", length, "--json", file, "--slo", "ttft=60s").exit_code == 0
    result = bench("compare", *files)
    assert result.exit_code == 0, result.output
    assert "ttft_s.p50" in result.output
    assert "99 % interval" in result.output
    assert "input_len: 8 / 9" in result.output
    assert re.search(r"goodput +1 +1 +1.000", result.output)


def test_errors_are_told_by_kind_and_a_load_without_an_answer_fails(api: ScriptedApi) -> None:
    api.reply = lambda seen, number: Reply(status=503)
    result = load(api, *FEW)
    assert result.exit_code == 1
    assert "error: 12 × http 503, such as:" in result.output
    assert result.output.splitlines()[-1] == "octavo bench serve: error: no request was answered"


def test_ctrl_c_prints_what_there_is(api: ScriptedApi) -> None:
    def reply(seen: object, number: int) -> Reply:
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)
            api.hold()
        return Reply()

    api.reply = reply
    result = load(api, *FEW, "--max-concurrency", "1", "--repeat", "3")
    assert result.exit_code == 130
    assert re.search(r"requests: [78] of [89] answered", result.output), result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--base-url", "http://127.0.0.1:1"), "--base-url: http://127.0.0.1:1/v1/models does not answer"),
        (("--base-url", "here"), "--base-url: must be such as http"),
        (("--model", "other"), "--model: 'other' is not served; there is scripted"),
        (("--header", "x"), "--header: must be NAME=VALUE"),
        (("--extra-body", "[1]"), "--extra-body: must be a JSON object"),
        (("--extra-body", '{"stream": false}'), "--extra-body: stream is set by other options"),
        (("--slo", "fast"), "--slo: terms such as"),
        (("--request-rate", "0"), "neither a number above 0 nor inf nor recorded"),
        (("--request-rate", "recorded"), "--request-rate: recorded needs --dataset-name trace"),
        (("--burstiness", "2"), "--burstiness: says nothing without --request-rate"),
        (("--time-scale", "2"), "--time-scale: says nothing where"),
        (("--duration", "5"), "--duration: say --max-concurrency"),
        (("--num-turns", "2"), "--num-turns: says nothing with --dataset-name random"),
        (("--tokenizer", "nowhere"), "--tokenizer: nowhere is neither"),
        (("--html", "nowhere/page.html"), "--html: nowhere/page.html: No such file"),
    ],
)
def test_a_mistake_is_one_line_before_any_request(api: ScriptedApi, flags: tuple[str, ...], message: str) -> None:
    result = load(api, *flags)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not api.seen


def test_a_key_that_is_not_taken_is_one_line(api: ScriptedApi) -> None:
    api.key = "secret"
    result = load(api, "--api-key", "wrong")
    assert result.exit_code == 2
    assert result.output.strip().endswith("--api-key: the server asks for a key, or does not take this one")


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    result = bench("compare", str(path), str(path))
    assert result.exit_code == 2
    assert "not written by octavo bench serve --json" in result.output
