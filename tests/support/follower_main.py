"""A rank above 0 of a worker group, as a process: loads its share and follows the leader until it shuts down.

One argument, JSON: the fields of ``ModelRunner.load``, where the leader waits, and the number of KV blocks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from again import Again

from octavo.kernels.backend import select_kernels
from octavo.worker.collectives import Rendezvous, TorchDistributed
from octavo.worker.model_runner import ModelRunner, follow


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    group = TorchDistributed(Rendezvous(task["host"], task["port"], task["rank"], task["size"]), device)
    runner = ModelRunner.load(
        Path(task["model_dir"]),
        rank=task["rank"],
        size=task["size"],
        device=device,
        dtype=torch.float32,
        collectives=group,
        kernels=select_kernels(device),
        **task["limits"],
    )
    runner.allocate_kv(task["num_blocks"])
    if task["graphs"]:
        runner.use_graphs(Again())
    try:
        follow(runner, group)
    except RuntimeError as error:
        print(f"rank {task['rank']}: the leader is gone: {error}", file=sys.stderr)
    finally:
        # Threads of gloo that are left to the end of the interpreter can abort the process.
        group.close()


if __name__ == "__main__":
    main()
