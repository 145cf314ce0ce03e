"""The one transport, on real sockets: bounded in time, size and number; and no client's habits."""

from __future__ import annotations

import asyncio
import gzip
import socket

import httpx
import pytest

from app.domain.outcome import NotApplied, Succeeded, Unknown
from app.providers import http_slots
from app.providers.http import MAX_ANSWER_BYTES, HttpAnswer, NoAnswer
from tests.support.wire import OK, Peer, Wire, answer_ok, send, sending

pytestmark = pytest.mark.anyio


# Without bound: no


async def test_no_answer_is_unknown_within_the_timeout(wire: Wire) -> None:
    async def silent(peer: Peer) -> None:
        await peer.read_request()
        await peer.read_request()

    wire.script = silent
    async with sending(wire.url, timeout_seconds=0.3) as sender:
        outcome = await asyncio.wait_for(send(sender), 1)
        assert isinstance(outcome, Unknown)
        assert outcome.code == "timeout"
        await asyncio.wait_for(wire.peers[0].ended.wait(), 1)
    assert wire.received.count(b"POST ") == 1


@pytest.mark.parametrize("part", ["head", "body"])
async def test_a_trickling_answer_does_not_exceed_the_timeout(wire: Wire, part: str) -> None:
    async def trickle(peer: Peer) -> None:
        await peer.read_request()
        if part == "body":
            peer.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        else:
            peer.writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        for _ in range(100):
            peer.writer.write(b"x")
            await asyncio.sleep(0.05)

    wire.script = trickle
    loop = asyncio.get_running_loop()
    async with sending(wire.url, timeout_seconds=0.5) as sender:
        began = loop.time()
        outcome = await send(sender)
        assert loop.time() - began < 1.0
    assert isinstance(outcome, Unknown)
    assert outcome.code == ("timeout" if part == "head" else "unreadable-answer")


@pytest.mark.parametrize("framing", [b"Content-Length: 100000000", b"Transfer-Encoding: chunked"])
async def test_a_huge_body_is_not_read(wire: Wire, framing: bytes) -> None:
    sent = 0

    async def flood(peer: Peer) -> None:
        nonlocal sent
        await peer.read_request()
        peer.writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")
        block = b"x" * 65536
        if b"chunked" in framing:
            block = b"10000\r\n" + block + b"\r\n"
        for _ in range(1500):
            peer.writer.write(block)
            sent += len(block)
            await peer.writer.drain()

    wire.script = flood
    async with sending(wire.url, concurrency=1) as sender:
        outcome = await send(sender)
        assert isinstance(outcome, Unknown)
        assert outcome.code == "unreadable-answer"
        await asyncio.wait_for(wire.peers[0].ended.wait(), 2)
        wire.script = answer_ok
        assert isinstance(await send(sender), Succeeded)
    assert sent < MAX_ANSWER_BYTES + 20_000_000


