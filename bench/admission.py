"""Admission: the whole use case with group commit, against one plain INSERT per request."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

from psycopg_pool import AsyncConnectionPool

from bench.trivial import admit, core_on

CALLERS = 32


async def through_the_service(database_url: str, count: int) -> float:
    """Validation, fingerprint, group commit: operations per second at 32 callers."""
    async with core_on(database_url) as core:
        service = core.admission()
        numbers = iter(range(count))

        async def caller() -> None:
            for number in numbers:
                await admit(service, number)

        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return count / (time.perf_counter() - started)


async def plain_inserts(database_url: str, count: int) -> float:
    """One INSERT and COMMIT per request through a pool of 16, nothing else done."""
    async with AsyncConnectionPool(database_url, min_size=16, max_size=16, open=False) as pool:
        async with pool.connection() as connection:
            await connection.execute("CREATE TABLE plain (id uuid PRIMARY KEY, body bytea)")
        numbers = iter(range(count))

        async def caller() -> None:
            for _ in numbers:
                async with pool.connection() as connection:
                    await connection.execute(
                        "INSERT INTO plain VALUES (%s, %s) ON CONFLICT DO NOTHING",
                        (uuid4(), b"x" * 200),
                    )

        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return count / (time.perf_counter() - started)
