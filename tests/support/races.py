"""Races without luck: hold a row, wait until the other side truly blocks, let go.

Nothing here sleeps for a time: what is awaited is a fact in `pg_stat_activity`, an event or a barrier.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import psycopg

from app.storage.database import Database

PATIENCE_SECONDS = 20.0
_WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again until it holds."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while not await holds():
            await anyio.sleep(0.01)


async def until_blocked(url: str, backends: int = 1) -> None:
    """Return once so many backends of this database wait for a lock that another one holds."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:

        async def blocked() -> bool:
            cursor = await connection.execute(_WAITING)
            row = await cursor.fetchone()
            return row is not None and row[0] >= backends

        await until(blocked)


@asynccontextmanager
async def session(
    url: str, application: str = "test", pool_size: int = 3
) -> AsyncIterator[Database]:
    """A `Database` of one's own, open."""
    database = Database(url, application=application, pool_size=pool_size, timeout_seconds=15.0)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def holding(url: str, statement: str, *parameters: object) -> AsyncIterator[Any]:
    """A session that ran `statement` in a transaction and holds what it locked, until the block ends."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute(statement.encode(), parameters)
        yield connection


class Gate:
    """Passed by those who `enter`; a test learns of each and opens it for all."""

    def __init__(self) -> None:
        self.entered = 0
        self._arrived = asyncio.Condition()
        self._open = asyncio.Event()

    async def enter(self) -> None:
        """Be counted, then wait until the gate is open."""
        async with self._arrived:
            self.entered += 1
            self._arrived.notify_all()
        await self._open.wait()

    async def reached(self, by: int = 1) -> None:
        """Return once so many have come to the gate."""
        with anyio.fail_after(PATIENCE_SECONDS):
            async with self._arrived:
                await self._arrived.wait_for(lambda: self.entered >= by)

    def open(self) -> None:
        """Let everybody through, also those who come later."""
        self._open.set()