async def test_an_encoded_body_is_not_unpacked(wire: Wire) -> None:
    async def bomb(peer: Peer) -> None:
        await peer.read_request()
        packed = gzip.compress(b"{}" + b" " * 10_000_000)
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        peer.writer.write(head % len(packed) + packed)

    wire.script = bomb
    async with sending(wire.url) as sender:
        outcome = await send(sender)
    assert isinstance(outcome, Unknown)
    assert outcome.code == "unreadable-answer"


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Much: " + b"y" * 200_000 + b"\r\n\r\n",
        b"\x00\xff" * 100 + b"\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_unknown(wire: Wire, garbage: bytes) -> None:
    async def answer(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(garbage)

    wire.script = answer
    async with sending(wire.url) as sender:
        outcome = await send(sender)
    assert isinstance(outcome, Unknown)
    assert outcome.code == "protocol-error"


async def test_a_status_without_its_body_counts_as_far_as_the_profile_says(wire: Wire) -> None:
    async def cut(peer: Peer) -> None:
        await peer.read_request()
        peer.writer.write(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 10\r\n\r\nhalf")

    wire.script = cut
    async with sending(wire.url) as sender:
        assert await send(sender) == NotApplied("http-503", retry_after_seconds=7.0)


# Slots


async def test_concurrency_is_bounded_and_few_connections_stay_warm(wire: Wire) -> None:
    busy = most = 0

    async def slow(peer: Peer) -> None:
        nonlocal busy, most
        while await peer.read_request():
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(0.02)
            busy -= 1
            peer.writer.write(OK)

    wire.script = slow
    async with sending(wire.url, concurrency=3) as sender:
        for _ in range(5):
            assert isinstance(await send(sender), Succeeded)
        assert len(wire.peers) == 1  # one after the other: one connection
        ended = await asyncio.gather(*(send(sender) for _ in range(12)))
        assert all(isinstance(outcome, Succeeded) for outcome in ended)
        assert (most, len(wire.peers)) == (3, 3)
        before = [len(peer.received) for peer in wire.peers]
        for _ in range(6):
            await send(sender)
        used = [len(peer.received) > size for peer, size in zip(wire.peers, before, strict=True)]
        assert used.count(True) == 1  # the last one given back, again and again


async def test_waiting_for_a_slot_is_bounded_by_the_send_window(wire: Wire) -> None:
    async def silent(peer: Peer) -> None:
        await peer.read_request()
        await peer.read_request()

    wire.script = silent
    async with sending(
        wire.url, concurrency=1, timeout_seconds=1.0, send_window_seconds=0.2
    ) as sender:
        first = asyncio.ensure_future(send(sender))
        await asyncio.sleep(0.05)
        outcome = await asyncio.wait_for(send(sender), 0.6)
        assert isinstance(outcome, NotApplied)
        assert outcome.code == "no-free-connection"
        assert isinstance(await first, Unknown)
    assert len(wire.peers) == 1


async def test_a_cancelled_call_gives_its_slot_back_and_its_connection_up(wire: Wire) -> None:
    async def silent(peer: Peer) -> None:
        await peer.read_request()
        await peer.read_request()

    wire.script = silent
    async with sending(wire.url, concurrency=1) as sender:
        call = asyncio.ensure_future(send(sender))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(wire.peers[0].ended.wait(), 1)
        wire.script = answer_ok
        assert isinstance(await send(sender), Succeeded)
    assert wire.peers[0].received.count(b"POST ") == 1


async def test_a_caller_cancelled_while_it_waits_costs_no_slot(wire: Wire) -> None:
    async with sending(wire.url, concurrency=1) as sender:
        calls = [asyncio.ensure_future(send(sender)) for _ in range(20)]
        await asyncio.sleep(0)
        for call in calls[1::2]:
            call.cancel()
        await asyncio.wait(calls)
        assert isinstance(await send(sender), Succeeded)


async def test_closing_ends_calls_under_way_and_refuses_later_ones(wire: Wire) -> None:
    async def silent(peer: Peer) -> None:
        await peer.read_request()
        await peer.read_request()

    wire.script = silent
    async with sending(wire.url) as sender:
        call = asyncio.ensure_future(send(sender))
        await asyncio.sleep(0.1)
        await sender.close()
        outcome = await asyncio.wait_for(call, 1)
        assert isinstance(outcome, Unknown)
        assert outcome.code == "connection-lost"
        assert await send(sender) == NotApplied("adapter-closed")
        assert await sender.ask("/v1/charges", []) == NoAnswer(False, "adapter-closed")


async def test_without_keys_and_look_up_every_call_connects_anew(wire: Wire) -> None:
    async with sending(wire.url, keys=None) as sender:
        await send(sender)
        await send(sender)
    assert len(wire.peers) == 2


async def test_the_kernel_gives_up_undelivered_bytes_with_the_call(wire: Wire) -> None:
    slots = http_slots.ClientSlots(1, secure=False, keep_connections=True, give_up_seconds=1.5)
    slot = await slots.take()
    response = await slot.transport.handle_async_request(
        httpx.Request("POST", wire.url, content=b"{}")
    )
    raw = response.extensions["network_stream"].get_extra_info("socket")
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
    await response.aclose()
    await slots.give_back(slot)
    await slots.close()
    assert slots.open_count == 0


# What a client would do, and a transport for effects must not


async def test_proxies_of_the_environment_are_not_used(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with sending(wire.url) as sender:
        assert isinstance(await send(sender), Succeeded)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_answers(wire: Wire, status: int) -> None:
    async def redirect(peer: Peer) -> None:
        while await peer.read_request():
            head = f"HTTP/1.1 {status} Moved\r\nLocation: {wire.url}/x\r\nContent-Length: 0\r\n\r\n"
            peer.writer.write(head.encode())

    wire.script = redirect
    async with sending(wire.url) as sender:
        assert await send(sender) == Unknown(f"http-{status}")
    assert wire.received.count(b"POST ") == 1


async def test_cookies_are_not_kept_for_the_next_call(wire: Wire) -> None:
    async def cookie(peer: Peer) -> None:
        while await peer.read_request():
            peer.writer.write(OK.replace(b"\r\n", b"\r\nSet-Cookie: a=b\r\n", 1))

    wire.script = cookie
    async with sending(wire.url) as sender:
        await send(sender)
        await send(sender)
    assert wire.received.count(b"POST ") == 2
    assert b"cookie" not in wire.received.lower()


async def test_asking_needs_no_window_and_says_what_came(wire: Wire) -> None:
    async def list_(peer: Peer) -> None:
        head = await peer._reader.readuntil(b"\r\n\r\n")
        peer.received += head
        peer.writer.write(OK)
        await peer.read_request()

    wire.script = list_
    async with sending(wire.url) as sender:
        answer = await sender.ask("/v1/charges?reference=a%2Cb", [("Authorization", "Bearer s")])
        assert isinstance(answer, HttpAnswer)
        assert (answer.status, answer.body) == (200, b"{}")
        assert await sender.ask("/v1/../x", []) == NoAnswer(
            False,
            "request-unsendable",
            "The path is not one that is sent exactly as it is written.",
        )
    assert wire.received.startswith(b"GET /v1/charges?reference=a%2Cb HTTP/1.1\r\n")
    assert b"Idempotency-Key" not in wire.received
