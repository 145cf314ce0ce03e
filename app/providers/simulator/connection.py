"""One connection: bytes in, requests out, answers or cuts back; and the record of all connections.

h11 keeps to HTTP/1.1: keep-alive, pipelined requests one after the other, chunked bodies,
`Expect`, HEAD. This module adds what a well-behaved server never does (cutting mid-answer,
resetting) and what tests must see: how many bytes came on each connection, and which were closed
without any.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal, cast
from urllib.parse import urlsplit

import h11

from .wire import Answer, Cut, CutStyle, Reply, Request, error_answer, rfc3339

_LOG = logging.getLogger(__name__)
_CLOSED_KEPT = 10_000
_DISCARD_SECONDS = 2.0
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}

Ended = Literal["peer", "cut", "server"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the server: bytes, connections, seconds.

    `idle_seconds` ends a connection on which nothing came for so long while no call is under way,
    between requests or in the middle of one. Bodies for `/_control` may be larger: fault rules
    carry answers.
    """

    head_bytes: int = 32 * 1024
    body_bytes: int = 1024 * 1024
    control_body_bytes: int = 16 * 1024 * 1024
    held_bytes: int = 256 * 1024
    connections: int = 1024
    idle_seconds: float = 60.0


@dataclass(slots=True)
class ConnectionRecord:
    """What is known of one connection; `first_line` is what came first, cut to 200 characters."""

    number: int
    opened_at: float = field(default_factory=time.time)
    closed_at: float | None = None
    bytes_received: int = 0
    requests: int = 0
    first_line: str | None = None
    ended: Ended | None = None

    def listing(self) -> dict[str, object]:
        """As JSON: `ended` says who ended it, null while it is open."""
        return {
            "id": self.number,
            "opened_at": rfc3339(self.opened_at),
            "closed_at": None if self.closed_at is None else rfc3339(self.closed_at),
            "bytes_received": self.bytes_received,
            "requests": self.requests,
            "first_line": self.first_line,
            "ended": self.ended,
        }


class ConnectionLog:
    """Records of the open connections and of the last closed ones, in order of opening."""

    def __init__(self) -> None:
        self._open: dict[int, ConnectionRecord] = {}
        self._closed: deque[ConnectionRecord] = deque(maxlen=_CLOSED_KEPT)
        self._last = 0

    def opened(self) -> ConnectionRecord:
        """A new connection's record."""
        self._last += 1
        record = self._open[self._last] = ConnectionRecord(self._last)
        return record

    def closed(self, record: ConnectionRecord) -> None:
        """Note the end of a connection."""
        record.closed_at = time.time()
        self._closed.append(record)
        self._open.pop(record.number, None)

    def forget(self) -> None:
        """Drop the records of closed connections."""
        self._closed.clear()

    def listing(self) -> list[dict[str, object]]:
        """Every record as JSON."""
        records = sorted([*self._closed, *self._open.values()], key=lambda record: record.number)
        return [record.listing() for record in records]


@dataclass(slots=True)
class Host:
    """What the connections of one server share; `on_no_bytes` is called for each without bytes."""

    handle: Callable[[Request], Awaitable[Reply]]
    log: ConnectionLog
    limits: Limits
    on_no_bytes: Callable[[], None]
    connections: set[Connection] = field(default_factory=set)
    stopping: bool = False


