"""The flags of ``octavo.LLM``."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.cluster.config import ServeConfig
from octavo.cluster.offline.config import FLAGS, parse_flags
from octavo.worker.errors import ConfigurationError


def test_flags_are_settings_of_a_server() -> None:
    assert set(ServeConfig.model_fields) >= FLAGS
    config = parse_flags(None, {"max_model_len": 512, "kv_cache_memory_bytes": "1GiB"})
    assert (config.max_model_len, int(config.kv_cache_memory_bytes or 0)) == (512, 2**30)


@pytest.mark.parametrize("name", sorted(set(ServeConfig.model_fields) - FLAGS))
def test_a_setting_of_the_cluster_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}: a setting of octavo serve"):
        parse_flags(None, {name: None})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: must be 1 in one process, got 2"),
        ({"max_modell_len": 5}, "max_modell_len: no such setting, did you mean max_model_len?"),
        ({"max_num_seqs": 0}, "--max-num-seqs: must be at least 1, got 0"),
        ({"block_size": 17}, "--block-size: must be a power of two between 16 and 128, got 17"),
    ],
)
def test_what_cannot_work_is_refused_with_value_and_limit(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_flags(None, flags)
    assert message in str(refusal.value)
