"""Begin: the row before the first byte, its window, what stands in its way (PROTOCOL.md R1, R2, R3, R18)."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain.course import Basis
from app.domain.identity import DownstreamKey
from app.domain.lifecycle import State
from app.domain.operation import Lease
from app.domain.plan import EffectRequest
from app.storage import findings, leases, steps
from app.storage.database import Database
from app.storage.steps import Begun
from tests.storage.verbs import begin_of
from tests.support.factories import STEP, Leased, Sent, Told, insert, query

pytestmark = pytest.mark.anyio


async def begin(database: Database, lease: Lease, **changes: Any) -> Begun | None:
    item = begin_of(lease, **{"step": STEP, **changes})
    async with database.transaction() as tx:
        locked = await leases.lock(tx, [lease], unexpired=True)
        return (await steps.begin(tx, [item], locked)).get(item.attempt_id)


async def test_a_first_send(database_url: str, database: Database) -> None:
    """R1, R2, R3: every bound is written with the row, by the database's clock, from one `now()`."""
    row = insert(database_url, leased=Leased(generation=3))
    begun = await begin(database, row.held)
    assert begun is not None
    assert begun.window_seconds == 5.0
    [sent] = query(
        database_url,
        "SELECT a.send_by - a.began_at, a.arrives_by - a.send_by, a.settled_at - a.arrives_by,"
        " s.resend_by - a.began_at, s.first_began_at = a.began_at, a.generation, a.outcome, w.state,"
        " w.version FROM attempts AS a JOIN steps AS s USING (bucket, operation_id)"
        " JOIN work AS w USING (bucket, operation_id)",
    )
    assert [one.total_seconds() for one in sent[:4]] == [5, 5, 2, 60]
    assert sent[4:] == (True, 3, None, "running", 2)


async def test_the_request_is_stored_byte_for_byte(database_url: str, database: Database) -> None:
    """I10: what the first send fixed; a later one cannot change it."""
    row = insert(database_url, leased=Leased())
    request = EffectRequest("POST", "/é?x=%00", b"\x00\xff\n", (("X-A", "b"), ("X-A", "c")), "ref")
    assert await begin(database, row.held, request=request, key=DownstreamKey("mine"))
    query(database_url, "UPDATE attempts SET outcome = 'not_applied', recorded_at = now()")
    other = EffectRequest("PUT", "/other", b"other")
    assert await begin(
        database, row.held, request=other, key=DownstreamKey("other"), restarts_window=True
    )
    async with database.transaction() as tx:
        [step] = (await findings.history(tx, [row.id]))[row.id].steps
    assert (step.request, step.key) == (request, DownstreamKey("mine"))


@pytest.mark.parametrize(
    ("outcome", "first", "key", "evidence"),
    [
        (None, False, True, True),
        ("unknown", False, True, True),
        ("not_applied", True, True, True),
        ("succeeded", False, False, False),
        ("rejected", False, False, False),
    ],
)
async def test_what_stands_in_the_way(
    outcome: str | None,
    first: bool,
    key: bool,
    evidence: bool,
    database_url: str,
    database: Database,
) -> None:
    """A first send goes beside no doubt; nothing goes beside an effect or a refusal."""
    for basis, may in ((Basis.FIRST, first), (Basis.KEY, key), (Basis.EVIDENCE, evidence)):
        row = insert(
            database_url,
            state=State.RUNNING,
            leased=Leased(),
            attempts=[Sent(outcome="not_applied"), Sent(outcome=outcome)],
            resend_in=100,
        )
        assert (await begin(database, row.held, basis=basis) is not None) is may, basis


@pytest.mark.parametrize("source", ["lookup", "late_answer", "operator"])
async def test_a_known_effect_stands_in_the_way(
    source: str, database_url: str, database: Database
) -> None:
    sent = Sent()
    late = source == "late_answer"
    told = Told(
        "applied",
        source=source,
        attempt_id=sent.id if late else None,
        attempt_outcome="succeeded" if late else None,
    )
    row = insert(
        database_url,
        state=State.RUNNING,
        leased=Leased(),
        attempts=[sent],
        findings=[told],
        resend_in=100,
    )
    assert await begin(database, row.held, basis=Basis.KEY) is None