class Connection(asyncio.Protocol):
    """The protocol of one accepted connection; made by the server's factory."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=host.limits.head_bytes)
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._call: asyncio.Task[None] | None = None
        self._choked = False
        self._discarding = False
        self._half_closed = False
        self._held = 0
        self._heard_at = time.monotonic()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted: record it, or turn it away when there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._record = self._host.log.opened()
        if len(self._host.connections) >= self._host.limits.connections:
            self._record.ended = "server"
            self._refuse(503, "too_many_connections", "Too many connections.")
        self._host.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Count the bytes and go on reading requests."""
        if self._record.bytes_received == 0:
            self._record.first_line = data.split(b"\r\n", 1)[0][:200].decode("latin-1")
        self._record.bytes_received += len(data)
        self._heard_at = time.monotonic()
        if self._discarding:
            return
        self._http.receive_data(data)
        if self._call is None:
            self._read()
            return
        self._held += len(data)
        if self._held > self._host.limits.held_bytes:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The peer sends no more. It may still read: a call under way is answered."""
        if self._discarding:
            return False
        self._half_closed = True
        self._http.receive_data(b"")
        if self._call is None:
            self._read()
        return not self._transport.is_closing()

    def pause_writing(self) -> None:
        """The peer reads too slowly: take no further request meanwhile."""
        self._choked = True

    def resume_writing(self) -> None:
        """The peer caught up."""
        self._choked = False
        if self._call is None and not self._discarding:
            self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone. A call under way goes on: what a caller does changes nothing at the provider."""
        self._host.connections.discard(self)
        turned_away = self._discarding or self._host.stopping
        if self._record.bytes_received == 0 and not turned_away:
            self._host.on_no_bytes()
        self._record.ended = self._record.ended or "peer"
        self._host.log.closed(self._record)

    # Reading

    def _read(self) -> None:
        """Take events until a request is complete or bytes are missing."""
        try:
            while self._call is None and not self._choked and not self._discarding:
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self._begin(event)
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    self._check_size(len(self._body))
                elif isinstance(event, h11.EndOfMessage):
                    self._dispatch()
                elif isinstance(event, h11.ConnectionClosed):
                    self._transport.close()
                    return
                else:
                    self._invite()
                    return
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, "http_malformed", f"Malformed HTTP: {error}.")

    def _begin(self, event: h11.Request) -> None:
        self._request = event
        self._body.clear()
        for name, value in event.headers:
            if name == b"content-length":
                self._check_size(int(value))

    def _check_size(self, size: int) -> None:
        limits = self._host.limits
        control = self._request is not None and self._request.target.startswith(b"/_control")
        most = limits.control_body_bytes if control else limits.body_bytes
        if size > most:
            self._refuse(413, "body_too_large", f"A body may have {most} bytes.")

    def _invite(self) -> None:
        if self._http.they_are_waiting_for_100_continue and not self._transport.is_closing():
            self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))

    def _dispatch(self) -> None:
        event = self._request
        if event is None:  # h11 gives the end only after a request
            return
        self._record.requests += 1
        target = event.target
        if not target.startswith(b"/"):
            parts = urlsplit(target)  # the absolute form, as sent to a proxy
            target = parts.path + (b"?" + parts.query if parts.query else b"")
        path, _, query = target.partition(b"?")
        request = Request(
            method=event.method.decode("ascii"),
            path=path.decode("latin-1"),
            query=query,
            headers=tuple(event.headers),
            body=bytes(self._body),
            connection=self._record.number,
        )
        self._call = asyncio.get_running_loop().create_task(self._run(request))

    # Answering

    async def _run(self, request: Request) -> None:
        try:
            reply = await self._host.handle(request)
            self._call = None
            if not self._transport.is_closing():
                self._deliver(reply)
        except Exception:
            _LOG.exception("a reply could not be delivered")
            self.abort()

    def _deliver(self, reply: Reply) -> None:
        if isinstance(reply, Cut):
            if reply.answer is not None:
                self._write(self._render(reply.answer, part=len(reply.answer.body) // 2))
            self._end("cut", reply.style)
            return
        self._write(self._render(reply))
        if self._http.our_state is h11.MUST_CLOSE or self._host.stopping:
            self._end("server")
            return
        self._http.start_next_cycle()
        self._request = None
        if self._held > self._host.limits.held_bytes:
            self._transport.resume_reading()
        self._held = 0
        self._heard_at = time.monotonic()
        self._read()

    def _render(self, answer: Answer, *, part: int | None = None, close: bool = False) -> bytes:
        """The bytes of an answer; `part`: only so many bytes of the body, and no end."""
        headers = [
            (b"Date", email.utils.formatdate(usegmt=True).encode()),
            *((name.encode(), value.encode("latin-1")) for name, value in answer.headers),
        ]
        bodiless = answer.status in (204, 304)
        if not bodiless:
            headers.append((b"Content-Length", str(len(answer.body)).encode()))
        if close:
            headers.append((b"Connection", b"close"))
        head = h11.Response(
            status_code=answer.status, headers=headers, reason=_REASONS.get(answer.status, b"")
        )
        sent = self._http.send(head) or b""
        head_only = self._request is not None and self._request.method == b"HEAD"
        if not bodiless and not head_only:
            sent += self._http.send(h11.Data(data=answer.body[:part])) or b""
        if part is None:
            sent += self._http.send(h11.EndOfMessage()) or b""
        return sent

    def _write(self, data: bytes | None) -> None:
        if data:
            self._transport.write(data)

    def _end(self, who: Ended, style: CutStyle = "fin") -> None:
        self._record.ended = who
        if style == "rst":
            raw = cast(socket.socket, self._transport.get_extra_info("socket"))
            # A zero linger time turns the close into a reset.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer what cannot be gone on with, and close once the peer has had time to read it."""
        if self._discarding:
            return
        self._discarding = True
        answer = error_answer(status, "invalid_request_error", code, message)
        with contextlib.suppress(h11.LocalProtocolError):
            self._write(self._render(answer, close=True))
        self._record.ended = "server"
        if self._half_closed:
            self._transport.close()
            return
        # Closing with unread bytes in the socket would reset it, and the answer might be lost.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(_DISCARD_SECONDS, self._transport.abort)

    # For the server

    def close_if_idle(self, older_than: float) -> None:
        """Close unless a call is under way or bytes came after this instant of `time.monotonic`."""
        if self._call is None and self._heard_at <= older_than:
            self._end("server")

    def running(self) -> asyncio.Task[None] | None:
        """The call under way."""
        return self._call

    def abort(self) -> None:
        """Close at once."""
        self._record.ended = self._record.ended or "server"
        self._transport.abort()
