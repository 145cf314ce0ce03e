"""The one transport, on real sockets: nothing before the last check, nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import pytest

from app.domain.errors import SendWindowClosed
from app.domain.outcome import NotApplied, Succeeded, Unknown
from app.domain.plan import EffectRequest
from app.providers import http_slots
from app.providers.http import SENDS_AT_ONCE
from tests.support.wire import OK, REQUEST, Peer, Wire, send, sending, too_late

pytestmark = pytest.mark.anyio


# R1: zero bytes


async def test_what_is_sent_is_the_stored_request_and_a_fixed_set_of_headers(wire: Wire) -> None:
    async with sending(wire.url + "/prefix/") as sender:
        assert await send(sender) == Succeeded("{}")
    head, _, body = wire.received.partition(b"\r\n\r\n")
    assert body == REQUEST.body
    line, *headers = head.split(b"\r\n")
    assert line == b"POST /prefix/v1/charges HTTP/1.1"
    assert sorted(headers) == sorted(
        [
            b"Host: 127.0.0.1:%d" % wire.port,
            b"Accept: application/json",
            b"Accept-Encoding: identity",
            b"User-Agent: fencepost",
            b"Content-Type: application/json",
            b"Idempotency-Key: k-1",
            b"Content-Length: %d" % len(REQUEST.body),
        ]
    )


async def test_a_closed_window_leaves_zero_bytes_on_a_fresh_connection(wire: Wire) -> None:
    async with sending(wire.url) as sender:
        outcome = await send(sender, too_late)
        assert outcome == NotApplied("send-window-closed", "too late")
        await asyncio.wait_for(wire.peers[0].ended.wait(), 1)
        assert (len(wire.peers), wire.received) == (1, b"")
        # The connection is gone, and the sender works on.
        assert isinstance(await send(sender), Succeeded)
        assert len(wire.peers) == 2


async def test_a_closed_window_leaves_zero_bytes_on_a_kept_connection(wire: Wire) -> None:
    async with sending(wire.url) as sender:
        await send(sender)
        first = wire.received
        assert await send(sender, too_late) == NotApplied("send-window-closed", "too late")
        await asyncio.wait_for(wire.peers[0].ended.wait(), 1)
        assert (len(wire.peers), wire.received) == (1, first)
        assert isinstance(await send(sender), Succeeded)
        assert [peer.received for peer in wire.peers] == [first, first]


async def test_the_check_comes_after_a_slow_connect() -> None:
    """The queue of the listening socket is full, so connecting takes as long as the kernel's second try."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        await asyncio.sleep(0.05)

        began = loop.time()
        checked_after: list[float] = []

        def check() -> None:
            checked_after.append(loop.time() - began)
            if checked_after[-1] > 0.3:
                raise SendWindowClosed("too late")

        async with sending(f"http://127.0.0.1:{address[1]}", timeout_seconds=4.0) as sender:
            call = asyncio.ensure_future(send(sender, check))
            await asyncio.sleep(0.5)
            assert not checked_after
            listening.setblocking(False)
            accepted = []
            async with asyncio.timeout(3):
                for _ in range(3):  # both fillers, then the one under test
                    connection, _peer = await loop.sock_accept(listening)
                    accepted.append(stack.enter_context(connection))
            assert await call == NotApplied("send-window-closed", "too late")
            assert len(checked_after) == 1
            assert checked_after[0] > 0.5
        accepted[-1].settimeout(1)
        assert accepted[-1].recv(100) == b""


async def test_what_else_the_check_raises_reaches_the_caller_and_nothing_is_sent(
    wire: Wire,
) -> None:
    def broken() -> None:
        raise LookupError("a fault of ours")

    async with sending(wire.url, concurrency=1) as sender:
        with pytest.raises(LookupError):
            await send(sender, broken)
        await asyncio.wait_for(wire.peers[0].ended.wait(), 1)
        assert wire.received == b""
        assert isinstance(await send(sender), Succeeded)  # its slot came back


# Nobody reached


async def test_a_refused_connection_is_not_applied_and_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takes: list[float] = []
    take = http_slots.ClientSlots.take

    async def counted(slots: http_slots.ClientSlots) -> http_slots.Slot:
        takes.append(asyncio.get_running_loop().time())
        return await take(slots)

    monkeypatch.setattr(http_slots.ClientSlots, "take", counted)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with sending(f"http://127.0.0.1:{free.getsockname()[1]}") as sender:
            outcome = await send(sender)
    assert isinstance(outcome, NotApplied)
    assert (outcome.code, outcome.final) == ("not-connected", False)
    assert len(takes) == SENDS_AT_ONCE
    assert takes[-1] - takes[0] < 0.5


async def test_a_failed_tls_handshake_is_not_applied(wire: Wire) -> None:
    async def no_tls(peer: Peer) -> None:
        peer.received += await peer._reader.read(1)
        peer.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    wire.script = no_tls
    async with sending(f"https://127.0.0.1:{wire.port}") as sender:
        outcome = await send(sender)
    assert isinstance(outcome, NotApplied)
    assert outcome.code == "not-connected"
    assert set(wire.received) == {0x16}  # only the first byte of a TLS record


async def test_connecting_is_bounded_and_not_applied() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with sending(url, timeout_seconds=0.2) as sender:
            outcome = await asyncio.wait_for(send(sender), 1)
    assert isinstance(outcome, NotApplied)
    assert outcome.code == "connect-timeout"