@pytest.mark.parametrize(
    ("resend_in", "window"), [(100.0, 5.0), (3.0, 3.0), (0.0, None), (-1.0, None)]
)
async def test_a_re_send_is_cut_to_the_resend_deadline(
    resend_in: float, window: float | None, database_url: str, database: Database
) -> None:
    """R3: `send_by <= resend_by`, refused where nothing is left."""
    row = insert(
        database_url,
        state=State.UNCERTAIN,
        leased=Leased(),
        attempts=[Sent(outcome="unknown")],
        resend_in=resend_in,
    )
    begun = await begin(database, row.held, basis=Basis.KEY)
    if window is None:
        assert begun is None
        assert query(database_url, "SELECT count(*), max(lease_generation) FROM work") == [(1, 1)]
        assert query(database_url, "SELECT count(*) FROM attempts") == [(1,)]
    else:
        assert begun is not None
        assert begun.window_seconds == pytest.approx(window, abs=0.5)
        assert begun.window_seconds <= window


async def test_a_re_send_does_not_move_the_deadline(database_url: str, database: Database) -> None:
    """R3, counterexample 4: it counts from the first send."""
    row = insert(
        database_url,
        state=State.UNCERTAIN,
        leased=Leased(),
        attempts=[Sent(outcome="unknown")],
        resend_in=100,
    )
    before = query(database_url, "SELECT resend_by FROM steps")
    assert await begin(database, row.held, basis=Basis.KEY)
    assert query(database_url, "SELECT resend_by FROM steps") == before


@pytest.mark.parametrize(
    ("outcome", "basis", "moves"),
    [
        ("not_applied", Basis.FIRST, True),
        ("unknown", Basis.EVIDENCE, True),
        ("unknown", Basis.FIRST, False),
        (None, Basis.FIRST, False),
    ],
)
async def test_when_the_window_starts_anew(
    outcome: str | None, basis: Basis, moves: bool, database_url: str, database: Database
) -> None:
    """R3: a send after evidence of absence is a new first send for the window, and only then."""
    row = insert(
        database_url,
        state=State.RUNNING,
        leased=Leased(),
        attempts=[Sent(outcome=outcome)],
        resend_in=1,
    )
    before = query(database_url, "SELECT resend_by FROM steps")
    begun = await begin(database, row.held, basis=basis, restarts_window=True)
    after = query(database_url, "SELECT resend_by FROM steps")
    assert (begun is not None) is moves
    assert (after != before) is moves


async def test_a_fresh_key_replaces_the_burned_one_once(
    database_url: str, database: Database
) -> None:
    """R18: the ordinal rises by one, the old key is kept; running again rotates no second time."""
    row = insert(
        database_url,
        state=State.RUNNING,
        leased=Leased(),
        attempts=[Sent(outcome="unknown", burned=True)],
    )
    [(old,)] = query(database_url, "SELECT downstream_key FROM steps")
    item = begin_of(
        row.held,
        step=STEP,
        key=DownstreamKey("fresh"),
        key_ordinal=1,
        fresh_key=True,
        basis=Basis.EVIDENCE,
        restarts_window=True,
    )
    for _ in range(2):
        async with database.transaction() as tx:
            locked = await leases.lock(tx, [row.held], unexpired=True)
            assert set(await steps.begin(tx, [item], locked)) == {item.attempt_id}
    assert query(database_url, "SELECT downstream_key, key_ordinal, burned_keys FROM steps") == [
        ("fresh", 1, [old])
    ]
    assert query(database_url, "SELECT key_ordinal FROM attempts ORDER BY began_at") == [(0,), (1,)]


async def test_running_again_begins_nothing_new(database_url: str, database: Database) -> None:
    """R17: known by the attempt's id: the same row, the same window, the same version."""
    row = insert(database_url, leased=Leased())
    item = begin_of(row.held)
    told = []
    for _ in range(3):
        async with database.transaction() as tx:
            locked = await leases.lock(tx, [row.held], unexpired=True)
            told.append(await steps.begin(tx, [item], locked))
    assert told[0] == told[1] == told[2] != {}
    assert query(database_url, "SELECT count(*) FROM attempts") == [(1,)]
    assert query(database_url, "SELECT version FROM work") == [(2,)]


async def test_a_refused_one_does_not_hold_up_its_neighbours(
    database_url: str, database: Database
) -> None:
    good = [insert(database_url, leased=Leased()) for _ in range(3)]
    bad = insert(
        database_url, state=State.RUNNING, leased=Leased(), attempts=[Sent(outcome="unknown")]
    )
    items = [begin_of(row.held, step=STEP) for row in (*good, bad)]
    async with database.transaction() as tx:
        locked = await leases.lock(tx, [item.lease for item in items], unexpired=True)
        begun = await steps.begin(tx, items, locked)
    assert set(begun) == {item.attempt_id for item in items[:3]}
