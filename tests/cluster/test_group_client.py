"""A gateway's line to a leader: connections are cut anywhere, leaders fall silent; every stream has each token once."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import tls_files
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_cluster import taken

from octavo.cluster import leader_line
from octavo.cluster.group_client import GroupClient, GroupFull
from octavo.cluster.token_stream import GroupLost, TokenStream
from octavo.worker.admission import Refusal
from octavo.worker.line_frames import LineAddress
from octavo.worker.line_tls import gateway_context, leader_context
from octavo.worker.messages import Abort, FinishReason, Request, SamplingParams, SequenceUpdate, TokenFrame
from octavo.worker.outbox import Outbox
from octavo.worker.token_line import TokenLineServer

NUM_TOKENS = 30


class CountingLeader:
    """Gives each request the tokens 0, 1, 2 …, each a moment later; what an actor's handle has is ``line_address``."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.aborts: list[Abort] = []
        self.refusal: Refusal | None = None
        self.is_silent = False
        self.server = TokenLineServer(self)
        self.proxy: Proxy | None = None
        self.tls: ssl.SSLContext | None = None
        self.line_address = self
        self._outbox = Outbox(1, now=asyncio.get_running_loop().time)
        self._news = asyncio.Condition()
        self._streams: set[asyncio.Task[None]] = set()

    async def remote(self) -> LineAddress:
        address = await self.server.open("127.0.0.1", self.tls)
        return address if self.proxy is None else await self.proxy.open(address)

    def submit(self, request: Request) -> Refusal | None:
        if self.refusal is None and request.request_id not in self.requests:
            self.requests[request.request_id] = request
            self._streams.add(asyncio.create_task(self._count(request)))
        return self.refusal

    def abort(self, request_ids: tuple[str, ...], branch: int | None) -> None:
        self.aborts.append(Abort(request_ids, branch))

    async def poll(self, mailbox: str, acknowledged: int, wait_s: float) -> TokenFrame:
        async with self._news:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait_for(
                        lambda: not self.is_silent and self._outbox.has_news(mailbox, acknowledged)
                    )
            return self._outbox.take(mailbox, acknowledged)

    async def _count(self, request: Request) -> None:
        for position in range(request.sampling.max_tokens):
            reason = FinishReason.LENGTH if position + 1 == request.sampling.max_tokens else None
            async with self._news:
                self._outbox.put(
                    request.gateway_id, SequenceUpdate(request.request_id, 0, position, (position,), reason)
                )
                self._news.notify_all()
            await asyncio.sleep(0)


class Proxy:
    """Between the two; the connections are cut when so many bytes have come from the leader."""

    def __init__(self, limits: Iterator[int]) -> None:
        self.num_cut = 0
        self._limits = limits

    async def open(self, leader: LineAddress) -> LineAddress:
        self._leader = leader
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return LineAddress("127.0.0.1", self._server.sockets[0].getsockname()[1], leader.secret)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._leader.host, self._leader.port)
        forth = asyncio.create_task(self._copy(reader, far_writer, None))
        await self._copy(far_reader, writer, next(self._limits, None))
        forth.cancel()
        for each in (writer, far_writer):
            each.transport.abort()
        self.num_cut += 1

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
        while limit is None or limit > 0:
            data = await reader.read(65_536 if limit is None else limit)
            if not data:
                break
            writer.write(data)
            await writer.drain()
            limit = None if limit is None else limit - len(data)


def request(name: str = "r", max_tokens: int = NUM_TOKENS) -> Request:
    return Request(name, "g", "m", (1, 2, 3), b"", SamplingParams(max_tokens, seed=0))


@pytest.fixture
async def leader() -> AsyncIterator[CountingLeader]:
    leader = CountingLeader()
    yield leader
    leader.server.close()


@pytest.fixture
def client(leader: CountingLeader) -> GroupClient:
    return GroupClient("g", 1, leader)


async def tokens_of(client: GroupClient, request: Request) -> list[int]:
    stream = await client.submit(request)
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        tokens += [token for update in await taken(stream) for token in update.token_ids]
    client.forget(request.request_id)
    return tokens


async def all_tokens(client: GroupClient, names: str) -> list[list[int]]:
    async with asyncio.timeout(10):
        return await asyncio.gather(*[tokens_of(client, request(name)) for name in names])


async def loss(stream: TokenStream) -> GroupLost:
    while True:
        try:
            await taken(stream)
        except GroupLost as loss:
            return loss


async def test_streams_have_all_their_tokens(client: GroupClient) -> None:
    for names in ("abc", "def"):  # also over a line that was idle
        assert await all_tokens(client, names) == [list(range(NUM_TOKENS))] * 3


