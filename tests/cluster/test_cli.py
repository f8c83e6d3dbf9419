"""The command line as a person meets it: help, messages, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from octavo.cluster.cli import main
from octavo.cluster.config import ServeConfig
from octavo.cluster.config_paths import absolute_model

OCTAVO = Path(sys.executable).with_name("octavo")


def octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command."""
    return subprocess.run([OCTAVO, *arguments], capture_output=True, text=True, check=False)


def refused(*arguments: str) -> Result:
    """In this process, which takes a tenth of the time."""
    return CliRunner().invoke(main, arguments, prog_name="octavo")


def loaded_by_help(*libraries: str) -> str:
    program = f"""
import sys
from octavo.cluster.cli import main
main(["--help"], standalone_mode=False)
print("loaded:", [name for name in {libraries!r} if name in sys.modules])
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_help_lists_the_commands_that_exist() -> None:
    result = octavo("--help")
    assert result.returncode == 0
    commands = result.stdout.partition("Commands:")[2].split("\n")
    listed = [line.split()[0] for line in commands if line.strip()]
    assert {"serve", "config", "model", "simulate"} <= set(listed)
    assert [name for name in listed if refused(name, "--help").exit_code != 0] == []


def test_help_loads_nothing_heavy() -> None:
    assert "loaded: []" in loaded_by_help("pydantic", "ray", "torch", "transformers", "fastapi", "numpy")


def test_version() -> None:
    assert octavo("--version").stdout.startswith("octavo 0.")


def test_serve_has_a_flag_for_every_setting() -> None:
    text = octavo("serve", "--help").stdout
    flags = {"--" + name.replace("_", "-") for name in ServeConfig.model_fields if name not in ("model", "models")}
    assert [flag for flag in flags if f"{flag} " not in text] == []
    assert "--no-enable-prefix-caching" in text
    assert "--no-async-scheduling" in text
    assert "[MODEL]" in text
    assert "--config FILE" in text


REFUSED = {
    (
        "serve",
        "--block-size",
        "17",
    ): "octavo serve: error: --block-size: must be a power of two between 16 and 128, got 17",
    ("serve", "--max-num-batched-tokens", "8", "--max-num-seqs", "9"): (
        "octavo serve: error: --max-num-batched-tokens: must be at least --max-num-seqs (9), got 8"
    ),
    ("serve", "--dtype", "float31"): (
        "octavo serve: error: --dtype: must be one of 'auto', 'float32', 'bfloat16' or 'float16', got float31"
    ),
    ("serve", "--device", "cpu", "--gpu-memory-utilization", "0.5"): (
        "octavo serve: error: --gpu-memory-utilization 0.5 says nothing where the device is cpu"
    ),
    ("serve", "--tenants", "@none.json"): (
        "octavo serve: error: --tenants: cannot be read (No such file or directory), got @/"
    ),
    ("serve", ""): "octavo serve: error: MODEL: must not be empty, got ''",
    ("model", "fetch", "./nowhere"): "octavo model fetch: error: ",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_bad_value_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = refused(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(REFUSED[arguments])
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("serve", "--portt", "1"), "--port"),
        (("serve", "--block_size", "16"), "--block-size"),
        (("serve", "--port"), "requires an argument"),
        (("serve", "one", "two"), "unexpected extra argument"),
        (("lanch",), "No such command"),
    ],
)
def test_a_mistyped_command_line_is_exit_code_2_with_a_hint(arguments: tuple[str, ...], hint: str) -> None:
    result = refused(*arguments)
    assert result.exit_code == 2
    assert hint in result.stderr


def test_an_unknown_variable_is_refused_like_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PROT", "8000")
    result = octavo("serve")
    assert result.returncode == 2
    assert result.stderr.startswith("octavo serve: error: OCTAVO_PROT: no such variable, did you mean OCTAVO_PORT?")
    assert len(result.stderr.splitlines()) == 1


def test_a_model_that_is_a_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cluster's processes run in other folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert absolute_model("here") == str(tmp_path / "here")
    assert absolute_model("./missing") == str(tmp_path / "missing")
    assert absolute_model("file.gguf") == str(tmp_path / "file.gguf")
    assert absolute_model("owner/name") == "owner/name"
    assert absolute_model("") == ""
