"""A scripted server on a real socket, and a sender pointed at it, for tests of the HTTP transport."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from app.domain.errors import SendWindowClosed
from app.domain.outcome import Outcome
from app.domain.plan import EffectRequest
from app.domain.profile import KeyRules, Meaning, ProviderAnswer, ProviderProfile, answers
from app.providers.http import HttpAnswer, HttpSender

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
REQUEST = EffectRequest("POST", "/v1/charges", b'{"amount":1250,"note":"\xc3\xa9"}')
KEY = ("Idempotency-Key", "k-1")


class Peer:
    """One accepted connection: what came, and how to answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.received = b""
        self.ended = asyncio.Event()

    async def read_request(self) -> bytes:
        """One whole request; b"" at the end of the stream."""
        try:
            head = await self._read(self._reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError as error:
            self.received += error.partial
            return b""
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        return head + await self._read(self._reader.readexactly(length))

    async def _read(self, reading: Awaitable[bytes]) -> bytes:
        data = await reading
        self.received += data
        return data

    def reset(self) -> None:
        """Cut the connection with an RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


async def answer_ok(peer: Peer) -> None:
    while await peer.read_request():
        peer.writer.write(OK)


@dataclass
class Wire:
    """A server whose connections follow a script, one after the other or all the same."""

    script: Script = answer_ok
    peers: list[Peer] = field(default_factory=list)
    port: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def received(self) -> bytes:
        return b"".join(peer.received for peer in self.peers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = Peer(reader, writer)
        self.peers.append(peer)
        try:
            await self.script(peer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            peer.ended.set()
            self._tasks.discard(task)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Wire]:
    """A `Wire` that listens, until the end of the block."""
    wire = Wire()
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    yield wire
    server.close()
    await wire.stop()
    await server.wait_closed()


def profile(**changes: Any) -> ProviderProfile:
    facts: dict[str, Any] = {
        "name": "wire",
        "pinned_on": "2026-12-01",
        "answers": (
            answers(200, 299, mean=Meaning.SUCCESS),
            answers(503, mean=Meaning.BEFORE_KEY),
        ),
        "timeout_seconds": 2.0,
        "send_window_seconds": 2.0,
        "keys": KeyRules("Idempotency-Key", memory_seconds=86_400.0),
    }
    return ProviderProfile(**(facts | changes))


@contextlib.asynccontextmanager
async def sending(url: str, **changes: Any) -> AsyncIterator[HttpSender]:
    sender = HttpSender(profile(**changes), url)
    try:
        yield sender
    finally:
        await sender.close()


def read(answer: HttpAnswer) -> ProviderAnswer:
    return ProviderAnswer(
        status=answer.status,
        reference=None if answer.body is None else answer.body.decode(),
        retry_after_seconds=answer.retry_after_seconds,
        readable=answer.body is not None,
    )


def in_time() -> None:
    """The last check of a send that is in time."""


def too_late() -> None:
    raise SendWindowClosed("too late")


async def send(
    sender: HttpSender,
    last_check: Callable[[], None] = in_time,
    request: EffectRequest = REQUEST,
) -> Outcome:
    return await sender.perform(request, [KEY], last_check, read)
