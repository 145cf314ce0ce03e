"""A TCP proxy before PostgreSQL that can lose a connection around a COMMIT, or refuse everybody.

    async with TcpProxy.before(url) as proxy:
        proxy.cut_after_commit(b"INSERT INTO operations")   # COMMIT arrives, its answer is lost
        proxy.cut_before_commit(b"INSERT INTO operations")  # COMMIT is thrown away
        await proxy.close_door()        # nobody gets in, everybody inside is cut off

The next transaction that holds the given text is struck, once. The proxy reads the client's side of the
protocol just enough to see statements that are sent as text, and the COMMIT, which psycopg sends as a simple
query. Connections are not encrypted (loopback).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

_COMMIT = b"COMMIT\x00"
_CHUNK = 65_536


class TcpProxy:
    """Forwards bytes to one server. Made by `before`, in the loop that uses it."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._forwarding: set[asyncio.Task[None]] = set()
        self._open = True
        self._cut_before: bytes | None = None
        self._cut_after: bytes | None = None
        self.cuts = 0
        self.server: asyncio.Server | None = None

    @classmethod
    @asynccontextmanager
    async def before(cls, url: str) -> AsyncIterator[tuple[TcpProxy, str]]:
        """The proxy, and the address of the database through it."""
        parts = urlsplit(url)
        proxy = cls(parts.hostname or "127.0.0.1", parts.port or 5432)
        proxy.server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
        port = proxy.server.sockets[0].getsockname()[1]
        credentials = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        netloc = f"{credentials}127.0.0.1:{port}"
        try:
            yield proxy, urlunsplit((parts.scheme, netloc, parts.path, parts.query, ""))
        finally:
            proxy.server.close()
            await proxy.close_door()
            await asyncio.gather(*proxy._forwarding, return_exceptions=True)

    def cut_before_commit(self, having: bytes) -> None:
        """The next COMMIT of a transaction with this text never reaches the server, which rolls it back."""
        self._cut_before = having

    def cut_after_commit(self, having: bytes) -> None:
        """The next COMMIT of a transaction with this text reaches the server, and its answer nobody."""
        self._cut_after = having

    async def close_door(self) -> None:
        """Cut everybody off, and turn everybody away from now on."""
        self._open = False
        for writer in list(self._writers):
            writer.transport.abort()

    def open_door(self) -> None:
        """Let everybody in again."""
        self._open = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)
        if not self._open:
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, server_writer}
        self._writers |= both
        deaf = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._to_server(reader, server_writer, deaf))
                group.create_task(self._to_client(server_reader, writer, deaf))
        except* ConnectionError:
            pass
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _to_server(
        self,
        reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        deaf: asyncio.Event,
    ) -> None:
        transaction = b""
        while chunk := await reader.read(_CHUNK):
            transaction += chunk
            if chunk.endswith(_COMMIT):
                if self._cut_before is not None and self._cut_before in transaction:
                    self._cut_before = None
                    self.cuts += 1
                    raise ConnectionAbortedError
                if self._cut_after is not None and self._cut_after in transaction:
                    self._cut_after = None
                    self.cuts += 1
                    deaf.set()
                transaction = b""
            server.write(chunk)
            await server.drain()
        raise ConnectionAbortedError  # one side ended: so does the other

    async def _to_client(
        self, reader: asyncio.StreamReader, client: asyncio.StreamWriter, deaf: asyncio.Event
    ) -> None:
        while chunk := await reader.read(_CHUNK):
            if (
                deaf.is_set()
            ):  # the server's answer to COMMIT is here: it stands, and nobody hears of it
                raise ConnectionAbortedError
            client.write(chunk)
            await client.drain()
        raise ConnectionAbortedError
