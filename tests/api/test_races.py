"""Races over two API processes on one database (CONTRACT 4, 5, 13; CASES.md B43; K8, K27; R17).

Real connections to real uvicorn processes; what must be simultaneous is held by a lock, not by luck.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import httpx
import psycopg
import pytest

from app.domain.identity import IdempotencyKey, OperationId, Scope
from tests.support.api import TENANT, charge, count, two
from tests.support.races import until_blocked
from tests.support.recovery import core_of, environment, recover
from tests.support.simulator import SimulatorThread

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def _all(*posts: Any) -> list[httpx.Response]:
    return list(await asyncio.gather(*posts))


async def test_simultaneous_duplicates(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 4, K8: fifty at once over two processes: one row, one id, one creator, and one effect."""
    with SimulatorThread() as simulator:
        async with two(database_url, tmp_path) as (one, other):
            for key in ("a", "b", "c"):
                body = charge(reference=f"r-{key}")
                answers = await _all(
                    *(client.post(body, key=key) for client in (one, other) for _ in range(25))
                )
                assert {answer.status_code for answer in answers} == {202}
                assert len({answer.json()["id"] for answer in answers}) == 1
                created = [a for a in answers if "Idempotent-Replayed" not in a.headers]
                assert len(created) == 1
                mismatches = await _all(
                    *(client.post(charge(7), key=key) for client in (one, other) for _ in range(5))
                )
                assert {answer.status_code for answer in mismatches} == {422}
        assert count(database_url) == 3
        async with core_of(environment(database_url, simulator.url)) as core:
            await recover(core, database_url)
        for key in ("a", "b", "c"):
            assert len(simulator.effects(reference=f"r-{key}")) == 1
        assert count(database_url, "SELECT count(*) FROM operations WHERE state = 'succeeded'") == 3


async def _hold(connection: psycopg.AsyncConnection[Any], key: str) -> None:
    """Insert an operation under `key`, as a process would that has not committed yet."""
    scope = Scope(TENANT, "payments.charge", IdempotencyKey(key))
    id = OperationId.new(scope.bucket)
    await connection.execute(
        "INSERT INTO operations (bucket, id, tenant, type, type_version, key_digest, fingerprint,"
        " fingerprint_version, input, payload_format, priority, retention_seconds, tombstone_seconds,"
        " created_at) VALUES (%s, %s, %s, %s, 1, %s, %s, 1, '{}', 1, 2, 100, 100, now())",
        [id.bucket, id.uuid, TENANT, scope.type, scope.key.digest, bytes(32)],
    )


async def test_winner_rolls_back(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 4: the winner's transaction is held open and rolled back: exactly one loser wins."""
    async with (
        two(database_url, tmp_path) as (one, other),
        await psycopg.AsyncConnection.connect(database_url) as winner,
    ):
        await _hold(winner, "k")
        posts = asyncio.gather(
            *(client.post(charge(), key="k") for client in (one, other) for _ in range(20))
        )
        await until_blocked(database_url, 2)
        assert not posts.done()
        await winner.rollback()
        with anyio.fail_after(20):
            answers = await posts
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) == 1
    assert count(database_url) == 1
    assert count(database_url, "SELECT count(*) FROM work") == 1


async def test_winner_commits_another_body(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 4, 5: everybody who waited for the winner is judged by what it committed."""
    async with (
        two(database_url, tmp_path) as (one, other),
        await psycopg.AsyncConnection.connect(database_url) as winner,
    ):
        await _hold(winner, "k")
        posts = asyncio.gather(
            *(client.post(charge(), key="k") for client in (one, other) for _ in range(5))
        )
        await until_blocked(database_url, 2)
        await winner.commit()
        with anyio.fail_after(20):
            answers = await posts
    assert {answer.json().get("code") for answer in answers} == {"idempotency-key-reused"}
    assert count(database_url) == 1


async def test_opposite_orders_do_not_deadlock(database_url: str, tmp_path: Path) -> None:
    """R17: the same keys in opposite orders from two processes, in batches: no deadlock, no 5xx."""
    async with two(database_url, tmp_path) as (one, other):
        for attempt in range(20):
            keys = [f"{attempt}-{number}" for number in range(10)]
            answers = await _all(
                *(one.post(charge(), key=key) for key in keys),
                *(other.post(charge(), key=key) for key in reversed(keys)),
            )
            assert {answer.status_code for answer in answers} == {202}
    assert count(database_url) == 200
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert count(database_url, deadlocks) == 0


async def test_first_poll_finds_it(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 13, B43: POST here, GET there at once, three hundred times: never a 404."""
    async with two(database_url, tmp_path) as (one, other):
        for number in range(300):
            posting, polling = (one, other) if number % 2 else (other, one)
            created = await posting.post(charge())
            found = await polling.http.get(created.headers["Location"])
            assert found.status_code == 200, number
