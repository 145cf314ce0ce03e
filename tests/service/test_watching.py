"""Long polls in memory: cheap, told at once, never leaked, ended at a stop (CONTRACT 12; K24, B37)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import psycopg
import pytest

from app.domain.errors import StoreUnavailable
from app.domain.identity import OperationId
from app.domain.operation import OperationView
from app.service.watching import Hub
from app.storage import notices
from app.storage.database import Database
from app.storage.notices import Channel
from tests.support.api import until
from tests.support.core import capturing_telemetry
from tests.support.factories import insert

pytestmark = pytest.mark.anyio


class CountingDatabase(Database):
    """Counts transactions, and can be away."""

    transactions = 0
    away = False

    def transaction(self) -> Any:
        """As always, unless it is away."""
        self.transactions += 1
        if self.away:
            raise StoreUnavailable("away")
        return super().transaction()


@asynccontextmanager
async def hub(
    url: str, *, poll_interval_seconds: float = 60.0, deaf: bool = False
) -> AsyncIterator[tuple[Hub, CountingDatabase]]:
    """A running hub. `deaf`: it hears no notices, as behind a pooler in transaction mode."""
    database = CountingDatabase(url, application="hub", pool_size=2, prepared_statements=not deaf)
    await database.open()
    telemetry, _ = capturing_telemetry()
    watching = Hub(database, telemetry, poll_interval_seconds=poll_interval_seconds)
    running = asyncio.create_task(watching.run())
    try:
        if not deaf:
            await _until_listening(url)
        yield watching, database
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await database.close()


async def _until_listening(url: str) -> None:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND query = 'LISTEN fencepost_changed' AND state = 'idle'"
    )
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:

        async def listening() -> bool:
            row = await (await connection.execute(query)).fetchone()
            return row is not None and row[0] == 1

        await until(listening)


def _raise_version(url: str, *ids: OperationId) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE work SET version = version + 1 WHERE operation_id = ANY(%s)",
            [[id.uuid for id in ids]],
        )


async def _wait(
    watching: Hub, id: OperationId, answers: list[OperationView | None], version: int = 1
) -> None:
    with watching.watching(id) as watch:
        answers.append(await watch.change_from(version, 30.0))


async def test_a_notice_wakes_those_it_concerns(database_url: str) -> None:
    """CONTRACT 12: told at once, and only who waits for what changed."""
    one, other = insert(database_url).id, insert(database_url).id
    answers: list[OperationView | None] = []
    async with hub(database_url) as (watching, database), anyio.create_task_group() as group:
        group.start_soon(_wait, watching, one, answers)
        group.start_soon(_wait, watching, other, answers)
        await until(lambda: watching.waiting == 2)
        _raise_version(database_url, one)
        await notices.notify(database, Channel.CHANGED, [one])
        await until(lambda: answers)
        assert [view and (view.id, view.version) for view in answers] == [(one, 2)]
        assert watching.waiting == 1
        watching.close()
    assert answers[1] is None
    assert watching.waiting == 0


async def test_an_empty_notice_is_about_everything(database_url: str) -> None:
    """K24: a notice that could not name all ids makes the hub look at all it waits for."""
    ids = [insert(database_url).id for _ in range(3)]
    answers: list[OperationView | None] = []
    async with hub(database_url) as (watching, database), anyio.create_task_group() as group:
        for id in ids:
            group.start_soon(_wait, watching, id, answers)
        await until(lambda: watching.waiting == 3)
        _raise_version(database_url, *ids)
        await notices.notify(database, Channel.CHANGED)
    assert {view and view.id for view in answers} == set(ids)


async def test_polling_is_the_truth(database_url: str) -> None:
    """K24: with no notice ever heard, the slow poll finds every change."""
    id = insert(database_url).id
    answers: list[OperationView | None] = []
    async with (
        hub(database_url, poll_interval_seconds=0.05, deaf=True) as (watching, _),
        anyio.create_task_group() as group,
    ):
        group.start_soon(_wait, watching, id, answers)
        await until(lambda: watching.waiting)
        _raise_version(database_url, id)
    assert answers[0] is not None
    assert answers[0].version == 2


async def test_a_thousand_waiters_are_one_statement(database_url: str) -> None:
    """CONTRACT 12: the cost of a change does not grow with those who wait for it, nor that of a poll."""
    ids = [insert(database_url).id for _ in range(100)]
    answers: list[OperationView | None] = []
    async with hub(database_url) as (watching, database), anyio.create_task_group() as group:
        for number in range(1_000):
            group.start_soon(_wait, watching, ids[number % 100], answers)
        await until(lambda: watching.waiting == 1_000)
        await anyio.sleep(0.05)
        before = database.transactions
        _raise_version(database_url, *ids)
        await notices.notify(database, Channel.CHANGED)  # one transaction of this database, too
        await until(lambda: len(answers) == 1_000)
        assert database.transactions - before <= 3
    assert watching.waiting == 0
    assert not watching._watches


async def test_change_between_read_and_wait_is_seen(database_url: str) -> None:
    """CONTRACT 12: a notice after the watch began and before it waits is looked into, with no poll."""
    id = insert(database_url).id
    async with hub(database_url) as (watching, database):
        with watching.watching(id) as watch:
            looked = anyio.Event()
            compare = watching._compare

            async def compared(ids: list[OperationId]) -> None:
                await compare(ids)
                looked.set()

            watching._compare = compared  # type: ignore[method-assign]
            _raise_version(database_url, id)
            await notices.notify(database, Channel.CHANGED, [id])
            await looked.wait()  # before anybody waited: nobody was told
            with anyio.fail_after(5):
                view = await watch.change_from(1, 30.0)
    assert view is not None
    assert view.version == 2


async def test_time_is_over(database_url: str) -> None:
    """CONTRACT 12: nothing when N is over, or is nothing; nobody is left behind."""
    id = insert(database_url).id
    async with hub(database_url) as (watching, _):
        for seconds in (0.05, 0.0, -1.0):
            with anyio.fail_after(5), watching.watching(id) as watch:
                assert await watch.change_from(1, seconds) is None
        assert not watching._watches


async def test_hang_ups_leave_nothing(database_url: str) -> None:
    """K22: waiters that are cancelled are gone, also while they are being told."""
    id = insert(database_url).id
    answers: list[OperationView | None] = []
    async with hub(database_url) as (watching, database):
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(_wait, watching, id, answers)
            await until(lambda: watching.waiting == 50)
            _raise_version(database_url, id)
            watching.look_at([id])
            group.cancel_scope.cancel()
        assert not watching._watches
        async with anyio.create_task_group() as group:
            group.start_soon(_wait, watching, id, answers, 2)
            await until(lambda: watching.waiting)
            _raise_version(database_url, id)
            await notices.notify(database, Channel.CHANGED, [id])
    assert answers[-1] is not None
    assert answers[-1].version == 3


async def test_close_ends_every_wait(database_url: str) -> None:
    """CONTRACT 12: a process that stops lets everybody go at once, and keeps nobody who comes later."""
    id = insert(database_url).id
    answers: list[OperationView | None] = []
    async with hub(database_url) as (watching, _):
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(_wait, watching, id, answers)
                await until(lambda: watching.waiting == 20)
                watching.close()
            await _wait(watching, id, answers)
        watching.close()
        assert watching.closed
    assert answers == [None] * 21


async def test_outage(database_url: str) -> None:
    """B37: looks that fail are tried again by the next poll; nobody is told anything wrong meanwhile."""
    id = insert(database_url).id
    answers: list[OperationView | None] = []
    async with (
        hub(database_url, poll_interval_seconds=0.05) as (watching, database),
        anyio.create_task_group() as group,
    ):
        group.start_soon(_wait, watching, id, answers)
        await until(lambda: watching.waiting)
        database.away = True
        _raise_version(database_url, id)
        tried = database.transactions
        await until(lambda: database.transactions > tried + 2)
        assert not answers
        database.away = False
    assert answers[0] is not None


async def test_purged_rows_wake_nobody(database_url: str) -> None:
    """An operation that is no longer there has no version: its waiters wait until their time is over."""
    id = insert(database_url).id
    async with hub(database_url) as (watching, _):
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("DELETE FROM work")
            connection.execute("DELETE FROM operations")
        with watching.watching(id) as watch:
            watching.look_at([id])
            assert await watch.change_from(1, 0.2) is None
