"""What a peer can do wrong without ending the benchmark."""

from __future__ import annotations


class PeerError(Exception):
    """A server could not be installed or started, or did not answer as asked; in one sentence."""


class NotYet(PeerError):
    """A server that is up says that it cannot serve now."""
