"""What is judged before any process is started: the context that a set pool holds, and this machine's memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from octavo.cluster.config import ServeConfig, check_served_names
from octavo.cluster.preflight import check_chat_template, check_model, fit_context
from octavo.cluster.preflight_memory import check_memory
from octavo.kernels.kv_cache import bytes_per_block
from octavo.worker.errors import ConfigurationError
from octavo.worker.host_memory import host_memory

CONTEXT = 4096
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 64 * 4
"""Layers × (K, V) × KV heads × block size × head_dim × float32."""
BYTES_PER_INT8_BLOCK = bytes_per_block(2, 2, 16, 64, torch.int8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    return path


def config(**values: Any) -> ServeConfig:
    return ServeConfig.parse({"device": "cpu", **values})


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def fitted(folder: Path, **values: Any) -> tuple[int | None, list[str]]:
    notes: list[str] = []
    return fit_context(config(**values), folder, notes.append).max_model_len, notes


def test_a_context_that_was_not_set_is_lowered_to_what_a_set_number_of_blocks_holds(folder: Path) -> None:
    length, notes = fitted(folder, num_gpu_blocks_override=100)
    assert length == 1600
    assert notes == [
        "--max-model-len: 1,600 tokens, all that the KV pool as set can hold; the model's context is 4,096"
    ]


@pytest.mark.parametrize(
    ("values", "length"),
    [
        ({"device": "cpu"}, 16 * (2**20 // BYTES_PER_BLOCK)),
        ({"device": "cpu", "dtype": "bfloat16"}, 16 * (2**20 // BYTES_PER_BLOCK)),
        ({"device": "cpu", "kv_cache_dtype": "int8"}, 16 * (2**20 // BYTES_PER_INT8_BLOCK)),
        ({"device": "cuda", "kv_cache_dtype": "fp8_e4m3"}, 16 * (2**20 // BYTES_PER_INT8_BLOCK)),
        ({"device": "cpu", "tensor_parallel_size": 2}, 32 * (2**20 // BYTES_PER_BLOCK)),
        ({"device": "cuda", "dtype": "bfloat16"}, 32 * (2**20 // BYTES_PER_BLOCK)),
    ],
)
def test_or_to_what_set_bytes_hold_of_the_ranks_share_in_its_type(
    folder: Path, values: dict[str, Any], length: int
) -> None:
    assert fitted(folder, kv_cache_memory_bytes="1MiB", **values)[0] == length


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_gpu_blocks_override": CONTEXT // 16},
        {"kv_cache_memory_bytes": "4MiB", "device": "auto", "address": "joined:6379"},
    ],
)
def test_else_the_context_is_the_models(folder: Path, values: dict[str, Any]) -> None:
    """Nothing set, enough set, or the device not known yet."""
    assert fitted(folder, **values) == (None, [])


def test_a_context_that_was_set_is_never_changed(folder: Path) -> None:
    assert fitted(folder, kv_cache_memory_bytes="1MiB", max_model_len=CONTEXT) == (CONTEXT, [])


def test_settings_that_do_not_fit_the_lowered_context_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--max-output-tokens: must be less than .*1600.*, got 2000"):
        fitted(folder, num_gpu_blocks_override=100, max_output_tokens=2000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": CONTEXT + 1}, r"--max-model-len: the model's context is 4096 tokens, got 4097"),
        ({"max_output_tokens": CONTEXT}, r"--max-output-tokens: must be less than .*4096.*, got 4096"),
    ],
)
def test_what_contradicts_the_models_own_context_is_refused(
    folder: Path, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.worker.model.check.check_model_folder", lambda folder: None)
    with pytest.raises(ConfigurationError, match=message):
        check_model(config(model=str(folder), **values), folder)


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (
            {"quantization": "fp8"},
            {},
            r"--quantization fp8 needs a GPU of compute capability 8\.9 .* the device is cpu",
        ),
        ({"quantization": "int8", "dtype": "bfloat16"}, {}, r"--dtype bfloat16 says nothing with --quantization int8"),
        ({"quantization": "int8"}, {"quantization_config": AWQ}, r"int8, but .* quantised already, as 4-bit AWQ in gr"),
        ({"quantization": "fp8", "device": "cuda"}, {"quantization_config": AWQ}, r"fp8, but .* quantised already, as"),
        ({}, {"head_dim": 512}, r"the model's head_dim is 512; the kernels go up to 256"),
    ],
)
def test_what_the_device_cannot_run_is_refused(
    values: dict[str, Any], changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    stored = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | changes))
    with pytest.raises(ConfigurationError, match=message):
        check_model(config(model=str(tmp_path), **values), tmp_path)


def test_a_quantised_copy_of_the_weights_takes_less_memory(folder: Path, tmp_path: Path) -> None:
    """As many replicas as hold the float32 file do not fit; quantised ones do."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(host_memory().available)
    with pytest.raises(ConfigurationError, match="--replicas: 1 worker groups need"):
        check_memory(config(model="some/model"), [tmp_path])
    check_memory(config(model="some/model", quantization="int8"), [tmp_path])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 1000}, r"--replicas: 1000 worker groups need about .* GiB are available; at most \d+"),
        ({"max_replicas": 1000}, "--max-replicas: 1000 worker groups need about"),
        (
            {"kv_cache_memory_bytes": "100TiB"},
            r"--kv-cache-memory-bytes is \d+, which takes 409600.00 GiB for the KV of 4 workers, .*; at most \d+$",
        ),
        ({"num_gpu_blocks_override": 1 << 40}, r"--num-gpu-blocks-override is \d+, .* 4 workers, .*; at most \d+$"),
    ],
)
def test_more_than_this_machine_has_is_refused_for_all_ranks_together(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_memory(config(**({"replicas": 2, "tensor_parallel_size": 2} | values)), [folder])


def test_the_models_of_a_cluster_share_this_machines_memory(folder: Path) -> None:
    """What each could have alone is too much for both."""
    half = int(host_memory().available * 0.7)
    names = [{"served_model_name": "a"}, {"served_model_name": "b"}]
    alone = config(replicas=1, kv_cache_memory_bytes=half)
    check_memory(alone, [folder])
    with pytest.raises(ConfigurationError, match="--kv-cache-memory-bytes: the KV pools of all models take"):
        check_memory(config(replicas=1, kv_cache_memory_bytes=half, models=names), [folder, folder])
    one_too_large = [names[0], names[1] | {"num_gpu_blocks_override": 1 << 40}]
    with pytest.raises(ConfigurationError, match=r"^models.1: --num-gpu-blocks-override is"):
        check_memory(config(replicas=1, models=one_too_large), [folder, folder])
    with pytest.raises(ConfigurationError, match=r"^--replicas: 1001 worker .* \(models.0: 1 × .*, models.1: 1000 × "):
        check_memory(config(models=[names[0] | {"replicas": 1}, names[1] | {"replicas": 1000}]), [folder, folder])


def test_names_that_models_get_from_their_folders_must_differ_too() -> None:
    check_served_names(["a", "b"])
    with pytest.raises(ConfigurationError, match=r"^models.2: --served-model-name: a is the name of models.0 too"):
        check_served_names(["a", "b", "a"])


def test_a_recording_that_cannot_be_made_is_refused_where_the_gateways_are(folder: Path, tmp_path: Path) -> None:
    config_of = {"record_trace": tmp_path / "missing" / "trace.jsonl"}
    with pytest.raises(ConfigurationError, match=r"--record-trace: the folder .*missing does not exist"):
        check_model(config(**config_of), folder)
    check_model(config(**config_of, address="ray://elsewhere:10001"), folder)


SHOWS_TEXT = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"


def chat_notes(folder: Path, **values: Any) -> list[str]:
    notes: list[str] = []
    check_chat_template(config(**values), folder, notes.append)
    return notes


@pytest.mark.parametrize(
    ("template", "values", "message"),
    [
        ("Hi\n{% for %}", {}, "--chat-template: {} has a syntax error in line 2: Expected an expression, got 'end of"),
        ("{{ a | nothing }}", {}, "--chat-template: {} has a syntax error in line 1: No filter named 'nothing'"),
        (
            SHOWS_TEXT,
            {"tool_call_parser": "mistral"},
            "--tool-call-parser: mistral, but --chat-template: {} shows no to",
        ),
    ],
)
def test_a_chat_template_that_gateways_would_refuse_is_refused_in_a_line_that_names_the_flag(
    model_dir: Path, tmp_path: Path, template: str, values: dict[str, Any], message: str
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(template)
    with pytest.raises(ConfigurationError) as refusal:
        chat_notes(model_dir, chat_template=file, **values)
    assert str(refusal.value).startswith(message.format(file))
    assert "\n" not in str(refusal.value)


def test_the_models_own_template_is_judged_and_what_it_can_do_is_said(model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, tmp_path)
    own = tmp_path / "chat_template.jinja"
    own.write_text(SHOWS_TEXT)
    (said,) = chat_notes(tmp_path, model=str(tmp_path), reasoning_parser="think")
    assert said.startswith("chat template: roles system, user, assistant; tools described by Octavo")
    assert said.endswith("reasoning split off in the form think")
    own.write_text("{% if %}")
    with pytest.raises(ConfigurationError, match=f"^the chat template of {tmp_path} has a syntax error in line 1"):
        chat_notes(tmp_path, model=str(tmp_path))


def test_the_embedded_model_s_template_needs_no_look(tmp_path: Path) -> None:
    """So that the start does not wait for it: the folder has no tokenizer, and nobody notices."""
    assert chat_notes(tmp_path) == []
    with pytest.raises(ConfigurationError, match=r"there is no tokenizer\.json"):
        chat_notes(tmp_path, tool_call_parser="hermes")
