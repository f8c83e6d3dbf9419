"""octavo.yaml as it is read: plain values, lines, and one-line errors that say where."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cluster.config_file import MOST_BYTES, ConfigFile, read_config_file
from octavo.worker.errors import ConfigurationError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "octavo.yaml"


def read(file: Path, content: str | bytes) -> ConfigFile:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_config_file(file.name)


def test_each_value_has_its_line(file: Path) -> None:
    read_file = read(file, "# ours\nport: 9000\n\nmodels:\n  - model: a\n    dtype: auto\n  - {model: b}\n")
    assert read_file.values == {"port": 9000, "models": [{"model": "a", "dtype": "auto"}, {"model": "b"}]}
    assert read_file.lines[("port",)] == 2
    assert [read_file.lines[place] for place in [("models", 0, "dtype"), ("models", 1), ("models", 1, "model")]] == [
        *(6, 7, 7)
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("no", "no"), ("on", "on"), ("12:30", "12:30"), ("2026-01-01", "2026-01-01"), ("'8'", "8"), ("1_0", "1_0")),
        *(("true", True), ("False", False), ("~", None), ("", None), ("null", None)),
        *(("8", 8), ("-3", -3), ("0644", 644), ("0x1f", 31), ("0o17", 15)),
        *(("0.5", 0.5), ("1e3", 1000.0), (".5", 0.5), ("-.inf", float("-inf"))),
    ],
)
def test_words_are_what_yaml_1_2_says(file: Path, text: str, value: object) -> None:
    read_value = read(file, f"a: {text}\n").values["a"]
    assert (read_value, type(read_value)) == (value, type(value))


def test_names_are_texts(file: Path) -> None:
    assert read(file, "tenants: {123: {}, no: {}, null: {}}").values == {"tenants": {"123": {}, "no": {}, "null": {}}}


def test_an_alias_repeats_a_part(file: Path) -> None:
    assert read(file, "a: &x {b: 1}\nc: *x\n").values == {"a": {"b": 1}, "c": {"b": 1}}


REFUSED = {
    "octavo.yaml:3: port is there twice, first in line 1": "port: 1\nhost: a\nport: 2\n",
    "octavo.yaml:3: weight is there twice, first in line 2": "tenants:\n  a: {weight: 1,\n      weight: 2}\n",
    "octavo.yaml:2: a tab, where YAML takes blanks only": "models:\n\t- model: a\n",
    "octavo.yaml:2: the file ends too early: expected ',' or '}', but got '<stream end>'": "models:\n  - {model: a",
    "octavo.yaml:2: the file ends too early: found unexpected end of stream": 'port: 1\nmodel: "a/b\n',
    "octavo.yaml:1: must hold settings, one `name: value` a line": "- model: a\n",
    "octavo.yaml: is empty; a file that sets nothing is {}": "# nothing yet\n",
    "octavo.yaml:2: is not UTF-8, which a configuration file must be (byte 0xff)": b"port: 1\nmodel: \xff\n",
    "octavo.yaml:1: is not UTF-8, which a configuration file must be (byte 0xfe)": b"\xfe\xff\x00p",
    "octavo.yaml:2: character '\\x00' is not allowed in YAML": "port: 1\nmodel: a\0\n",
    "octavo.yaml:1: mapping values are not allowed here": "model: a: b\n",
    "octavo.yaml:2: the name of a setting must be a word": "port: 1\n? [model]\n: a\n",
    "octavo.yaml:1: the tag tag:yaml.org,2002:python/name:os.x is not allowed": "model: !!python/name:os.x ''",
    "octavo.yaml:1: found undefined alias 'a'": "model: *a\n",
    "octavo.yaml:1: more than 20000 values, or lists within lists without an end": "models: &a [*a]\n",
    "octavo.yaml: is nested too deeply": "models: " + "[" * 1500,
    "--config: octavo.yaml has more than 1048576 bytes": "#" * (MOST_BYTES + 1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_configuration_is_refused_with_its_line(file: Path, message: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read(file, REFUSED[message])
    assert str(refusal.value) == message


def test_a_small_file_cannot_become_a_large_configuration(file: Path) -> None:
    doubled = "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    with pytest.raises(ConfigurationError, match="more than 20000 values"):
        read(file, f"a0: &a0 [x]\n{doubled}")


@pytest.mark.parametrize(("path", "reason"), [("none.yaml", "No such file"), (".", "Is a directory"), ("a\0b", "null")])
def test_a_file_that_cannot_be_read_is_named(file: Path, path: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"--config: .* cannot be read: .*{reason}"):
        read_config_file(path)
