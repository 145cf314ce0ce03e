"""Claims: who gets what, in which order, and what counts (PROTOCOL.md, claim, 'Claims'; CASES.md K5, K6)."""

from __future__ import annotations

from uuid import uuid4

import pytest

from app.domain.lifecycle import LIVE, Actor, Ending, State
from app.domain.operation import Lease, Trust
from app.storage import claims, leases
from app.storage.database import Database, Row
from app.storage.leases import Release
from tests.storage.verbs import claim
from tests.support.factories import TYPE, Leased, Sent, end_leases, insert, query
from tests.support.races import session

pytestmark = pytest.mark.anyio


def ids(rows: list[Row]) -> list[object]:
    return [row["operation_id"] for row in rows]


async def test_two_sessions_claim_disjoint_sets_and_wait_for_nobody(
    database_url: str, database: Database
) -> None:
    """SKIP LOCKED: while one claim is not committed the other takes what is left."""
    rows = {insert(database_url).id.uuid for _ in range(10)}
    async with session(database_url, "two") as two:
        async with database.transaction() as tx:
            first = await claims.claim(
                tx,
                actor=Actor.WORKER,
                owner_token=uuid4(),
                lease_seconds=30.0,
                limit=4,
                known=[(TYPE, 1)],
            )
            second = await claim(two)
        assert len(first) == 4
        assert len(second) == 6
        assert {*ids(first), *ids(second)} == rows
        assert await claim(two) == []


async def test_urgent_ones_first_then_the_longest_due(
    database_url: str, database: Database
) -> None:
    """Priority 0 is first, and within one priority who has waited longest."""
    order = [
        insert(database_url, priority=priority, due_in=-waited).id.uuid
        for priority, waited in [(0, 1), (1, 9), (1, 5), (2, 100), (3, 1000)]
    ]
    claimed = [ids(await claim(database, limit=1))[0] for _ in order]
    assert claimed == order


async def test_a_full_limit_takes_the_urgent_ones(database_url: str, database: Database) -> None:
    urgent = {insert(database_url, priority=0).id.uuid for _ in range(3)}
    for _ in range(5):
        insert(database_url, priority=2, due_in=-500)
    assert set(ids(await claim(database, limit=3))) == urgent


@pytest.mark.parametrize(("type", "version"), [("unknown.type", 1), (TYPE, 2), (TYPE.upper(), 1)])
async def test_what_is_not_known_is_left_alone(
    type: str, version: int, database_url: str, database: Database
) -> None:
    """I12, K6: also where unknown ones would fill the limit many times over."""
    for _ in range(20):
        insert(database_url, type=type, type_version=version, priority=0)
    known = insert(database_url, priority=3)
    assert ids(await claim(database, limit=5)) == [known.id.uuid]
    assert query(
        database_url, "SELECT DISTINCT claims, lease_generation FROM work WHERE priority = 0"
    ) == [(0, 0)]
    assert len(await claim(database, known=[(type, version)])) == 20


async def test_nothing_known_is_nothing_claimed(database_url: str, database: Database) -> None:
    insert(database_url)
    assert await claim(database, known=[]) == []


async def test_what_is_not_due_is_not_claimed(database_url: str, database: Database) -> None:
    insert(database_url, due_in=5)
    insert(database_url, due_in=float("inf"))
    assert await claim(database) == []


async def test_a_lease_that_has_not_ended_is_not_claimed(
    database_url: str, database: Database
) -> None:
    """Also where late evidence has made the leased row due already (R7)."""
    insert(database_url, leased=Leased(expires_in=5))
    query(database_url, "UPDATE work SET due_at = now() - interval '1 h'")
    assert await claim(database) == []


