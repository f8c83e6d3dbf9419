"""The leader's end of a token line: who may speak on it, what a stranger may do, and how messages are cut."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from certificates import tls_files
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker import token_line
from octavo.worker.admission import Refusal
from octavo.worker.line_frames import HEAD_BYTES, MOST_FRAME_BYTES, FrameReader, LineAddress, framed
from octavo.worker.line_tls import gateway_context, leader_context
from octavo.worker.messages import Abort, Poll, Request, SamplingParams, SubmitAnswer, TokenFrame
from octavo.worker.token_line import MOST_STRANGERS, TokenLineServer
from octavo.worker.wire import WireError, pack, unpack

FRAME = TokenFrame(7, 0, ())


class Engine:
    """Answers at once; ``is_over`` as an engine that was stopped."""

    is_over = False

    def __init__(self) -> None:
        self.asked: list[Request | Abort | Poll] = []

    def submit(self, request: Request) -> Refusal | None:
        self.asked.append(request)
        return Refusal("full", 2.0) if request.request_id == "late" else None

    def abort(self, request_ids: tuple[str, ...], branch: int | None) -> None:
        self.asked.append(Abort(request_ids, branch))

    async def poll(self, mailbox: str, acknowledged: int, wait_s: float) -> TokenFrame:
        self.asked.append(Poll(mailbox, acknowledged, wait_s))
        if self.is_over:
            raise RuntimeError("the engine was stopped")
        return FRAME


class Peer:
    """A connection; ``closed`` waits until the leader has ended it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def at(cls, address: LineAddress, tls: ssl.SSLContext | None = None) -> Peer:
        return cls(*await asyncio.open_connection(address.host, address.port, ssl=tls))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> bytes:
        head = await self._reader.readexactly(HEAD_BYTES)
        return await self._reader.readexactly(int.from_bytes(head, "big"))

    async def closed(self) -> bool:
        try:
            return await self._reader.read(1) == b""
        except ConnectionResetError:
            return True

    def leave(self) -> None:
        self._writer.close()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[TokenLineServer]:
    server = TokenLineServer(engine)
    yield server
    server.close()


@pytest.fixture
async def address(server: TokenLineServer) -> LineAddress:
    return await server.open("127.0.0.1")


def request(name: str) -> Request:
    return Request(name, "g", "m", (1, 2, 3), b"", SamplingParams(4, seed=0))


async def test_all_that_a_gateway_says_is_asked_and_answered_in_its_order(address: LineAddress, engine: Engine) -> None:
    said = [request("r"), request("late"), Abort(("r",), 1), Poll("g", 3, 1.0)]
    peer = await Peer.at(address)
    peer.send(address.secret + b"".join(framed(pack(message)) for message in said))
    assert unpack(await peer.answer(), SubmitAnswer) == SubmitAnswer("r")
    assert unpack(await peer.answer(), SubmitAnswer) == SubmitAnswer("late", "full", 2.0)
    assert unpack(await peer.answer(), TokenFrame) == FRAME
    assert engine.asked == said


async def test_it_listens_on_the_one_interface_that_it_is_given(address: LineAddress) -> None:
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert ("127.0.0.1", address.port) in [(c.laddr.ip, c.laddr.port) for c in listening]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address.port), timeout=5)


# ---- strangers ----


@pytest.mark.parametrize("told", [bytes(32), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"x" * 1_000_000])
async def test_a_peer_without_the_secret_is_cut_off_unheard(address: LineAddress, engine: Engine, told: bytes) -> None:
    peer = await Peer.at(address)
    peer.send(told + framed(pack(Poll("g", 0, 1.0))))
    assert await peer.closed()
    assert engine.asked == []


async def test_the_secret_may_come_in_pieces(address: LineAddress) -> None:
    peer = await Peer.at(address)
    for byte in address.secret:
        peer.send(bytes([byte]))
        await asyncio.sleep(0)
    peer.send(framed(pack(Poll("g", 0, 1.0))))
    assert unpack(await peer.answer(), TokenFrame) == FRAME


async def test_a_peer_that_says_nothing_is_cut_off_after_a_while(
    server: TokenLineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_line, "STRANGER_S", 0.05)
    peer = await Peer.at(await server.open("127.0.0.1"))
    peer.send(server.secret[:-1])
    assert await peer.closed()


async def test_of_too_many_strangers_the_first_is_cut_off_and_no_gateway(address: LineAddress) -> None:
    gateway = await Peer.at(address)
    gateway.send(address.secret + framed(pack(Poll("g", 0, 1.0))))
    await gateway.answer()
    strangers = [await Peer.at(address) for _ in range(MOST_STRANGERS + 1)]
    assert await strangers[0].closed()
    gateway.send(framed(pack(Poll("g", 0, 1.0))))
    assert unpack(await gateway.answer(), TokenFrame) == FRAME
    strangers[-1].send(address.secret + framed(pack(Poll("g", 0, 1.0))))
    assert unpack(await strangers[-1].answer(), TokenFrame) == FRAME


def test_the_secret_is_not_in_what_is_logged_of_the_address() -> None:
    assert "secret" not in repr(LineAddress("127.0.0.1", 1, b"a secret"))


# ---- gateways ----


@pytest.mark.parametrize("data", [framed(b"no message"), b"\xff\xff\xff\xff", framed(pack(FRAME))])
async def test_a_gateway_that_sends_something_else_is_cut_off(address: LineAddress, data: bytes) -> None:
    peer = await Peer.at(address)
    peer.send(address.secret + data)
    assert await peer.closed()


async def test_when_the_engine_is_over_nobody_is_listened_to(address: LineAddress, engine: Engine) -> None:
    engine.is_over = True
    peer, idle = await Peer.at(address), await Peer.at(address)
    idle.send(address.secret)
    peer.send(address.secret + framed(pack(Poll("g", 0, 1.0))))
    assert await peer.closed()
    assert await idle.closed()
    with pytest.raises(ConnectionRefusedError):
        await Peer.at(address)


# ---- frames ----


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30)))
def test_frames_come_whole_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data, reader, read = b"".join(map(framed, messages)), FrameReader(), list[bytes]()
    for size in [*cuts, len(data)]:
        read += reader.feed(data[:size])
        data = data[size:]
    assert read == messages


def test_a_frame_beyond_the_limit_is_refused_before_it_has_come() -> None:
    with pytest.raises(WireError, match=f"at most {MOST_FRAME_BYTES}"):
        FrameReader().feed((MOST_FRAME_BYTES + 1).to_bytes(HEAD_BYTES, "big"))


# ---- TLS ----


async def test_with_certificates_only_who_has_one_is_heard(server: TokenLineServer, tmp_path: Path) -> None:
    ours, others = tls_files(tmp_path / "ours"), tls_files(tmp_path / "others")
    address = await server.open("127.0.0.1", leader_context(ours))
    peer = await Peer.at(address, gateway_context(ours))
    peer.send(address.secret + framed(pack(Poll("g", 0, 1.0))))
    assert unpack(await peer.answer(), TokenFrame) == FRAME
    peer.leave()
    plain = await Peer.at(address)
    plain.send(address.secret + framed(pack(Poll("g", 0, 1.0))))
    assert await plain.closed()
    with pytest.raises(ssl.SSLCertVerificationError):
        await Peer.at(address, gateway_context(others))
