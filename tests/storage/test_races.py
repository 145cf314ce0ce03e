"""The lock traps measured on PostgreSQL (PROTOCOL.md, after the M4 table: T1, T1c, T4, T2, T3), as tests.

Two sessions, real verbs, and a real block: one side is let go only once the other waits for its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import Actor, State, StopCause
from app.domain.operation import Lease
from app.domain.outcome import Rejected, Succeeded
from app.storage import attempts, cancellation, claims, findings, leases, operations, steps
from app.storage.attempts import Answer
from app.storage.database import Database, Row, Transaction
from app.storage.leases import Locked
from app.storage.operations import Finish
from app.storage.steps import Begin, Begun
from tests.storage.verbs import begin_of
from tests.support.factories import (
    STEP,
    TENANT,
    TYPE,
    Inserted,
    Leased,
    Sent,
    insert,
    query,
    snapshot,
)
from tests.support.races import session, until, until_blocked

pytestmark = pytest.mark.anyio


@pytest.fixture
async def one(database_url: str) -> AsyncIterator[Database]:
    async with session(database_url, "one") as opened:
        yield opened


@pytest.fixture
async def two(database_url: str) -> AsyncIterator[Database]:
    async with session(database_url, "two") as opened:
        yield opened


async def cancel(tx: Transaction, id: OperationId) -> State | None:
    return await cancellation.cancel(
        tx, id, tenant=TENANT, action_id=new_id(), by="client", reason=None, error=b"{}"
    )


async def begin(database: Database, item: Begin) -> tuple[dict[OperationId, Locked], list[Begun]]:
    """Lock, then begin, as the worker does; what it locked and what it began."""
    async with database.transaction() as tx:
        locked = await leases.lock(tx, [item.lease], unexpired=True)
        begun = await steps.begin(tx, [item], locked)
    return locked, list(begun.values())


async def take_over(tx: Transaction, limit: int = 10) -> list[Row]:
    return await claims.claim(
        tx,
        actor=Actor.WORKER,
        owner_token=uuid4(),
        lease_seconds=30.0,
        limit=limit,
        known=[(TYPE, 1)],
    )


def running(url: str, **changes: object) -> Inserted:
    """Something was begun and is done, so a cancel can only be noted; held by generation 1."""
    done = Sent(step="earlier", outcome="succeeded")
    return insert(url, state=State.RUNNING, leased=Leased(), attempts=[done], **changes)  # type: ignore[arg-type]


# -- cancel against begin: T1, T1c, T3, T4 -----------------------------------------------------------------


async def test_a_cancel_that_committed_first_leaves_no_row_to_begin(
    database_url: str, one: Database, two: Database
) -> None:
    """T1 and T3: nothing was begun, the canceller holds the row; the begin waits and then finds nothing."""
    row = insert(database_url, leased=Leased())
    item = begin_of(row.held)
    async with one.transaction() as tx:
        assert await cancel(tx, row.id) is State.CANCELLED
        beginning = asyncio.create_task(begin(two, item))
        await until_blocked(database_url)
        before = snapshot(database_url)
    assert await beginning == ({}, [])
    assert before["attempts"] == snapshot(database_url)["attempts"] == []
    assert query(database_url, "SELECT state FROM operations") == [("cancelled",)]


async def test_a_cancel_that_was_noted_first_is_seen_on_the_locked_row(
    database_url: str, one: Database, two: Database
) -> None:
    """T4: the guard lies on the locked row itself, so its newest version is what the begin reads."""
    row = running(database_url)
    async with one.transaction() as tx:
        assert await cancel(tx, row.id) is State.RUNNING
        locking = asyncio.create_task(_lock(two, row.held))
        await until_blocked(database_url)
    locked = await locking
    assert locked[row.id].stop_cause is StopCause.CANCEL
    assert locked[row.id].version == 2


async def _lock(database: Database, lease: Lease) -> dict[OperationId, Locked]:
    async with database.transaction() as tx:
        return await leases.lock(tx, [lease], unexpired=True)


async def test_evidence_that_committed_first_is_seen_by_the_next_statement(
    database_url: str, one: Database, two: Database
) -> None:
    """T1c: a guard on another table is read after the lock was taken, by a later statement."""
    sent = Sent(outcome="not_applied")
    late = Sent(began_ago=8.0)
    row = insert(database_url, state=State.RUNNING, leased=Leased(), attempts=[sent, late])
    query(
        database_url,
        "UPDATE attempts SET outcome = 'not_applied', recorded_at = now() WHERE id = %s",
        late.id,
    )
    item = begin_of(row.held, step=STEP, restarts_window=True)
    async with one.transaction() as tx:
        answer = Answer(row.held, late.id, Succeeded("r"))
        assert await attempts.add_late_answers(tx, [(new_id(), answer)]) == {row.id}
        beginning = asyncio.create_task(begin(two, item))
        await until_blocked(database_url)
    locked, begun = await beginning
    assert set(locked) == {row.id}
    assert begun == [], "an effect that is known to exist is not sent again"


@pytest.mark.parametrize("first", ["begin", "cancel"])
async def test_begin_and_cancel_in_either_order(
    first: str, database_url: str, one: Database, two: Database
) -> None:
    """R10: judged under the lock. Begun first: only noted. Cancelled first: nothing is begun."""
    row = insert(database_url, leased=Leased())
    item = begin_of(row.held)
    if first == "begin":
        async with one.transaction() as tx:
            locked = await leases.lock(tx, [item.lease], unexpired=True)
            assert await steps.begin(tx, [item], locked)
            cancelling = asyncio.create_task(_cancel(two, row.id))
            await until_blocked(database_url)
        assert await cancelling is State.RUNNING
        assert query(database_url, "SELECT state, stop_cause FROM work") == [("running", "cancel")]
        assert query(database_url, "SELECT state FROM operations") == [(None,)]
    else:
        async with one.transaction() as tx:
            assert await cancel(tx, row.id) is State.CANCELLED
            beginning = asyncio.create_task(begin(two, item))
            await until_blocked(database_url)
        assert (await beginning)[1] == []
        assert query(database_url, "SELECT count(*) FROM attempts") == [(0,)]


async def _cancel(database: Database, id: OperationId) -> State | None:
    async with database.transaction() as tx:
        return await cancel(tx, id)


# -- take-over against begin and record: T2 ----------------------------------------------------------------


async def _soon_over(url: str, row: Inserted) -> None:
    query(url, "UPDATE work SET lease_expires_at = now() + interval '0.2 s', due_at = now()")


async def _over(url: str) -> None:
    async def ended() -> bool:
        [(over,)] = query(url, "SELECT lease_expires_at <= now() FROM work")
        return bool(over)

    await until(ended)


async def test_nobody_takes_over_between_lock_and_insert(
    database_url: str, one: Database, two: Database
) -> None:
    """T2: the lease ends while the begin holds the row: a claim passes it by, and later sees the attempt."""
    row = insert(database_url, leased=Leased())
    item = begin_of(row.held)
    await _soon_over(database_url, row)
    async with one.transaction() as tx:
        locked = await leases.lock(tx, [item.lease], unexpired=True)
        assert set(locked) == {row.id}
        await _over(database_url)
        async with two.transaction() as other:
            assert await take_over(other) == []
        assert await steps.begin(tx, [item], locked)
    async with two.transaction() as other:
        [claimed] = await take_over(other)
        history = (await findings.history(other, [row.id]))[row.id]
    assert claimed["lease_generation"] == 2
    assert claimed["taken_over"]
    assert [attempt.id for attempt in history.attempts] == [item.attempt_id]


@pytest.mark.parametrize("verb", ["begin", "record", "finish", "ask"])
async def test_a_take_over_that_came_first_is_waited_for_and_nothing_is_written(
    verb: str, database_url: str, one: Database, two: Database
) -> None:
    """T2 the other way round: the old owner waits for the new one's claim, and has lost."""
    sent = Sent()
    row = insert(database_url, state=State.RUNNING, leased=Leased(expires_in=-1.0), attempts=[sent])

    async def act() -> object:
        async with two.transaction() as tx:
            locked = await leases.lock(tx, [row.held])
            match verb:
                case "begin":
                    return await steps.begin(tx, [begin_of(row.held)], locked)
                case "record":
                    return await attempts.record(
                        tx, [Answer(row.held, sent.id, Succeeded())], locked
                    )
                case "ask":
                    item = findings.LookUp(
                        row.held, new_id(), STEP, 0, begin_of(row.held).direction
                    )
                    return await findings.ask(tx, [item], locked)
                case _:
                    end = Finish(row.held, State.SUCCEEDED, result=b"{}", result_version=1)
                    return await operations.finish(tx, [end])

    async with one.transaction() as tx:
        [claimed] = await take_over(tx)
        acting = asyncio.create_task(act())
        await until_blocked(database_url)
    assert not await acting
    assert claimed["lease_generation"] == 2
    assert query(database_url, "SELECT outcome FROM attempts") == [(None,)]
    assert query(database_url, "SELECT lease_generation, state FROM work") == [(2, "running")]
    assert query(database_url, "SELECT count(*) FROM findings") == [(0,)]


