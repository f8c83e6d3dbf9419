"""Listening at one address alone, so that nothing of ours is open to networks that it is not meant for."""

from __future__ import annotations

import socket


def listen_on(host: str) -> socket.socket:
    """At a free port of ``host``, an IP address. Raises OSError."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
