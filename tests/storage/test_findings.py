"""Findings: written once, and counted by a query over rows (PROTOCOL.md R4, R17)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.domain.identity import Direction, new_id
from app.domain.lifecycle import State
from app.domain.outcome import Absent, Applied, Finding, Refused, Unavailable
from app.domain.verdict import (
    Clear,
    Done,
    InDoubt,
    RejectionRules,
    absences_that_count,
    derive,
)
from app.storage import findings, leases
from app.storage.database import Database
from app.storage.findings import Found, LookUp
from tests.support.factories import STEP, Inserted, Leased, Sent, Told, insert, query

pytestmark = pytest.mark.anyio
LAG = 2.0
RULES = RejectionRules(
    stores_rejections=False, replays_success=False, absence_counts=True, lag_seconds=LAG
)
SETTLED = Sent(began_ago=60.0, outcome="unknown", lag=LAG)
"""Settled 48 seconds ago: window 5, transit 5, lag 2."""


async def look_up(database: Database, row: Inserted, told: Finding | None) -> Found:
    """Ask; and find, where something was told."""
    item = LookUp(row.held, new_id(), STEP, 0, Direction.FORWARD)
    async with database.transaction() as tx:
        await findings.ask(tx, [item], await leases.lock(tx, [row.held], unexpired=True))
    found = Found(row.held, item.finding_id, told or Absent())
    if told is not None:
        await find(database, found)
    return found


async def find(database: Database, *found: Found) -> None:
    async with database.transaction() as tx:
        locked = await leases.lock(tx, [one.lease for one in found])
        await findings.find(tx, found, locked)


async def verdict(database: Database, row: Inserted) -> object:
    async with database.transaction() as tx:
        history = (await findings.history(tx, [row.id]))[row.id]
    return derive(history.attempts, history.findings, RULES)


async def counted(database: Database, row: Inserted) -> int:
    async with database.transaction() as tx:
        history = (await findings.history(tx, [row.id]))[row.id]
    return absences_that_count(history.attempts, history.findings, LAG)


@pytest.mark.parametrize(
    ("told", "kind", "code"),
    [
        (Applied("ref", {"a": 1}), "applied", None),
        (Absent(), "absent", None),
        (Refused("too-old", "Older."), "refused", "too-old"),
        (Unavailable("http-503"), "unavailable", "http-503"),
    ],
)
async def test_each_finding(
    told: Finding, kind: str, code: str | None, database_url: str, database: Database
) -> None:
    row = insert(database_url, state=State.UNCERTAIN, leased=Leased(), attempts=[SETTLED])
    await look_up(database, row, told)
    async with database.transaction() as tx:
        [found] = (await findings.history(tx, [row.id]))[row.id].findings
    assert (found.source, found.kind, found.code) == ("lookup", kind, code)
    assert found.asked_at < found.found_at
    if isinstance(told, Applied):
        assert (found.reference, found.result) == ("ref", {"a": 1})
        assert await verdict(database, row) == Done("ref", {"a": 1})


async def test_a_look_up_that_never_came_back_is_no_evidence(
    database_url: str, database: Database
) -> None:
    row = insert(database_url, state=State.UNCERTAIN, leased=Leased(), attempts=[SETTLED])
    await look_up(database, row, None)
    assert query(database_url, "SELECT kind, found_at FROM findings") == [(None, None)]
    async with database.transaction() as tx:
        assert (await findings.history(tx, [row.id]))[row.id].findings == ()


async def test_what_was_told_first_stays(database_url: str, database: Database) -> None:
    row = insert(database_url, state=State.UNCERTAIN, leased=Leased(), attempts=[SETTLED])
    found = await look_up(database, row, Absent())
    before = query(database_url, "SELECT findings::text FROM findings")
    await find(database, replace(found, finding=Applied("other")))
    assert query(database_url, "SELECT findings::text FROM findings") == before
    async with database.transaction() as tx:
        assert await findings.found_before(tx, [found]) == {found.finding_id}
        assert await findings.found_before(tx, [replace(found, finding_id=new_id())]) == set()


async def test_a_repeated_write_counts_no_absent_twice(
    database_url: str, database: Database
) -> None:
    """The M4 table, finding: the row with the safety risk."""
    row = insert(database_url, state=State.UNCERTAIN, leased=Leased(), attempts=[SETTLED])
    found = await look_up(database, row, Absent())
    for _ in range(3):
        await find(database, found)
        async with database.transaction() as tx:
            locked = await leases.lock(tx, [row.held], unexpired=True)
            item = LookUp(row.held, found.finding_id, STEP, 0, Direction.FORWARD)
            await findings.ask(tx, [item], locked)
    assert await counted(database, row) == 1
    assert isinstance(await verdict(database, row), InDoubt)


@pytest.mark.parametrize(
    ("told", "counts", "clear"),
    [
        ([("absent", 40, 39)], 1, False),
        ([("absent", 40, 39), ("absent", 30, 29)], 2, True),
        ([("absent", 49, 47), ("absent", 30, 29)], 1, False),  # asked before it was settled
        ([("absent", 40, 39), ("absent", 38, 37)], 1, False),  # less than the lag apart
        ([("absent", 40, 20), ("absent", 30, 29)], 1, False),  # begun before the first was in
        ([("absent", 40, 39), ("unavailable", 30, 29), ("refused", 20, 19)], 1, False),
        ([("absent", 40, 39), (None, 30, 29)], 1, False),
    ],
)
async def test_which_absences_count(
    told: list[tuple[str | None, float, float]],
    counts: int,
    clear: bool,
    database_url: str,
    database: Database,
) -> None:
    """R4, from rows: each begun after `settled_at` of every attempt, a lag after the one before."""
    row = insert(
        database_url,
        state=State.UNCERTAIN,
        leased=Leased(),
        attempts=[SETTLED],
        findings=[Told(kind, asked_ago=asked, found_ago=found) for kind, asked, found in told],
    )
    assert await counted(database, row) == counts
    assert isinstance(await verdict(database, row), Clear if clear else InDoubt)


async def test_a_new_attempt_voids_what_was_counted(database_url: str, database: Database) -> None:
    """R4's last sentence, counterexample 7; the attempts before it stay closed."""
    absent = [
        Told("absent", asked_ago=40, found_ago=39),
        Told("absent", asked_ago=30, found_ago=29),
    ]
    row = insert(
        database_url,
        state=State.UNCERTAIN,
        leased=Leased(),
        attempts=[SETTLED, Sent(began_ago=20.0, outcome="unknown", lag=LAG)],
        findings=absent,
    )
    assert await counted(database, row) == 0
    doubt = await verdict(database, row)
    assert isinstance(doubt, InDoubt)
    query(
        database_url,
        "UPDATE attempts SET outcome = 'not_applied' WHERE began_at > now() - interval '30 s'",
    )
    assert isinstance(await verdict(database, row), Clear)


async def test_history_of_many_keeps_them_apart(database_url: str, database: Database) -> None:
    rows = [
        insert(
            database_url,
            state=State.UNCERTAIN,
            attempts=[Sent(began_ago=ago) for ago in (30, 20, 10)][: number + 1],
            findings=[Told("absent")] * number,
        )
        for number in range(2)
    ]
    nothing = insert(database_url)
    async with database.transaction() as tx:
        told = await findings.history(tx, [*(row.id for row in rows), nothing.id])
        assert await findings.history(tx, []) == {}
    assert [len(told[row.id].attempts) for row in rows] == [1, 2]
    assert [len(told[row.id].findings) for row in rows] == [0, 1]
    assert told[nothing.id].attempts == told[nothing.id].steps == ()
    began = [attempt.began_at for attempt in told[rows[1].id].attempts]
    assert began == sorted(began), "oldest first"
