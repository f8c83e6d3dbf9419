"""What each data set makes prompts of."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.cluster.load.datasets import DatasetName, DatasetOptions, workload_of
from octavo.cluster.load.scripts import Script, Talk
from octavo.cluster.load.words import ESTIMATED
from octavo.worker.errors import ConfigurationError

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_20.jsonl"


def scripts_of(name: DatasetName, count: int, seed: int = 0, **options: Any) -> list[Script]:
    scripts = workload_of(name, DatasetOptions(**options)).scripts(ESTIMATED, seed)
    return list(itertools.islice(scripts, count))


def words_of(text: str) -> list[str]:
    return text.split()


def prompt_of(script: Script) -> str:
    talk = Talk(script)
    talk.ask(script.turns[0])
    return talk.prompt()


def test_shared_beginnings_are_used_equally_often_and_have_their_length() -> None:
    scripts = scripts_of("prefix_repetition", 80, num_prefixes=8, prefix_len=100, input_len=32, output_len=5)
    assert sorted(Counter(script.system for script in scripts).values()) == [10] * 8
    assert {len(words_of(prompt_of(script))) for script in scripts} == {132}
    assert len({script.turns[0].text for script in scripts}) == 80
    assert {script.turns[0].num_output_tokens for script in scripts} == {5}


def test_random_lengths_lie_in_their_range() -> None:
    scripts = scripts_of("random", 300, input_len=100, output_len=10, range_ratio=0.5)
    lengths = [len(words_of(script.turns[0].text)) for script in scripts]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert min(lengths) < 60
    assert max(lengths) > 140
    assert {script.system for script in scripts} == {""}


@pytest.mark.parametrize("name", ["conversations", "agents"])
def test_conversations_have_turns_and_times_between_them(name: DatasetName) -> None:
    (script,) = scripts_of(name, 1, num_turns=5, think_time_s=2.0, range_ratio=0.0, input_len=20, prefix_len=7)
    assert [len(words_of(turn.text)) for turn in script.turns] == [20] * 5
    assert script.turns[0].pause_s == 0.0
    assert all(turn.pause_s > 0.0 for turn in script.turns[1:])
    assert len(words_of(script.system)) == 7


def test_another_seed_gives_other_prompts_and_the_same_one_the_same() -> None:
    first, again, other = (scripts_of("conversations", 5, seed) for seed in (1, 1, 2))
    assert first == again
    assert not {script.system for script in first} & {script.system for script in other}


def test_a_chat_and_a_completion_say_the_same() -> None:
    (script,) = scripts_of("conversations", 1, num_turns=2)
    talk = Talk(script)
    talk.ask(script.turns[0])
    talk.note_answer(" an answer")
    talk.ask(script.turns[1])
    assert [message["role"] for message in talk.messages()] == ["system", "user", "assistant", "user"]
    assert words_of(talk.prompt()) == words_of(" ".join(message["content"] for message in talk.messages()))


def test_gsm8k_has_the_same_examples_before_each_question(tmp_path: Path) -> None:
    compressed = tmp_path / "gsm8k.jsonl.gz"
    compressed.write_bytes(gzip.compress(GSM8K.read_bytes()))
    scripts = scripts_of("gsm8k", 99, dataset_path=compressed, num_shots=3)
    assert scripts == scripts_of("gsm8k", 99, dataset_path=GSM8K, num_shots=3)
    prompts = [prompt_of(script) for script in scripts]
    assert len(set(prompts)) == 17
    assert {prompt.count("Question:") for prompt in prompts} == {4}
    assert len({prompt.rpartition("Question:")[0] for prompt in prompts}) == 1
    assert all(prompt.endswith("\nAnswer:") for prompt in prompts)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 1500, [1, 2, 3]), (500, 1500, [1, 2, 4]), (4000, 1024, [1, 2])]
    lines = [{"timestamp": t, "input_length": n, "output_length": 8, "hash_ids": ids} for t, n, ids in rows]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_traces_prompts_have_its_lengths_and_begin_alike_as_far_as_its_ids_do(mooncake: Path) -> None:
    scripts = scripts_of("trace", 9, dataset_path=mooncake)
    first, second, third = (words_of(prompt_of(script)) for script in scripts)
    assert [len(first), len(second), len(third)] == [1500, 1500, 1024]
    assert first[:1024] == second[:1024] == third
    assert first[1024:1040] != second[1024:1040]
    assert [script.arrival_s for script in scripts] == [0.0, 0.5, 4.0]


def test_scaled_lengths_keep_what_prompts_have_in_common(mooncake: Path) -> None:
    scripts = scripts_of("trace", 9, dataset_path=mooncake, length_scale=1 / 16, output_len=3)
    first, second, third = (words_of(prompt_of(script)) for script in scripts)
    assert [len(first), len(second), len(third)] == [94, 94, 64]
    assert first[:64] == second[:64] == third
    assert first[64:80] != second[64:80]
    assert {script.turns[0].num_output_tokens for script in scripts} == {3}


def test_azures_prompts_have_nothing_in_common(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *[f"2023-11-16 18:17:0{n}.5000000,40,7" for n in (3, 5)]]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    first, second = scripts_of("trace", 9, dataset_path=path)
    assert words_of(prompt_of(first))[:16] != words_of(prompt_of(second))[:16]
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("random", {"num_turns": 3}, "--num-turns: says nothing with --dataset-name random"),
        ("trace", {}, "--dataset-path: must be said with --dataset-name trace"),
        ("gsm8k", {"dataset_path": GSM8K, "num_shots": 20}, "--num-shots: must be below the 20 problems"),
        ("gsm8k", {"dataset_path": Path("none.jsonl")}, "--dataset-path: none.jsonl: No such file"),
    ],
)
def test_what_a_data_set_does_not_have_is_refused(name: DatasetName, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        workload_of(name, DatasetOptions(**options))