@settings(max_examples=25)
@given(st.lists(st.integers(1, 900), max_size=12))
def test_wherever_connections_are_cut_no_token_is_lost_or_repeated(limits: list[int]) -> None:
    """A connection that gives not one byte is the leader's end; each of these gives at least one."""

    async def run() -> None:
        leader = CountingLeader()
        leader.proxy = Proxy(iter(limits))
        client = GroupClient("g", 1, leader)
        assert await all_tokens(client, "abcd") == [list(range(NUM_TOKENS))] * 4
        assert not client.lost
        leader.server.close()

    asyncio.run(run())


async def test_a_line_is_encrypted_where_ray_is(leader: CountingLeader, tmp_path: Path) -> None:
    files = tls_files(tmp_path / "pems")
    leader.tls = leader_context(files)
    assert await all_tokens(GroupClient("g", 1, leader, gateway_context(files)), "abc") == [list(range(NUM_TOKENS))] * 3
    with pytest.raises(GroupLost):
        await GroupClient("g", 1, leader).submit(request("plain"))


async def test_a_leader_that_closes_its_line_is_dead_at_once(leader: CountingLeader, client: GroupClient) -> None:
    stream = await client.submit(request(max_tokens=10**6))
    await taken(stream)
    leader.server.close()
    async with asyncio.timeout(1.0):
        assert (await loss(stream)).is_dead
    assert client.lost
    with pytest.raises(GroupLost):
        await client.submit(request("another"))


async def test_the_death_of_a_leader_is_noticed_on_an_idle_line(leader: CountingLeader, client: GroupClient) -> None:
    await all_tokens(client, "a")
    leader.server.close()
    async with asyncio.timeout(5.0):
        while not client.lost:
            await asyncio.sleep(0.001)


async def test_the_death_of_a_leader_is_noticed_on_a_line_that_was_never_used(
    leader: CountingLeader, client: GroupClient
) -> None:
    client.connect()
    async with asyncio.timeout(5.0):
        while not leader.server._lines:
            await asyncio.sleep(0.001)
        leader.server.close()
        while not client.lost:
            await asyncio.sleep(0.001)


async def test_a_leader_that_does_not_say_where_it_listens_is_dead_and_the_log_says_so(
    leader: CountingLeader, client: GroupClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader_line, "SILENCE_S", 0.05)
    monkeypatch.setattr(leader, "remote", never)
    with pytest.raises(GroupLost):
        await client.submit(request())
    assert "the leader has not told where it listens" in caplog.text


async def test_a_leader_that_answers_nothing_is_dead_after_a_while(
    leader: CountingLeader, client: GroupClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_line, "SILENCE_S", 0.1)
    monkeypatch.setattr(leader_line, "_TICK_S", 0.02)
    stream = await client.submit(request(max_tokens=10**6))
    await taken(stream)
    leader.poll = never  # type: ignore[method-assign,assignment]
    assert (await loss(stream)).is_dead
    while not leader.aborts:  # it must not go on with what others take over, should it come back
        await asyncio.sleep(0.001)
    assert leader.aborts == [Abort(("r",))]


async def never(*_: Any) -> TokenFrame:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_full_group_says_why_and_when_to_come_back(leader: CountingLeader, client: GroupClient) -> None:
    leader.refusal = Refusal("10 requests wait", 4.0)
    with pytest.raises(GroupFull, match="10 requests wait") as caught:
        await client.submit(request())
    assert caught.value.retry_after_s == 4.0
    assert client.is_idle
    assert not client.lost


async def test_a_gateway_that_was_forgotten_loses_its_streams_and_not_the_group(
    leader: CountingLeader, client: GroupClient
) -> None:
    stream = await client.submit(request(max_tokens=10**6))
    await taken(stream)
    leader._outbox.drop_silent(-1.0)
    assert not (await loss(stream)).is_dead
    assert not client.lost
    assert await all_tokens(client, "a") == [list(range(NUM_TOKENS))]


async def test_nothing_is_sent_for_a_request_that_was_given_up_before_the_line_was_open(
    leader: CountingLeader, client: GroupClient
) -> None:
    submitting = asyncio.create_task(client.submit(request("given up")))
    await asyncio.sleep(0)
    submitting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await submitting
    await all_tokens(client, "a")
    assert set(leader.requests) == {"a"}


async def test_no_leader_at_all_is_a_lost_group() -> None:
    leader = CountingLeader()
    address = await leader.server.open("127.0.0.1")
    leader.server.close()

    async def told() -> LineAddress:
        return address

    leader.remote = told  # type: ignore[method-assign]
    with pytest.raises(GroupLost):
        await GroupClient("g", 1, leader).submit(request())
