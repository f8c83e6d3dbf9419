"""Flags, variables and file together: who wins, and whom an error names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from octavo.cluster.cli import main
from octavo.cluster.config import ServeConfig
from octavo.cluster.config_file import read_config_file
from octavo.cluster.config_sources import merge, merge_args
from octavo.worker.errors import ConfigurationError

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_AND_LARGE = "max_num_seqs: 8\nmodels:\n  - model: some/small\n    max_model_len: 512\n  - model: some/large\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def show(*flags: str, file: str | None = None, **variables: str) -> Result:
    if file is not None:
        Path("octavo.yaml").write_text(file)
        flags = ("--config", "octavo.yaml", *flags)
    return CliRunner().invoke(main, ("config", "show", *flags), prog_name="octavo", env=variables)


def merged(*flags: str, **given: Any) -> dict[str, Any]:
    result = show("--json", *flags, **given)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*flags: str, **given: Any) -> str:
    result = show(*flags, **given)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr.removeprefix("octavo config show: error: ").strip()


def test_a_flag_goes_before_a_variable_and_that_before_the_file() -> None:
    said = merged(
        *("--port", "1"),
        file="port: 3\nnum_routers: 3\nmax_num_seqs: 3\n",
        OCTAVO_PORT="2",
        OCTAVO_NUM_ROUTERS="2",
    )
    fields = ["port", "num_routers", "max_num_seqs", "host"]
    assert [said["values"][name] for name in fields] == [1, 2, 3, "127.0.0.1"]
    assert [said["sources"][name] for name in fields] == ["--port", "OCTAVO_NUM_ROUTERS", "octavo.yaml:3", "default"]


def test_an_empty_variable_is_not_set() -> None:
    assert merged(OCTAVO_PORT="")["sources"]["port"] == "default"


def test_what_is_shown_is_a_file_that_says_the_same() -> None:
    text = show(file=(EXAMPLES / "two_models.yaml").read_text()).stdout
    assert re.search(r"served_model_name: chat  # octavo.yaml:\d+\n", text)
    assert merged(file=text)["values"] == merged(file=(EXAMPLES / "two_models.yaml").read_text())["values"]


def test_keys_are_not_shown() -> None:
    for output in (show(OCTAVO_API_KEY="secret").stdout, show("--json", "--api-key", "secret").stdout):
        assert "1 hidden" in output
        assert "secret" not in output
        assert "sha256" not in output


def test_paths_begin_at_the_folder_of_the_file_that_says_them_and_others_at_the_current_one(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    (folder / "shares" / "model").mkdir(parents=True)
    (folder / "shares" / "tenants.json").write_text('{"a": {"weight": 2}}')
    (folder / "octavo.yaml").write_text(
        "api_key_file: keys\ncache_dir: /var/cache\ntenants: '@shares/tenants.json'\ngeneration_config: none\n"
        "models: [{model: shares/model, chat_template: ../t.jinja}, {model: owner/name, generation_config: shares}]\n"
    )
    said = merged("--config", "etc/octavo.yaml", "--record-trace", "trace")["values"]
    assert (said["api_key_file"], said["cache_dir"]) == (str(folder / "keys"), "/var/cache")
    assert (said["generation_config"], said["record_trace"]) == ("none", str(tmp_path / "trace"))
    assert said["tenants"]["a"]["weight"] == 2
    first, second = said["models"]
    assert first == {"model": str(folder / "shares" / "model"), "chat_template": str(folder / ".." / "t.jinja")}
    assert second == {"model": "owner/name", "generation_config": str(folder / "shares")}


REFUSED: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "octavo.yaml:2: port: must be at most 65535, got 70000": ((), {"file": "host: a\nport: 70000\n"}),
    "octavo.yaml:1: prot: no such setting, did you mean port?": ((), {"file": "prot: 1"}),
    "octavo.yaml:1: port: must be a whole number, got nothing": ((), {"file": "port:\n"}),
    "octavo.yaml:1: tensor-parallel-size: no such setting, did you mean tensor_parallel_size?": (
        (),
        {"file": "tensor-parallel-size: 2"},
    ),
    "octavo.yaml:2: tenants.alice.weight: must be greater than 0.0, got 0": (
        (),
        {"file": "tenants:\n  alice: {weight: 0}"},
    ),
    "octavo.yaml:1: api_key: must be 1 to 1024 visible ASCII characters without blanks": ((), {"file": "api_key: a b"}),
    "octavo.yaml:1: enable_prefix_caching: must be true or false, got 1": ((), {"file": "enable_prefix_caching: 1"}),
    "octavo.yaml:1: keepalive_s: must be a number, got True": ((), {"file": "keepalive_s: true"}),
    "octavo.yaml:3: models.0.dtyp: no such setting, did you mean dtype?": (
        (),
        {"file": "models:\n  -\n    dtyp: auto"},
    ),
    "octavo.yaml:2: models.0.port: is a setting of the whole cluster, not of one model": (
        (),
        {"file": "models:\n  - port: 1"},
    ),
    "octavo.yaml:3: models.1.dtype: must be one of 'auto', 'float32', 'bfloat16' or 'float16', got int8": (
        (),
        {"file": "models:\n  - {}\n  - {dtype: int8}"},
    ),
    "octavo.yaml:1: max_num_batched_tokens: must be at least max_num_seqs (octavo.yaml:2) (9), got 8": (
        (),
        {"file": "max_num_batched_tokens: 8\nmax_num_seqs: 9"},
    ),
    "OCTAVO_MAX_NUM_BATCHED_TOKENS: must be at least --max-num-seqs (9), got 8": (
        ("--max-num-seqs", "9"),
        {"OCTAVO_MAX_NUM_BATCHED_TOKENS": "8"},
    ),
    "OCTAVO_PORT: must be a whole number, got x": ((), {"OCTAVO_PORT": "x"}),
    "OCTAVO_TENANTS: a.weight: must be greater than 0.0, got 0": ((), {"OCTAVO_TENANTS": '{"a": {"weight": 0}}'}),
    "OCTAVO_PROT: no such variable, did you mean OCTAVO_PORT?": ((), {"OCTAVO_PROT": "1"}),
    "OCTAVO_QQ: no such variable; there is one for each setting of octavo serve, such as OCTAVO_MAX_MODEL_LEN": (
        (),
        {"OCTAVO_QQ": "1"},
    ),
    "octavo.yaml:5: models.1: max_model_len (octavo.yaml:5): must be at least --block-size (16), got 8": (
        (),
        {
            "file": SMALL_AND_LARGE.replace("large\n", "large\n    max_model_len: 8\n").replace(
                "- model: some/large\n   ", "-"
            )
        },
    ),
    "octavo.yaml:5: models.1: served_model_name: some/small is the name of models.0 too; requests choose by it": (
        (),
        {"file": SMALL_AND_LARGE.replace("large", "small")},
    ),
    "--max-model-len says nothing for models.0, which has its own max_model_len (octavo.yaml:4);"
    " leave one of them out": (
        ("--max-model-len", "100"),
        {"file": SMALL_AND_LARGE},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_error_names_who_said_it(message: str) -> None:
    flags, given = REFUSED[message]
    assert refusal(*flags, **given) == message


def test_an_error_that_shows_later_names_who_said_it_too() -> None:
    """What is found out about the model, the machine or the cluster speaks of flags."""
    Path("octavo.yaml").write_text(SMALL_AND_LARGE + "port: 80\nmodel: a/b\nreplicas: 2\n")
    _, provenance = merge({"num_routers": "2"}, {"num_gateways": "3"}, read_config_file("octavo.yaml"))
    assert [provenance.named(message) for message in LATER] == list(LATER.values())
    with pytest.raises(ConfigurationError, match=r"^octavo.yaml:6: port: cannot listen$"), provenance.in_errors():
        raise ConfigurationError("--port: cannot listen")


LATER = {
    "--port: cannot listen on 0.0.0.0:80: Permission denied": (
        "octavo.yaml:6: port: cannot listen on 0.0.0.0:80: Permission denied"
    ),
    "MODEL: must not be empty": "octavo.yaml:7: model: must not be empty",
    "at most --replicas 1, or add nodes": "at most replicas (octavo.yaml:8) 1, or add nodes",
    "--num-routers: no": "--num-routers: no",
    "--num-gateways 3 says nothing": "OCTAVO_NUM_GATEWAYS 3 says nothing",
    "models.0: --max-model-len: the context is 100": (
        "octavo.yaml:3: models.0: max_model_len (octavo.yaml:4): the context is 100"
    ),
    "models.1: --max-num-seqs: 8 with --dtype float32": (
        "octavo.yaml:5: models.1: max_num_seqs (octavo.yaml:1): 8 with dtype float32"
    ),
}


def test_a_file_of_octavo_serve_can_be_the_args_of_a_serve_application() -> None:
    args = {"max_num_seqs": 8, "models": [{"model": "some/small", "max_model_len": 512}, {"model": "some/large"}]}
    config, _ = merge_args(args)
    assert config == ServeConfig.parse(args)
    with pytest.raises(ConfigurationError, match=r"^args: models.0.dtyp: no such setting, did you mean dtype\?"):
        merge_args({"models": [{"dtyp": "auto"}]})


def test_a_variable_goes_before_args(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "9")
    config, provenance = merge_args({"max_num_seqs": 8})
    assert (config.max_num_seqs, provenance.source(("max_num_seqs",)).where) == (9, "OCTAVO_MAX_NUM_SEQS")


def test_each_model_has_what_the_top_says_and_its_own() -> None:
    config, _ = merge_args({"max_num_seqs": 8, "models": [{"model": "a/a", "max_num_seqs": 4}, {"model": "b/b"}]})
    small, large = config.each_model()
    assert (small.model, small.max_num_seqs, small.models) == ("a/a", 4, ())
    assert (large.model, large.max_num_seqs) == ("b/b", 8)
    assert ServeConfig.parse(config.model_dump(mode="json")).each_model() == (small, large)
    assert config.with_models([small, large]).each_model() == (small, large)


def test_one_model_is_a_list_of_one() -> None:
    config = ServeConfig.parse({"model": "some/model"})
    assert config.each_model() == (config,)
    assert config.with_models(config.each_model()) == config
