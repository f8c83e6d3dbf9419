"""Real ranks for tests: rank 0 in the test, the others as processes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from again import Again

from octavo.kernels.backend import select_kernels
from octavo.worker.collectives import Rendezvous, SingleProcess, TorchDistributed
from octavo.worker.executor import Executor
from octavo.worker.model_runner import ModelRunner

CPU = torch.device("cpu")
LIMITS = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}

StartGroup = Callable[..., AbstractContextManager[tuple[ModelRunner, Executor]]]


@contextlib.contextmanager
def start_ranks(
    model_dir: Path,
    size: int = 1,
    *,
    num_blocks: int = 64,
    limits: dict[str, int] | None = None,
    graphs: bool = False,
) -> Iterator[tuple[ModelRunner, Executor]]:
    """The leader of ``size`` real ranks: its runner, and the executor that drives all of them.

    ``graphs``: steps of decoding may be recorded; see ``Again``.
    """
    limits = LIMITS if limits is None else limits
    port = _free_port()
    task = {"model_dir": str(model_dir), "host": "127.0.0.1", "port": port, "size": size}
    task |= {"num_blocks": num_blocks, "limits": limits, "graphs": graphs}
    followers = [_follower(task | {"rank": rank}) for rank in range(1, size)]
    group = TorchDistributed(Rendezvous("127.0.0.1", port, 0, size), CPU) if size > 1 else SingleProcess()
    kernels = select_kernels(CPU)
    try:
        runner = ModelRunner.load(
            model_dir,
            rank=0,
            size=size,
            device=CPU,
            dtype=torch.float32,
            collectives=group,
            kernels=kernels,
            **limits,
        )
        runner.allocate_kv(num_blocks)
        if graphs:
            runner.use_graphs(Again())
        executor = Executor(runner, group, kernels)
        yield runner, executor
        executor.shut_down()
        assert [follower.wait(timeout=30) for follower in followers] == [0] * len(followers)
    finally:
        group.close()
        for follower in followers:
            follower.kill()
            follower.wait()


def _follower(task: dict[str, object]) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("follower_main.py")
    return subprocess.Popen([sys.executable, str(script), json.dumps(task)])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
