"""Record and finish: once, under the fence, and `work` goes last (DESIGN.md I8, PROTOCOL.md R14, R17)."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import pytest

from app.domain.lifecycle import State, StopCause
from app.domain.operation import Lease, Trust
from app.domain.outcome import NotApplied, Outcome, Rejected, Succeeded, Unknown
from app.storage import attempts, findings, leases, operations
from app.storage.attempts import Answer
from app.storage.database import Database
from app.storage.operations import Finish
from tests.support.factories import Leased, Sent, insert, query, snapshot, supersede

pytestmark = pytest.mark.anyio
RESULT = b'{"a": 1}'


async def finish(database: Database, *ends: Finish) -> int:
    async with database.transaction() as tx:
        return len(await operations.finish(tx, ends))


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.CANCELLED])
async def test_an_end_is_written_and_work_is_gone(
    state: State, database_url: str, database: Database
) -> None:
    row = insert(
        database_url,
        state=State.RUNNING,
        leased=Leased(generation=4),
        stop_cause=StopCause.CANCEL if state is State.CANCELLED else None,
    )
    result = RESULT if state is State.SUCCEEDED else None
    error = None if state is State.SUCCEEDED else b'{"code": "x"}'
    assert (
        await finish(database, Finish(row.held, state, result, 1 if result else None, error)) == 1
    )
    [stored] = query(
        database_url,
        "SELECT state, result, error, cancel_requested, finished_by_token, finished_by_generation,"
        " version, idempotency_expires_at - completed_at = interval '1 h', completed_at <= now()"
        " FROM operations",
    )
    assert stored == (
        state, result, error, state is State.CANCELLED, row.held.owner_token, 4, 2, True, True,
    )  # fmt: skip
    assert query(database_url, "SELECT count(*) FROM work") == [(0,)]


async def test_an_end_never_changes(database_url: str, database: Database) -> None:
    """I8: not even by the very lease that wrote it, nor by whoever put a work row back."""
    row = insert(database_url, state=State.RUNNING, leased=Leased())
    work = query(database_url, "SELECT work::text FROM work")[0][0]
    await finish(database, Finish(row.held, State.SUCCEEDED, RESULT, 1))
    before = snapshot(database_url)
    other = Finish(row.held, State.FAILED, error=b"{}")
    assert await finish(database, other) == 0
    assert snapshot(database_url) == before
    query(database_url, "INSERT INTO work SELECT (%s::work).*", work)
    await finish(database, other)
    assert snapshot(database_url)["operations"] == before["operations"]


async def test_whose_end_it_was(database_url: str, database: Database) -> None:
    """R17: token and generation say it; an older lease of the same operation is no finisher."""
    row = insert(database_url, state=State.RUNNING, leased=Leased(generation=4))
    old = Lease(row.id, uuid4(), 3, Trust(0))
    await finish(database, Finish(row.held, State.SUCCEEDED, RESULT, 1))
    other = insert(database_url, state=State.RUNNING, leased=Leased())
    async with database.transaction() as tx:
        asked = [old, row.held, other.held, replace(row.held, generation=5)]
        assert await operations.finished_before(tx, asked) == {row.held}
        assert await operations.finished_before(tx, []) == set()


async def test_the_lost_ones_of_a_batch_are_left_alone(
    database_url: str, database: Database
) -> None:
    rows = [insert(database_url, state=State.RUNNING, leased=Leased()) for _ in range(4)]
    supersede(database_url, rows[1].id)
    ends = [Finish(row.held, State.SUCCEEDED, RESULT, 1) for row in rows]
    assert await finish(database, *ends) == 3
    assert query(database_url, "SELECT operation_id FROM work") == [(rows[1].id.uuid,)]


async def test_a_transaction_that_fails_leaves_both_or_none(
    database_url: str, database: Database
) -> None:
    row = insert(database_url, state=State.RUNNING, leased=Leased())
    before = snapshot(database_url)

    async def die_before_commit() -> None:
        async with database.transaction() as tx:
            await operations.finish(tx, [Finish(row.held, State.SUCCEEDED, RESULT, 1)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await die_before_commit()
    assert snapshot(database_url) == before


@pytest.mark.parametrize(
    "outcome",
    [
        Succeeded("ref", {"a": [1, None, "é"]}, "req"),
        Succeeded(),
        Rejected("declined", "No.", "req"),
        NotApplied("http-429", final=False),
        NotApplied("invalid", "Bad.", final=True),
        Unknown("timeout"),
        Unknown("http-500", burned=True),
    ],
)
async def test_each_outcome_is_recorded_once(
    outcome: Outcome, database_url: str, database: Database
) -> None:
    sent = Sent()
    row = insert(database_url, state=State.RUNNING, leased=Leased(), attempts=[sent])
    answer = Answer(row.held, sent.id, outcome)
    async with database.transaction() as tx:
        assert await attempts.recorded_before(tx, [answer]) == set()
        locked = await leases.lock(tx, [row.held])
        await attempts.record(tx, [answer], locked)
        assert await attempts.recorded_before(tx, [answer]) == {sent.id}
        # Another answer is another outcome: it does not stand, and it replaces nothing.
        other = Unknown("x") if isinstance(outcome, Succeeded) else Succeeded("later")
        await attempts.record(tx, [Answer(row.held, sent.id, other)], locked)
        assert await attempts.recorded_before(tx, [Answer(row.held, sent.id, other)]) == set()
        [record] = (await findings.history(tx, [row.id]))[row.id].attempts
    if isinstance(outcome, Succeeded):
        assert (record.reference, record.result) == (outcome.reference, outcome.result)
    else:
        assert (record.code, record.detail) == (outcome.code, outcome.detail)
    assert record.final is (isinstance(outcome, NotApplied) and outcome.final)
    assert record.burned is (isinstance(outcome, Unknown) and outcome.burned)
    [(request_id, recorded)] = query(
        database_url, "SELECT provider_request_id, recorded_at <= now() FROM attempts"
    )
    assert (request_id, recorded) == (outcome.provider_request_id, True)
