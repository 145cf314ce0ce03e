"""The connections behind `http`: a slot per call under way, each with at most one connection of its own.

One connection pool shared by all calls gets slower the busier it is (BENCH.md, trap 1). Here a slot is an
`httpx.AsyncHTTPTransport` of one connection; the number of slots is the process' concurrency bound for the
provider. Slots are handed out last in, first out, so that few connections stay warm under a light load. A
slot is made when first needed, and thrown away unless its call ended with one complete answer.

A transport, not an `httpx.AsyncClient`: the client adds what must not happen to an effect or between two of
them (redirects, cookies kept from one call for the next, proxies from the environment, log lines), and costs
speed (10 to 20 %).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

KEEPALIVE_SECONDS = 4.0
"""An idle connection is dropped before the usual servers drop it (Node.js and uvicorn: 5 s), so that a send
hardly ever meets a connection that is closing, which would be doubt."""


class SlotsClosed(Exception):
    """The slots were closed; nothing was sent."""


@dataclass(slots=True)
class Slot:
    """One place for one call. `keep` is set when its connection may serve another call."""

    transport: httpx.AsyncHTTPTransport
    keep: bool = False


class ClientSlots:
    """At most `count` calls at once, each on a connection of its own.

    `keep_connections` False makes every call connect anew: for providers where the doubt that a closing
    connection causes could only be ended by a human. `give_up_seconds` bounds how long the kernel goes on
    delivering bytes that the other side does not acknowledge, also after the call was given up: it is what
    makes a profile's `delivery_seconds` (PROTOCOL.md, D) true when the network comes back late.
    """

    def __init__(
        self, count: int, *, secure: bool, keep_connections: bool, give_up_seconds: float
    ) -> None:
        self._free = asyncio.Semaphore(count)
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._open: set[httpx.AsyncHTTPTransport] = set()
        self._closed = False
        self._limits = httpx.Limits(
            max_connections=1,
            max_keepalive_connections=1 if keep_connections else 0,
            keepalive_expiry=KEEPALIVE_SECONDS,
        )
        # Loading the certificates takes tens of ms, so all slots share one context. httpx wants one for plain
        # HTTP too; a bare one trusts nobody. SSL_CERT_FILE is honoured: a private authority is legitimate.
        self._ssl = (
            httpx.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        self._socket_options = list(_socket_options(give_up_seconds))

    @property
    def open_count(self) -> int:
        """How many slots exist now, idle or in use."""
        return len(self._open)

    async def take(self) -> Slot:
        """A slot, as soon as one is free; first come, first served. Give it back in every case.

        Raises:
            SlotsClosed: `close` was called.
        """
        await self._free.acquire()
        # No await from here: a cancelled taker must not lose a slot.
        if self._closed:
            self._free.release()
            raise SlotsClosed
        if self._idle:
            return Slot(self._idle.pop())
        transport = self._new_transport()
        self._open.add(transport)
        return Slot(transport)

    async def give_back(self, slot: Slot) -> None:
        """Take back a slot; without `keep` its connection is closed and never used again."""
        self._free.release()
        if slot.keep and not self._closed:
            self._idle.append(slot.transport)
            return
        self._open.discard(slot.transport)
        await slot.transport.aclose()

    async def close(self) -> None:
        """Close every connection. Calls under way end with an error; calls that wait, with `SlotsClosed`."""
        self._closed = True
        self._idle.clear()
        while self._open:
            await self._open.pop().aclose()

    def _new_transport(self) -> httpx.AsyncHTTPTransport:
        # HTTP/1.1 only: there the event before the first byte is known (R1). `retries` would only repeat
        # connecting; it is off so that there is one place that decides about trying again.
        return httpx.AsyncHTTPTransport(
            verify=self._ssl,
            http1=True,
            http2=False,
            retries=0,
            limits=self._limits,
            socket_options=self._socket_options,
        )


def _socket_options(give_up_seconds: float) -> Iterator[tuple[int, int, int]]:
    # Not on every system; elsewhere the kernel's own limits hold.
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        yield socket.IPPROTO_TCP, option, max(1, int(give_up_seconds * 1000))


def has_surplus(response: httpx.Response) -> bool:
    """Whether more bytes came than the one answer `response` (read to its end) has.

    httpx would read them as the answer to the *next* request on that connection, so one operation would get
    another's answer (shown by a test). Nothing public tells; where httpx or httpcore look different from what
    is known here the answer is True, which costs the connection and nothing else.
    """
    inner: Any = response.stream
    for name in ("_httpcore_stream", "_stream", "_connection", "_h11_state", "trailing_data"):
        inner = getattr(inner, name, None)
    return not (isinstance(inner, tuple) and inner and inner[0] == b"")
