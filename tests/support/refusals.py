"""What ``octavo serve`` says of a model that it does not start to serve."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cluster.config import ServeConfig
from octavo.cluster.preflight import check_models
from octavo.worker.errors import ConfigurationError


def refusal(model: str | Path) -> str:
    """What ``octavo serve MODEL`` says, judged by the same look at the model."""
    with pytest.raises(ConfigurationError) as refused:
        check_models(ServeConfig.parse({"model": str(model)}), print)
    return str(refused.value)


def refused_start(*args: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and last line of a start that fails."""
    command = [sys.executable, "-m", "octavo.cluster", "serve", "--port", "0", *args]
    env = os.environ | (environment or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert "starting Ray" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]
