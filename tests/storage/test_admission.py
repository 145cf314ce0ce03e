"""Admit: the insert decides who is first, and the loser always finds the winner's row (CASES.md K8, R13)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.identity import OperationId, Scope
from app.domain.lifecycle import State
from app.domain.operation import Holder, NewOperation
from app.storage import operations
from app.storage.database import Database
from tests.storage.verbs import new_operation
from tests.support.factories import insert, query
from tests.support.races import session, until_blocked

pytestmark = pytest.mark.anyio


async def admit(database: Database, *new: NewOperation) -> dict[OperationId, datetime]:
    async with database.transaction() as tx:
        return await operations.admit(tx, new)


async def holders(database: Database, *new: NewOperation) -> list[Holder | None]:
    async with database.transaction() as tx:
        return await operations.holders(
            tx, [Scope(item.tenant, item.type, item.key) for item in new]
        )


class _Over(Exception):
    """Ends a transaction without COMMIT."""


@pytest.mark.parametrize("commits", [True, False], ids=["first commits", "first rolls back"])
async def test_two_sessions_one_scope(commits: bool, database_url: str, database: Database) -> None:
    """B12, R13: the second waits for the first; it gets the holder, or takes the scope."""
    mine, theirs = new_operation("k"), new_operation("k")
    async with session(database_url, "two") as two:
        try:
            async with database.transaction() as tx:
                assert set(await operations.admit(tx, [mine])) == {mine.id}
                second = asyncio.create_task(admit(two, theirs))
                await until_blocked(database_url)
                if not commits:
                    raise _Over
        except _Over:
            pass
        inserted = await second
        [holder] = await holders(two, theirs)
    assert holder is not None
    assert set(inserted) == (set() if commits else {theirs.id})
    assert holder.id == (mine.id if commits else theirs.id)
    assert holder.fingerprint == mine.fingerprint
    assert query(database_url, "SELECT count(*) FROM operations") == [(1,)]
    assert query(database_url, "SELECT operation_id FROM work") == [(holder.id.uuid,)]


async def test_batches_in_opposite_order_do_not_deadlock(
    database_url: str, database: Database
) -> None:
    """R17: admit goes in scope order, since the ids are new; forty rounds of the same keys, mirrored."""
    async with session(database_url, "two") as two:
        for round in range(40):
            keys = [f"{round}-{n}" for n in range(20)]
            one = [new_operation(key) for key in keys]
            other = [new_operation(key) for key in reversed(keys)]
            won, also_won = await asyncio.gather(admit(database, *one), admit(two, *other))
            assert len(won) + len(also_won) == 20
    assert query(database_url, "SELECT count(*) FROM work") == [(800,)]


async def test_a_batch_with_one_scope_twice_admits_one(
    database_url: str, database: Database
) -> None:
    first, second = new_operation("k"), new_operation("k")
    inserted = await admit(database, first, second)
    assert len(inserted) == 1
    [held, also_held] = await holders(database, first, second)
    assert held == also_held
    assert held is not None
    assert {held.id} == set(inserted)
    assert query(database_url, "SELECT count(*) FROM work") == [(1,)]


async def test_scopes_are_apart(database_url: str, database: Database) -> None:
    """Contract 6, CASES.md B20: tenant, type and every byte of the key count, upper case included."""
    new = [
        new_operation("abc"),
        new_operation("ABC"),
        new_operation("abc", tenant="other"),
        new_operation("abc", type="other"),
        new_operation("abc "[:3] + "d"),
    ]
    assert len(await admit(database, *new)) == 5
    assert [holder and holder.id for holder in await holders(database, *new)] == [
        item.id for item in new
    ]
    assert await holders(database, new_operation("nobody's")) == [None]


async def test_running_again_makes_no_work_for_what_is_done(
    database_url: str, database: Database
) -> None:
    """The M4 table, admit: `work` comes from the insert's RETURNING and from nothing else."""
    new = new_operation("k")
    await admit(database, new)
    query(database_url, "DELETE FROM work")
    assert await admit(database, new) == {}
    assert query(database_url, "SELECT count(*) FROM work") == [(0,)]


@pytest.mark.parametrize("state", list(State))
async def test_a_holder_is_found_in_every_state(
    state: State, database_url: str, database: Database
) -> None:
    """B12: pending to tombstone, the fingerprint is there to compare with."""
    from app.domain.lifecycle import Ending

    ending = Ending.FAILED if state is State.COMPENSATING else None
    row = insert(database_url, key="k", state=state, ending=ending)
    [holder] = await holders(database, new_operation("k"))
    assert holder is not None
    assert (holder.id, holder.state, holder.purged) == (row.id, state, False)
    assert holder.fingerprint.digest == row.scope.key.digest
    assert await admit(database, new_operation("k")) == {}


async def test_a_tombstone_holds_its_scope(database_url: str, database: Database) -> None:
    row = insert(database_url, key="k", state=State.SUCCEEDED, purged=True)
    assert await admit(database, new_operation("k")) == {}
    [holder] = await holders(database, new_operation("k"))
    assert holder is not None
    assert (holder.id, holder.purged) == (row.id, True)


@pytest.mark.parametrize(
    ("not_before", "deadline", "due"),
    [
        (None, None, 0),
        (100, None, 100),
        (-100, None, 0),
        (None, 50, 0),
        (100, 50, 50),
        (None, -50, -50),
    ],
)
async def test_when_a_new_operation_is_due(
    not_before: int | None,
    deadline: int | None,
    due: int,
    database_url: str,
    database: Database,
) -> None:
    """At once, at its `not_before`, never later than its deadline; `due_at` lies behind no deadline."""
    now = datetime.now(UTC)

    def at(offset: int | None) -> datetime | None:
        return None if offset is None else now + timedelta(seconds=offset)

    await admit(database, new_operation("k", not_before=at(not_before), deadline=at(deadline)))
    [(due_at, created_at)] = query(
        database_url, "SELECT due_at, created_at FROM work JOIN operations USING (bucket)"
    )
    expected = created_at if due == 0 else at(due)
    assert abs((due_at - expected).total_seconds()) < 0.01


async def test_what_is_stored_is_what_was_given(database_url: str, database: Database) -> None:
    """Byte for byte; the database writes the time."""
    new = new_operation("k", input='{"note":"é\\\\u0000 /"}'.encode(), priority=0)
    [created_at] = (await admit(database, new)).values()
    [stored] = query(
        database_url,
        "SELECT o.input, o.metadata, o.priority, w.priority, o.created_at, o.state, w.state, w.actor,"
        " w.claims, w.lease_generation, w.version, o.idempotency_key FROM operations AS o"
        " JOIN work AS w ON (o.bucket, o.id) = (w.bucket, w.operation_id)",
    )
    assert stored == (
        new.input, {"a": "b"}, 0, 0, created_at, None, "pending", "worker", 0, 0, 1, "k",
    )  # fmt: skip
