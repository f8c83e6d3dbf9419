"""ServeConfig: defaults, round trips, and errors that name the flag, the limit and the value."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from octavo.cluster.config import ServeConfig
from octavo.cluster.plan import ServePlan
from octavo.worker.errors import ConfigurationError
from octavo.worker.memory import KvBudget
from octavo.worker.spec import WorkerSpec


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
    "--api-key: must be 1 to 1024 visible ASCII characters without blanks": {"api_key": ["my secret"]},
    "--api-key: must be a list": {"api_key": {"key": "secret"}},
    "--api-key: 0: must be text": {"api_key": [12345678]},
    "--ssl-keyfile: must be a path": {"ssl_keyfile": ["-----BEGIN PRIVATE KEY-----"]},
    '--allowed-origins: must be a word or a JSON list such as ["a", "b"], got [x': {"allowed_origins": "[x"},
    "--max-body-bytes: must be at least 1024, got 1": {"max_body_bytes": 1},
    "--keepalive-s: must be at least 0.0, got -1": {"keepalive_s": -1},
    "--slow-client-timeout-s: must be greater than 0.0, got 0": {"slow_client_timeout_s": 0},
    "--ssl-keyfile says nothing without --ssl-certfile": {"ssl_keyfile": "k"},
    "--target-ttft-ms 500 says nothing without --max-replicas, up to which there are more worker"
    " groups where they are needed": {"target_ttft_ms": 500},
    "--downscale-delay-s 60 says nothing without --max-replicas, up to which there are more worker"
    " groups where they are needed": {"downscale_delay_s": 60},
    "--allowed-methods says nothing without --allowed-origins": {"allowed_methods": ["GET"]},
    "--allow-credentials needs --allowed-origins that names the origins: with * any web page could act in a visitor's"
    " name": {"allow_credentials": True, "allowed_origins": "*"},
    "--port: must be at most 65535, got 70000": {"port": 70000},
    "--port: must be a whole number, got True": {"port": True},
    "--port: must be a whole number, got 80.5": {"port": 80.5},
    "--replicas: must be at least 1, got 0": {"replicas": 0},
    "--max-num-seqs: must be a whole number, got many": {"max_num_seqs": "many"},
    "--dtype: must be one of 'auto', 'float32', 'bfloat16' or 'float16', got fp8": {"dtype": "fp8"},
    "--quantization: must be one of 'int8' or 'fp8', got int4": {"quantization": "int4"},
    "--kv-cache-dtype: must be one of 'auto', 'fp8_e4m3' or 'int8', got fp8": {"kv_cache_dtype": "fp8"},
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
    "--max-num-seqs: 65 sequences need a KV block each, more than the 40 of --num-gpu-blocks-override": {
        "num_gpu_blocks_override": 40,
        "max_num_seqs": 65,
    },
    "--gpu-memory-utilization 0.5 says nothing where the device is cpu; --kv-cache-memory-bytes sets what KV may take"
    " there": {"device": "cpu", "gpu_memory_utilization": 0.5},
    "--scheduling-policy: must be one of 'fcfs', 'priority', 'shortest' or 'fair', got lifo": {
        "scheduling_policy": "lifo"
    },
    "--priority-aging-s 5 says nothing with --scheduling-policy fcfs, which knows no priorities; leave one of them"
    " out": {"scheduling_policy": "fcfs", "priority_aging_s": 5},
    "--priority-aging-s: must be greater than 0.0, got 0": {"priority_aging_s": 0},
    "--target-itl-ms: must be greater than 0.0, got 0": {"target_itl_ms": 0},
    "--target-itl-ms: must be at most 60000.0, got 60001": {"target_itl_ms": 60001},
    "--max-output-tokens: must be at least 1, got 0": {"max_output_tokens": 0},
    "--max-output-tokens: must be less than the context (100 tokens, --max-model-len), got 100": {
        "max_output_tokens": 100,
        "max_model_len": 100,
    },
    "--max-queued-requests: must be at least 1, got 0": {"max_queued_requests": 0},
    "--max-queued-tokens: must be at least 1, got 0": {"max_queued_tokens": 0},
    "--routing-policy: must be one of 'cost', 'round_robin', 'least_loaded', 'power_of_two' or 'consistent_hash', got"
    " best": {"routing_policy": "best"},
    "--router-index-bytes: must be at least 16777216, got 1MiB": {"router_index_bytes": "1MiB"},
    "--router-max-queued-requests: must be at least 0, got -1": {"router_max_queued_requests": -1},
    "--num-routers: must be at most 4, got 5": {"num_routers": 5},
    "--tenants: alice.weight: must be greater than 0.0, got 0": {"tenants": '{"alice": {"weight": 0}}'},
    "--tenants: *.max_running_requests: must be at least 1, got 0": {"tenants": {"*": {"max_running_requests": 0}}},
    "--tenants: a.b.max_queued_requests: must be at least 0, got -1": {"tenants": {"a.b": {"max_queued_requests": -1}}},
    "--tenants: alice.weight: must be a number, got much": {"tenants": {"alice": {"weight": "much"}}},
    "--tenants: alice.wieght: no such setting": {"tenants": {"alice": {"wieght": 2}}},
    "--tenants: alice: must be a mapping of settings, got 3": {"tenants": {"alice": 3}},
    "--tenants: must be a mapping of names, got []": {"tenants": "[]"},
    "--tenants: cannot be read (No such file or directory), got @/nowhere/tenants.json": {
        "tenants": "@/nowhere/tenants.json"
    },
    "--record-trace: must not be empty, got ''": {"record_trace": ""},
    "the configuration must be a mapping of settings, got a list": [1],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_with_flag_limit_and_value(message: str) -> None:
    values: Any = REFUSED[message]
    with pytest.raises(ConfigurationError) as refusal:
        ServeConfig.parse(values)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {"num_gpu_blocks_override": 40},
        {"max_queued_tokens": 1, "max_output_tokens": 99, "max_model_len": 100},
        {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": "1GiB"},
    ],
)
def test_what_limits_without_contradicting_is_taken(values: dict[str, Any]) -> None:
    """The default of --max-num-seqs need not be reached; utilization is the wall for a pool that is set."""
    ServeConfig.parse(values)


TENANTS = {"alice": {"weight": 2.5, "max_running_requests": 8}, "*": {"max_queued_requests": 0}}


def test_tenants_come_as_a_mapping_as_json_or_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "tenants.json").write_text(json.dumps(TENANTS))
    given = [TENANTS, json.dumps(TENANTS), f"@{tmp_path / 'tenants.json'}"]
    first, *others = [ServeConfig.parse({"tenants": value}) for value in given]
    assert others == [first, first]
    alice, rest = first.tenants["alice"], first.tenants["*"]
    assert (alice.weight, alice.max_running_requests, alice.max_queued_requests) == (2.5, 8, None)
    assert (rest.weight, rest.max_running_requests, rest.max_queued_requests) == (1.0, None, 0)
    assert ServeConfig.parse(json.loads(json.dumps(first.model_dump(mode="json")))) == first


def test_tenants_that_are_no_json_are_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tenants: .*; what is given is none \(.*line 1.*\), got alice"):
        ServeConfig.parse({"tenants": "alice"})
    (tmp_path / "tenants.json").write_text("{\n1")
    with pytest.raises(ConfigurationError, match=r"--tenants: .*; what is in /.*tenants\.json is none \(.*line 2"):
        ServeConfig.parse({"tenants": f"@{tmp_path / 'tenants.json'}"})


def test_utilization_is_refused_when_the_device_turns_out_to_be_a_cpu() -> None:
    config = ServeConfig.parse({"gpu_memory_utilization": 0.5})
    assert config.for_device("cuda").gpu_memory_utilization == 0.5
    with pytest.raises(ConfigurationError, match=r"--gpu-memory-utilization 0\.5"):
        config.for_device("cpu")


def test_batch_invariance_is_refused_where_no_kernel_has_it() -> None:
    config = ServeConfig.parse({"batch_invariant": True, "dtype": "bfloat16"})
    assert config.for_device("cuda").batch_invariant
    with pytest.raises(ConfigurationError, match=r"--batch-invariant does not go with --dtype bfloat16"):
        config.for_device("cpu")
    with pytest.raises(ConfigurationError, match=r"--tensor-parallel-size: must be at most 2 .* got 3"):
        ServeConfig.parse({"batch_invariant": True, "tensor_parallel_size": 3})


def test_the_workers_are_told() -> None:
    told = spec_of({"target_itl_ms": 50, "scheduling_policy": "fair", "max_output_tokens": 7, "max_queued_requests": 8})
    assert (told.target_itl_s, told.scheduling_policy) == (0.05, "fair")
    assert (told.max_output_tokens, told.max_queued_requests, told.max_queued_tokens) == (7, 8, None)
    assert spec_of({"enforce_eager": True}).enforce_eager
    assert spec_of({"batch_invariant": True}).batch_invariant
    told = spec_of({"quantization": "fp8", "kv_cache_dtype": "int8"})
    assert (told.quantization, told.kv_cache_dtype) == ("fp8", "int8")
    told = spec_of({"max_queued_tokens": 9, "async_scheduling": False, "priority_aging_s": 5})
    assert (told.max_queued_tokens, told.async_scheduling, told.priority_aging_s) == (9, False, 5.0)


def test_the_workers_defaults_are_those_of_the_configuration() -> None:
    told, own = spec_of({}), {field.name: field.default for field in dataclasses.fields(WorkerSpec)}
    names = ["scheduling_policy", "target_itl_s", "priority_aging_s", "async_scheduling", "max_queued_tokens"]
    names += ["enforce_eager", "batch_invariant", "quantization", "kv_cache_dtype"]
    assert [getattr(told, name) for name in names] == [own[name] for name in names]
    assert told.gpu_memory_utilization == KvBudget().gpu_memory_utilization == 0.9


def spec_of(values: dict[str, Any]) -> WorkerSpec:
    config = ServeConfig.parse(values).for_device("cuda")
    return ServePlan(config, "cuda", None, "smollm2", bytes(32), 1).worker_spec("group", 1, ("router",))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"--replicas: .*; --port: .*"):
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


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 1024),
        ({"router_max_queued_requests": 5}, 5),
        ({"router_max_queued_requests": 0}, None),
        ({"max_queued_requests": 7}, None),
        ({"max_queued_tokens": 700}, None),
        ({"scheduling_policy": "shortest"}, None),
        ({"max_queued_requests": 7, "router_max_queued_requests": 5}, 5),
    ],
)
def test_requests_wait_in_the_router_unless_something_says_how_they_wait_in_groups(
    values: dict[str, object], expected: int | None
) -> None:
    assert ServeConfig.parse(values).num_queued_in_router == expected