async def test_a_stale_rejection_ends_nothing(
    database_url: str, one: Database, two: Database
) -> None:
    """Counterexample 13: recorded unfenced it would end the operation while the next attempt executes."""
    old = Sent(began_ago=20.0)
    row = insert(database_url, state=State.RUNNING, leased=Leased(expires_in=-1.0), attempts=[old])
    async with one.transaction() as tx:
        await take_over(tx)
    answer = Answer(row.held, old.id, Rejected("declined"))
    async with two.transaction() as tx:
        locked = await leases.lock(tx, [row.held])
        await attempts.record(tx, [answer], locked)
        assert await attempts.recorded_before(tx, [answer]) == set()
    assert query(database_url, "SELECT outcome FROM attempts") == [(None,)]


async def test_a_record_that_came_first_is_seen_by_the_take_over(
    database_url: str, one: Database, two: Database
) -> None:
    sent = Sent()
    row = insert(database_url, state=State.RUNNING, leased=Leased(expires_in=-1.0), attempts=[sent])
    async with one.transaction() as tx:
        locked = await leases.lock(tx, [row.held])
        await attempts.record(tx, [Answer(row.held, sent.id, Succeeded("r"))], locked)
        async with two.transaction() as other:
            assert await take_over(other) == []
    async with two.transaction() as other:
        await take_over(other)
        history = (await findings.history(other, [row.id]))[row.id]
    assert [attempt.reference for attempt in history.attempts] == ["r"]


