"""ServeConfig: defaults, round trips, and errors that name the flag, the limit and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from octavo.cluster.config import ServeConfig
from octavo.worker.errors import ConfigurationError


def test_the_defaults_serve_the_embedded_model_to_this_machine() -> None:
    config = ServeConfig.parse({})
    assert config.model is None
    assert (config.host, config.port, config.route_prefix) == ("127.0.0.1", 8000, "/")
    assert (config.tensor_parallel_size, config.block_size, config.enable_prefix_caching) == (1, 16, True)


def test_every_field_says_what_it_means() -> None:
    assert [name for name, field in ServeConfig.model_fields.items() if not field.description] == []


def test_it_survives_json_so_that_it_can_be_the_arguments_of_a_serve_application() -> None:
    config = ServeConfig.parse({"model": "some/model", "kv_cache_memory_bytes": "2GiB", "max_model_len": 4096})
    assert ServeConfig.parse(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_it_is_immutable() -> None:
    with pytest.raises(ValidationError):
        ServeConfig.parse({}).port = 1


def test_text_from_a_command_line_is_converted() -> None:
    config = ServeConfig.parse({"port": "0", "gpu_memory_utilization": "0.5", "kv_cache_memory_bytes": "1.5GiB"})
    assert (config.port, config.gpu_memory_utilization) == (0, 0.5)
    assert config.kv_cache_memory_bytes == 1536 * 1024 * 1024


def test_the_cache_folder_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ServeConfig.parse({"cache_dir": "models"}).cache_dir == tmp_path / "models"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "elsewhere")
    assert ServeConfig.parse({}).cache_dir == tmp_path / "elsewhere"


REFUSED = {
    "--block-size: must be a power of two between 16 and 128, got 17": {"block_size": "17"},
    "--port: must be at most 65535, got 70000": {"port": 70000},
    "--port: must be a whole number, got True": {"port": True},
    "--port: must be a whole number, got 80.5": {"port": 80.5},
    "--replicas: must be at least 1, got 0": {"replicas": 0},
    "--max-num-seqs: must be a whole number, got many": {"max_num_seqs": "many"},
    "--dtype: must be one of 'auto', 'float32', 'bfloat16' or 'float16', got fp8": {"dtype": "fp8"},
    "--gpu-memory-utilization: must be at most 1.0, got 1.5": {"gpu_memory_utilization": 1.5},
    "--gpu-memory-utilization: must be a finite number, got nan": {"gpu_memory_utilization": "nan"},
    "--kv-cache-memory-bytes: must be a size in bytes, such as 2GiB, got lots": {"kv_cache_memory_bytes": "lots"},
    "--kv-cache-memory-bytes: must be at least 1048576, got 4KiB": {"kv_cache_memory_bytes": "4KiB"},
    "--enable-prefix-caching: must be true or false, got maybe": {"enable_prefix_caching": "maybe"},
    "--route-prefix: must begin with / and not end with it, got api/": {"route_prefix": "api/"},
    "--cache-dir: must not be empty, got ''": {"cache_dir": ""},
    "MODEL: must not be empty, got ''": {"model": ""},
    "blocksize: no such setting, did you mean block_size?": {"blocksize": 16},
    "--max-num-batched-tokens: must be at least --max-num-seqs (64), got 63": {"max_num_batched_tokens": 63},
    "--max-model-len: must be at least --block-size (32), got 31": {"max_model_len": 31, "block_size": 32},
    "--num-gpu-blocks-override: 2 blocks of --block-size 16 hold 32 tokens, fewer than one sequence of"
    " --max-model-len 100": {"num_gpu_blocks_override": 2, "max_model_len": 100},
    "--num-gpu-blocks-override 9 and --kv-cache-memory-bytes 1048576 both say how large the KV cache is; set one of"
    " them": {"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": "1MiB"},
    "the configuration must be a mapping of settings, got [1]": [1],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_with_flag_limit_and_value(message: str) -> None:
    values: Any = REFUSED[message]
    with pytest.raises(ConfigurationError) as refusal:
        ServeConfig.parse(values)
    assert str(refusal.value) == message


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"--port: .*; --replicas: .*"):
        ServeConfig.parse({"port": -1, "replicas": 0})


def test_a_huge_value_is_not_repeated_whole() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        ServeConfig.parse({"dtype": "x" * 10_000})
    assert len(str(refusal.value)) < 300


def test_the_embedded_model_on_cpus_gets_two_groups() -> None:
    config = ServeConfig.parse({})
    assert config.for_device("cpu").replicas == 2
    assert config.for_device("cuda").replicas == 1
    assert ServeConfig.parse({"model": "some/model"}).for_device("cpu").replicas == 1
    assert ServeConfig.parse({"replicas": 5}).for_device("cpu").replicas == 5


def test_the_token_budget_depends_on_the_device_and_holds_every_sequence() -> None:
    config = ServeConfig.parse({})
    assert config.for_device("cpu").max_num_batched_tokens == 512
    assert config.for_device("cuda").max_num_batched_tokens == 2048
    assert ServeConfig.parse({"max_num_seqs": 1000}).for_device("cpu").max_num_batched_tokens == 1000
