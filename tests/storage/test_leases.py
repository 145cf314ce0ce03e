"""Renew and release (PROTOCOL.md R1, R9 and its decisions)."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain.lifecycle import LIVE, Actor, Ending, State, StopCause
from app.storage import leases
from app.storage.database import Database
from app.storage.leases import Release
from tests.support.factories import Leased, insert, query

pytestmark = pytest.mark.anyio


def work(url: str) -> dict[str, Any]:
    [(row,)] = query(url, "SELECT to_jsonb(w) FROM work AS w")
    found: dict[str, Any] = row
    return found


async def release(database: Database, *items: Release) -> int:
    async with database.transaction() as tx:
        return len(await leases.release(tx, items))


async def test_a_renewal_moves_the_end_and_nothing_else(
    database_url: str, database: Database
) -> None:
    """I9: by the database's clock; contract 12: a renewal is nothing to see."""
    row = insert(database_url, state=State.RUNNING, leased=Leased(expires_in=1), claims=2)
    before = work(database_url)
    async with database.transaction() as tx:
        assert await leases.renew(tx, [row.held], lease_seconds=30.0) == {row.id}
    after = work(database_url)
    assert after["lease_expires_at"] == after["due_at"] > before["lease_expires_at"]
    moved = {"lease_expires_at", "due_at"}
    assert {k: v for k, v in after.items() if k not in moved} == {
        k: v for k, v in before.items() if k not in moved
    }


async def test_an_ended_lease_is_not_renewed(database_url: str, database: Database) -> None:
    """Even where nobody took it yet: its owner has stopped trusting it."""
    ended = insert(database_url, leased=Leased(expires_in=-0.001))
    living = insert(database_url, leased=Leased(expires_in=5))
    async with database.transaction() as tx:
        renewed = await leases.renew(tx, [ended.held, living.held], lease_seconds=30.0)
    assert renewed == {living.id}
    assert query(
        database_url,
        "SELECT lease_expires_at < now() FROM work WHERE operation_id = %s",
        ended.id.uuid,
    ) == [(True,)]


async def test_an_ended_lease_that_nobody_took_may_still_be_given_back(
    database_url: str, database: Database
) -> None:
    """Expiry alone takes nothing away: a lease ends when somebody else claims the row."""
    row = insert(database_url, leased=Leased(expires_in=-5))
    assert await release(database, Release(row.held, State.PENDING, Actor.WORKER, 0.0)) == 1


@pytest.mark.parametrize(
    ("due_in", "deadline_in", "expected"),
    [
        (0.0, None, 0.0),
        (100.0, None, 100.0),
        (100.0, 50.0, 50.0),
        (100.0, -50.0, 100.0),
        (None, 50.0, 50.0),
    ],
)
async def test_when_it_is_due_again(
    due_in: float | None,
    deadline_in: float | None,
    expected: float,
    database_url: str,
    database: Database,
) -> None:
    """`due_at` lies behind no deadline that is still ahead; a passed one was judged by this claim."""
    row = insert(database_url, leased=Leased(), deadline_in=deadline_in)
    await release(database, Release(row.held, State.PENDING, Actor.WORKER, due_in))
    [(seconds,)] = query(database_url, "SELECT extract(epoch FROM due_at - now()) FROM work")
    assert float(seconds) == pytest.approx(expected, abs=2.0)


async def test_never_due_without_news(database_url: str, database: Database) -> None:
    """Far away, and a date that Python can read."""
    row = insert(database_url, leased=Leased(), deadline_in=-1)
    await release(database, Release(row.held, State.PENDING, Actor.WORKER, None))
    [(due_at,)] = query(database_url, "SELECT due_at FROM work")
    assert due_at.year == 9999


@pytest.mark.parametrize("visible", [True, False])
async def test_what_a_reader_sees_of_it(
    visible: bool, database_url: str, database: Database
) -> None:
    row = insert(database_url, leased=Leased())
    before = work(database_url)
    await release(database, Release(row.held, State.PENDING, Actor.WORKER, 0.0, visible=visible))
    after = work(database_url)
    assert after["version"] == before["version"] + (1 if visible else 0)
    assert (after["changed_at"] > before["changed_at"]) is visible
    assert after["lease_owner_token"] is after["lease_expires_at"] is None
    assert after["lease_generation"] == before["lease_generation"]


async def test_intents_once_noted_stay(database_url: str, database: Database) -> None:
    """R9: `ending` is set once, never changed; nor is the cause of a stop."""
    row = insert(
        database_url,
        state=State.COMPENSATING,
        ending=Ending.FAILED,
        stop_cause=StopCause.CANCEL,
        leased=Leased(),
    )
    await release(
        database,
        Release(
            row.held,
            State.COMPENSATING,
            Actor.WORKER,
            0.0,
            ending=Ending.CANCELLED,
            note_stop=StopCause.DEADLINE,
        ),
    )
    assert (work(database_url)["ending"], work(database_url)["stop_cause"]) == ("failed", "cancel")


@pytest.mark.parametrize("state", LIVE)
async def test_since_when_it_is_uncertain(
    state: State, database_url: str, database: Database
) -> None:
    """Kept through doubt and attention, forgotten with the doubt."""
    row = insert(database_url, state=State.UNCERTAIN, leased=Leased())
    since = work(database_url)["uncertain_since"]
    doubtful = state in (State.UNCERTAIN, State.NEEDS_ATTENTION)
    await release(
        database,
        Release(
            row.held,
            state,
            Actor.RECONCILER,
            0.0,
            attention="why" if state is State.NEEDS_ATTENTION else None,
            ending=Ending.FAILED if state is State.COMPENSATING else None,
        ),
    )
    assert work(database_url)["uncertain_since"] == (since if doubtful else None)


async def test_each_of_a_batch_has_its_own_way(database_url: str, database: Database) -> None:
    one, two = (insert(database_url, leased=Leased(), claims=3) for _ in range(2))
    stale = insert(database_url, leased=Leased())
    query(
        database_url,
        "UPDATE work SET lease_generation = 9 WHERE operation_id = %s",
        stale.id.uuid,
    )
    given = await release(
        database,
        Release(one.held, State.RUNNING, Actor.WORKER, 5.0),
        Release(two.held, State.UNCERTAIN, Actor.RECONCILER, 0.0, keep_claims=True),
        Release(stale.held, State.RUNNING, Actor.WORKER, 0.0),
    )
    assert given == 2
    rows = query(
        database_url, "SELECT state, actor, claims FROM work WHERE lease_owner_token IS NULL"
    )
    assert sorted(rows) == [("running", "worker", 0), ("uncertain", "reconciler", 3)]
