"""Cancel: at once where nothing was begun, else noted; judged under the lock (PROTOCOL.md R10)."""

from __future__ import annotations

import pytest

from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import LIVE, TERMINAL, Ending, State, StopCause
from app.storage import cancellation
from app.storage.database import Database
from tests.support.factories import TENANT, Inserted, Leased, Sent, Told, insert, query, snapshot

pytestmark = pytest.mark.anyio
ERROR = b'{"code": "cancelled"}'


async def cancel(
    database: Database, id: OperationId, tenant: str = TENANT, reason: str | None = "why"
) -> State | None:
    async with database.transaction() as tx:
        return await cancellation.cancel(
            tx, id, tenant=tenant, action_id=new_id(), by="who", reason=reason, error=ERROR
        )


def live(url: str, state: State, **changes: object) -> Inserted:
    ending = Ending.FAILED if state is State.COMPENSATING else None
    return insert(url, state=state, ending=ending, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("leased", [None, Leased()], ids=["free", "leased"])
@pytest.mark.parametrize("state", LIVE)
async def test_with_nothing_begun(
    state: State, leased: Leased | None, database_url: str, database: Database
) -> None:
    """At once where the table says so; what is in doubt or going backwards is only noted."""
    at_once = state in (State.PENDING, State.RUNNING, State.WAITING, State.NEEDS_ATTENTION)
    row = live(
        database_url, state, leased=leased, due_in=1000, attempts=[Sent(outcome="not_applied")]
    )
    told = await cancel(database, row.id)
    if at_once:
        assert told is State.CANCELLED
        [stored] = query(
            database_url,
            "SELECT state, error, result, cancel_requested, finished_by_token, version,"
            " idempotency_expires_at - completed_at = interval '1 h' FROM operations",
        )
        assert stored == ("cancelled", ERROR, None, True, None, 2, True)
        assert query(database_url, "SELECT count(*) FROM work") == [(0,)]
    else:
        assert told is state
        [noted] = query(
            database_url, "SELECT state, stop_cause, version, due_at <= now() FROM work"
        )
        assert noted == (state, "cancel", 2, leased is None)
    assert query(database_url, "SELECT action, by, reason FROM operator_actions") == [
        ("cancel", "who", "why")
    ]


@pytest.mark.parametrize("outcome", [None, "unknown", "succeeded", "rejected"])
@pytest.mark.parametrize("state", LIVE)
async def test_with_something_begun(
    state: State, outcome: str | None, database_url: str, database: Database
) -> None:
    """Never at once: an attempt of one's own or of an earlier step may have had its effect."""
    row = live(
        database_url,
        state,
        due_in=1000,
        attempts=[Sent(outcome="not_applied"), Sent(outcome=outcome)],
    )
    assert await cancel(database, row.id) is state
    assert query(database_url, "SELECT state, stop_cause, due_at <= now(), version FROM work") == [
        (state, "cancel", True, 2)
    ]
    assert query(database_url, "SELECT state FROM operations") == [(None,)]


async def test_with_an_effect_that_only_a_look_up_knows(
    database_url: str, database: Database
) -> None:
    row = insert(
        database_url,
        state=State.RUNNING,
        attempts=[Sent(outcome="not_applied")],
        findings=[Told("applied")],
    )
    assert await cancel(database, row.id) is State.RUNNING


async def test_after_a_restore_nothing_is_known_not_to_have_begun(
    database_url: str, database: Database
) -> None:
    """R16: a suspect operation may have sent what the copy does not know."""
    row = insert(database_url, suspect=True)
    assert await cancel(database, row.id) is State.PENDING
    assert query(database_url, "SELECT stop_cause FROM work") == [("cancel",)]


async def test_a_second_time_changes_nothing_but_the_audit(
    database_url: str, database: Database
) -> None:
    row = insert(database_url, state=State.RUNNING, attempts=[Sent(outcome="succeeded")])
    assert await cancel(database, row.id) is State.RUNNING
    before = snapshot(database_url)
    assert await cancel(database, row.id, reason=None) is State.RUNNING
    after = snapshot(database_url)
    assert len(after.pop("operator_actions")) == 2
    before.pop("operator_actions")
    assert after == before


async def test_a_noted_deadline_stays_the_cause(database_url: str, database: Database) -> None:
    row = insert(
        database_url,
        state=State.RUNNING,
        stop_cause=StopCause.DEADLINE,
        attempts=[Sent(outcome="succeeded")],
    )
    await cancel(database, row.id)
    assert query(database_url, "SELECT stop_cause, version FROM work") == [("deadline", 1)]


@pytest.mark.parametrize("state", TERMINAL)
async def test_what_is_done_stays_as_it_is(
    state: State, database_url: str, database: Database
) -> None:
    row = insert(database_url, state=state)
    before = snapshot(database_url)
    assert await cancel(database, row.id) is None
    assert snapshot(database_url) == before


async def test_another_tenants_operation_is_not_there(
    database_url: str, database: Database
) -> None:
    row = insert(database_url)
    before = snapshot(database_url)
    assert await cancel(database, row.id, tenant="other") is None
    assert snapshot(database_url) == before