# -- order of locks: R17 -----------------------------------------------------------------------------------


async def test_batches_in_opposite_order_do_not_deadlock(
    database_url: str, one: Database, two: Database
) -> None:
    """R17: one ordered lock statement first, whatever the order of the batch."""
    rows = [insert(database_url, leased=Leased()) for _ in range(40)]
    held = [row.held for row in rows]

    async def renew(database: Database, batch: list[Lease]) -> None:
        for _ in range(15):
            async with database.transaction() as tx:
                assert len(await leases.renew(tx, batch, lease_seconds=30.0)) == 40

    await asyncio.gather(renew(one, held), renew(two, held[::-1]))


async def test_the_lock_statement_takes_rows_in_order(
    database_url: str, one: Database, two: Database
) -> None:
    """The first row of the order is waited for before any other is taken."""
    rows = sorted(
        (insert(database_url, leased=Leased()) for _ in range(3)), key=lambda r: (r.id.bucket, r.id)
    )
    async with one.transaction() as tx:
        await leases.lock(tx, [rows[0].held])
        locking = asyncio.create_task(_renew_all(two, [row.held for row in reversed(rows)]))
        await until_blocked(database_url)
        free = "SELECT count(*) FROM (SELECT FROM work FOR UPDATE SKIP LOCKED) AS free"
        assert query(database_url, free) == [(2,)]
    assert len(await locking) == 3


async def _renew_all(database: Database, held: list[Lease]) -> set[OperationId]:
    async with database.transaction() as tx:
        return await leases.renew(tx, held, lease_seconds=30.0)