@pytest.mark.parametrize(
    "request_",
    [
        EffectRequest("POST", "/v1/charges/../refunds", b""),
        EffectRequest("POST", "/v1/a b", b""),
        EffectRequest("POST", "v1/charges", b""),
        EffectRequest("POST", "/v1/charges#x", b""),
        EffectRequest("POST", "/v1/ch\r\nX: y", b""),
        EffectRequest("POST", "@127.0.0.1:1/v1", b""),
        EffectRequest("PO ST", "/v1/charges", b""),
        EffectRequest("POST", "/v1/charges", b"", (("X-A", "b\r\nX-C: d"),)),
        EffectRequest("POST", "/v1/charges", b"", (("X A", "b"),)),
        EffectRequest("POST", "/v1/charges", b"", (("Authorization", "Bearer x"),)),
        EffectRequest("POST", "/v1/charges", b"", (("idempotency-KEY", "other"),)),
        EffectRequest("POST", "/v1/charges", b"", (("Transfer-Encoding", "chunked"),)),
    ],
)
async def test_a_request_that_cannot_be_sent_as_stored_is_never_sent(
    wire: Wire, request_: EffectRequest
) -> None:
    async with sending(wire.url) as sender:
        outcome = await send(sender, request=request_)
    assert isinstance(outcome, NotApplied)
    assert (outcome.code, outcome.final) == ("request-unsendable", True)
    assert not wire.peers


async def test_a_semantic_header_is_sent(wire: Wire) -> None:
    request = EffectRequest("POST", "/v1/charges", b"{}", (("X-Region", "eu west"),))
    async with sending(wire.url) as sender:
        assert isinstance(await send(sender, request=request), Succeeded)
    assert b"\r\nX-Region: eu west\r\n" in wire.received


# Once


@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_a_kept_connection_that_dies_with_the_second_request_is_unknown_and_one_copy(
    wire: Wire, cut: str
) -> None:
    async def die_on_second(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(OK)
        await peer.read_request()
        if cut == "rst":
            peer.reset()

    wire.script = die_on_second
    async with sending(wire.url) as sender:
        await send(sender)
        outcome = await send(
            sender, request=EffectRequest("POST", "/v1/charges", b"the second one")
        )
        await asyncio.sleep(0.1)
    assert isinstance(outcome, Unknown)
    assert outcome.code == "connection-lost"
    assert wire.received.count(b"the second one") == 1
    assert len(wire.peers) == 1


async def test_a_large_request_cut_in_the_middle_is_unknown_and_one_copy(wire: Wire) -> None:
    async def cut(peer: Peer) -> None:
        peer.received += await peer._reader.readexactly(4000)
        peer.reset()

    wire.script = cut
    body = b"begin" + b"x" * 3_000_000
    async with sending(wire.url) as sender:
        outcome = await send(sender, request=EffectRequest("POST", "/v1/charges", body))
        await asyncio.sleep(0.1)
    assert isinstance(outcome, Unknown)
    assert wire.received.count(b"begin") == 1
    assert len(wire.peers) == 1


async def test_a_connection_the_server_closed_while_idle_is_not_used(wire: Wire) -> None:
    async def once(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(OK)

    wire.script = once
    async with sending(wire.url) as sender:
        await send(sender)
        await asyncio.sleep(0.05)
        assert isinstance(await send(sender), Succeeded)
    assert [peer.received.count(b"POST ") for peer in wire.peers] == [1, 1]


class FakeTransport(httpx.AsyncBaseTransport):
    """Stands in for httpx' own; `events` are reported before it answers."""

    def __init__(self, *events: str) -> None:
        self.events = events
        self.requests = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        for event in self.events:
            await request.extensions["trace"](event, {})
        return httpx.Response(200, content=b"{}")


async def test_a_transport_that_would_send_again_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = "http11.send_request_headers.started"
    fake = FakeTransport(started, "connection.connect_tcp.started", started)
    monkeypatch.setattr(http_slots.ClientSlots, "_new_transport", lambda _: fake)
    checks: list[None] = []
    async with sending("http://127.0.0.1:1") as sender:
        outcome = await send(sender, lambda: checks.append(None))
    assert isinstance(outcome, Unknown)
    assert outcome.code == "second-send-stopped"
    assert len(checks) == 1


@pytest.mark.parametrize("events", [(), ("http2.send_request_headers.started",)])
async def test_a_transport_that_does_not_report_the_check_is_refused(
    monkeypatch: pytest.MonkeyPatch, events: tuple[str, ...]
) -> None:
    fake = FakeTransport(*events)
    monkeypatch.setattr(http_slots.ClientSlots, "_new_transport", lambda _: fake)
    async with sending("http://127.0.0.1:1") as sender:
        outcome = await send(sender)
        assert isinstance(outcome, Unknown)
        assert outcome.code == "unchecked-send"
        outcome = await send(sender)
        assert isinstance(outcome, NotApplied)
        assert outcome.code == "transport-refused"
    assert fake.requests == 1


async def test_a_surplus_answer_is_never_given_to_the_next_request(wire: Wire) -> None:
    async def generous(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(OK + OK.replace(b"{}", b"[]"))
        if await peer.read_request():
            peer.writer.write(OK)

    wire.script = generous
    async with sending(wire.url) as sender:
        assert await send(sender) == Succeeded("{}")
        assert await send(sender) == Succeeded("{}")
    assert len(wire.peers) == 2
