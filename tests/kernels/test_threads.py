"""How worker processes are started to compute on CPUs, and what they keep on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.cpu_environment import cpu_environment

LOAD_TWO_KERNELS = """
import torch
torch.set_num_threads(1)
from numba.core import event
from octavo.kernels import cpu_attention_work
from octavo.kernels.backend import cpu_kernels
compiled = event.RecordingListener()
event.register("numba:compile", compiled)
x = torch.ones(1, 64)
cpu_kernels().rms_norm(x, x[0], 1e-5)
cpu_attention_work.build_work(4, 1, "float32")
print(len(compiled.buffer) > 0)
"""

REPORT_THREADS = """
import torch, numba
from octavo.kernels.backend import cpu_kernels
cpu_kernels().silu_mul(torch.ones(200, 1152))
print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, numba.threading_layer() if {pool} else "")
"""


def run(code: str, **environment: str) -> list[str]:
    """What a fresh Python process prints, in words."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {**cpu_environment(1), "NUMBA_CACHE_DIR": str(tmp_path)}
    assert run(LOAD_TWO_KERNELS, **environment) == ["True"]
    assert run(LOAD_TWO_KERNELS, **environment) == ["False"]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_torch_and_numba_use_the_same_number_of_threads(num_threads: int) -> None:
    """One thread starts no pool; several share torch's."""
    code = REPORT_THREADS.format(pool=num_threads > 1)
    words = run(code, **cpu_environment(num_threads))
    assert words == [str(num_threads)] * 2 + ["omp"] * (num_threads > 1)