async def test_an_ended_lease_is_claimed_and_the_generation_rises(
    database_url: str, database: Database
) -> None:
    row = insert(database_url, leased=Leased(expires_in=-0.001, generation=7), claims=2)
    token = uuid4()
    [claimed] = await claim(database, owner_token=token)
    assert claimed["operation_id"] == row.id.uuid
    assert (claimed["lease_generation"], claimed["lease_owner_token"]) == (8, token)
    assert claimed["taken_over"] is True
    assert claimed["claims"] == 3
    assert query(
        database_url,
        "SELECT lease_expires_at = due_at, lease_expires_at - now() BETWEEN interval '25 s'"
        " AND interval '30 s' FROM work",
    ) == [(True, True)]


async def test_a_free_row_is_not_taken_over(database_url: str, database: Database) -> None:
    insert(database_url, generation=4)
    [claimed] = await claim(database)
    assert (claimed["taken_over"], claimed["lease_generation"]) == (False, 5)
    assert claimed["input"] == b'{"amount":100}'
    assert claimed["claimed_at"] >= claimed["was_due_at"]


@pytest.mark.parametrize("state", LIVE)
async def test_each_actor_claims_its_own(
    state: State, database_url: str, database: Database
) -> None:
    """uncertain and needs_attention are the reconciler's; the row says whose it is."""
    ending = Ending.FAILED if state is State.COMPENSATING else None
    insert(database_url, state=state, ending=ending)
    doubtful = state in (State.UNCERTAIN, State.NEEDS_ATTENTION)
    mine = Actor.RECONCILER if doubtful else Actor.WORKER
    other = Actor.WORKER if doubtful else Actor.RECONCILER
    assert await claim(database, actor=other) == []
    [claimed] = await claim(database, actor=mine)
    assert claimed["state"] == state.value
    assert claimed["version"] == 1, "a claim is nothing to see (contract 12)"


async def test_claims_are_counted_until_a_release_resets_them(
    database_url: str, database: Database
) -> None:
    """K5: counted with the claim; only what ended by expiry stays counted."""
    row = insert(database_url)
    for expected in (1, 2, 3):
        [claimed] = await claim(database)
        assert claimed["claims"] == expected
        end_leases(database_url)
    [claimed] = await claim(database)
    lease = Lease(
        row.id, claimed["lease_owner_token"], claimed["lease_generation"], Trust(float("inf"))
    )
    async with database.transaction() as tx:
        await leases.release(tx, [Release(lease, State.PENDING, Actor.WORKER, 0.0)])
    [claimed] = await claim(database)
    assert (claimed["claims"], claimed["lease_generation"]) == (1, 5)


async def test_read_back_by_the_token_of_one_call(database_url: str, database: Database) -> None:
    """R17: after an unknown COMMIT the same rows, uncounted; nobody else's, and no ended ones."""
    mine = {insert(database_url).id.uuid for _ in range(3)}
    token = uuid4()
    claimed = await claim(database, owner_token=token)
    insert(database_url)
    await claim(database)
    async with database.transaction() as tx:
        again = await claims.claimed_before(tx, owner_token=token)
        nothing = await claims.claimed_before(tx, owner_token=uuid4())
    assert set(ids(again)) == mine
    assert {(row["claims"], row["lease_generation"]) for row in again} == {(1, 1)}
    assert {frozenset(row) for row in again} == {frozenset(row) for row in claimed}
    assert nothing == []
    end_leases(database_url)
    async with database.transaction() as tx:
        assert await claims.claimed_before(tx, owner_token=token) == []


@pytest.mark.parametrize(
    ("ended_ago", "outcome", "taken"),
    [(100.0, None, True), (100.0, "unknown", False), (10.0, None, False), (-10.0, None, False)],
)
async def test_what_nobody_took_for_long_with_a_send_open(
    ended_ago: float, outcome: str | None, taken: bool, database_url: str, database: Database
) -> None:
    """I7: a reconciler settles doubt also while no worker runs, and takes nothing else from them."""
    insert(
        database_url,
        state=State.RUNNING,
        leased=Leased(expires_in=-ended_ago),
        attempts=[Sent(outcome=outcome)],
    )
    insert(database_url)
    rows = await claim(database, abandoned_seconds=30.0)
    assert len(rows) == (1 if taken else 0)
