"""What a short command needs: settings that hold, and a database that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.bootstrap import open_database
from app.service import schema
from app.settings import Settings, load_settings
from app.storage.database import Database

_T = TypeVar("_T")


def with_database(action: Callable[[Settings, Database], Awaitable[_T]]) -> _T:
    """What `action` returns, on a database that was reached and has this program's schema.

    The stamp is not compared: looking at a restored copy, or at its keys, acts on nothing.

    Raises:
        ConfigurationError: settings that do not hold.
        StoreUnavailable: the database cannot be reached; at once, without waiting for it.
        SchemaMismatch: it is at another revision.
    """
    settings = load_settings()

    async def run() -> _T:
        database = open_database(settings, "cli", pool_size=1)
        await schema.reach(database)
        await database.open()
        try:
            await schema.require_head(database)
            return await action(settings, database)
        finally:
            await database.close()

    return asyncio.run(run())


def require_database() -> None:
    """Return where a database answers and has this program's schema; raises as `with_database`."""
    with_database(_nothing)


async def _nothing(_settings: Settings, _database: Database) -> None:
    return None
