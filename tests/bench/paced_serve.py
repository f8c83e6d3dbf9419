"""``octavo serve`` with one paced worker group (``paced_group.py``) in place of a model.

python tests/bench/paced_serve.py [--port 0] [--max-num-seqs 64]
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import click

from octavo.cluster import launch
from octavo.cluster.config import ServeConfig


def paced_application(*args: Any) -> AbstractContextManager[str]:
    """Imports Ray, whose environment is set by now. Its processes do not find what lies in this folder."""
    import paced_group
    import ticks
    from ray import cloudpickle

    from octavo.cluster import application, deploy

    for module in (paced_group, ticks):
        cloudpickle.register_pickle_by_value(module)
    application.WorkerGroup = paced_group.PacedGroup  # type: ignore[misc]
    return deploy.application(*args)


@click.command()
@click.option("--port", default=0)
@click.option("--max-num-seqs", default=64)
def main(port: int, max_num_seqs: int) -> None:
    launch._application = paced_application
    launch.serve(ServeConfig(port=port, max_num_seqs=max_num_seqs, replicas=1))


if __name__ == "__main__":
    main()
