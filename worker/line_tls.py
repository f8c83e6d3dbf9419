"""TLS of the token lines: where Ray's own connections are encrypted, these are, with the same certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, at the same paths on every node: this node's certificate and key, and who signs the others'."""

    certificate: Path
    key: Path
    authority: Path


def leader_context(files: TlsFiles) -> ssl.SSLContext:
    """For the leader, who wants to see a certificate as Ray's servers do. Raises OSError (ssl.SSLError is one)."""
    return _context(files, ssl.PROTOCOL_TLS_SERVER)


def gateway_context(files: TlsFiles) -> ssl.SSLContext:
    """For the gateway: the leader's certificate must be for its address. Raises OSError."""
    return _context(files, ssl.PROTOCOL_TLS_CLIENT)


def _context(files: TlsFiles, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(files.authority)
    return context
