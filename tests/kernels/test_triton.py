"""The Triton kernels: interpreted against the same tests as the others, and compiled for every target.

Both need processes of their own: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*arguments: str, interpret: bool) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


@pytest.mark.parametrize("subject", ["attention", "cache", "elementwise", "sample"])
def test_interpreted(subject: str) -> None:
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"test_{subject}.py"), interpret=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles(target: str) -> None:
    run(str(HERE / "compile_triton.py"), target, interpret=False)
