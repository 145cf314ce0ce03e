"""R7: the answer to an attempt may always be inserted once, by anyone, and changes no state."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from app.domain.course import Basis
from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import State
from app.domain.operation import Lease, Trust
from app.domain.outcome import NotApplied, Outcome, Rejected, Succeeded, Unknown
from app.storage import attempts, findings, steps
from app.storage import leases as lease_verbs
from app.storage.attempts import Answer
from app.storage.database import Database
from tests.storage.verbs import begin_of
from tests.support.factories import STEP, Inserted, Leased, Sent, insert, query, snapshot
from tests.support.races import session, until_blocked

pytestmark = pytest.mark.anyio


def lost(id: OperationId) -> Lease:
    return Lease(id, uuid4(), 1, Trust(0))


async def add(database: Database, *answers: Answer) -> set[OperationId]:
    async with database.transaction() as tx:
        return await attempts.add_late_answers(tx, [(new_id(), answer) for answer in answers])


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Succeeded("ref", {"a": 1}), "applied"),
        (Rejected("declined", "No."), "refused"),
        (NotApplied("http-429"), "refused"),
        (NotApplied("invalid", final=True), "refused"),
        (Unknown("timeout", "Slow."), "unavailable"),
    ],
)
async def test_each_answer_is_kept_whole_and_once(
    outcome: Outcome, kind: str, database_url: str, database: Database
) -> None:
    sent = Sent(generation=1)
    row = insert(database_url, state=State.RUNNING, leased=Leased(generation=2), attempts=[sent])
    answer = Answer(lost(row.id), sent.id, outcome)
    assert await add(database, answer) == {row.id}
    assert await add(database, answer) == set(), "a second time changes nothing"
    assert await add(database, Answer(lost(row.id), sent.id, Unknown("other"))) == set()
    async with database.transaction() as tx:
        history = (await findings.history(tx, [row.id]))[row.id]
    [finding] = history.findings
    assert (finding.source, finding.kind, finding.attempt_id) == ("late_answer", kind, sent.id)
    assert finding.attempt_outcome is not None
    if isinstance(outcome, Succeeded):
        assert (finding.reference, finding.result) == ("ref", {"a": 1})
    else:
        assert (finding.code, finding.detail) == (outcome.code, outcome.detail)
    assert finding.final is (isinstance(outcome, NotApplied) and outcome.final)
    assert history.attempts[0].outcome is None, "the ledger row stays as its owner left it"


def _rested(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "due_at"}


@pytest.mark.parametrize("leased", [None, Leased(generation=2)], ids=["free", "leased"])
@pytest.mark.parametrize("state", [State.RUNNING, State.UNCERTAIN, State.NEEDS_ATTENTION], ids=str)
async def test_it_makes_the_operation_due_and_changes_no_state(
    state: State, leased: Leased | None, database_url: str, database: Database
) -> None:
    sent = Sent()
    row = insert(database_url, state=state, leased=leased, due_in=1000, attempts=[sent])
    [(before,)] = query(database_url, "SELECT to_jsonb(w) FROM work AS w")
    await add(database, Answer(lost(row.id), sent.id, Succeeded()))
    [(after, due)] = query(database_url, "SELECT to_jsonb(w), due_at <= now() FROM work AS w")
    assert due
    assert _rested(after) == _rested(before)


async def test_what_is_due_is_not_put_off(database_url: str, database: Database) -> None:
    sent = Sent()
    row = insert(database_url, state=State.RUNNING, due_in=-100, attempts=[sent])
    before = snapshot(database_url)["work"]
    await add(database, Answer(lost(row.id), sent.id, Succeeded()))
    assert snapshot(database_url)["work"] == before


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.CANCELLED])
async def test_on_a_done_operation(state: State, database_url: str, database: Database) -> None:
    """I8, CASES.md B28: kept beside the answer, which never changes."""
    sent = Sent()
    row = insert(database_url, state=state, attempts=[sent])
    before = snapshot(database_url)
    assert await add(database, Answer(lost(row.id), sent.id, Succeeded())) == {row.id}
    after = snapshot(database_url)
    assert len(after.pop("findings")) == 1
    assert before.pop("findings") == []
    assert after == before


async def test_an_attempt_nobody_began_is_no_evidence(
    database_url: str, database: Database
) -> None:
    row = insert(database_url, state=State.RUNNING)
    assert await add(database, Answer(lost(row.id), new_id(), Succeeded())) == set()
    assert query(database_url, "SELECT count(*) FROM findings") == [(0,)]


async def test_two_processes_with_the_same_answer(database_url: str, database: Database) -> None:
    """Unique by attempt, also while the other's is not committed yet; opposite orders do not deadlock."""
    sent = [Sent() for _ in range(10)]
    rows = [insert(database_url, state=State.RUNNING, attempts=[one]) for one in sent]
    answers = [
        Answer(lost(row.id), one.id, Succeeded()) for row, one in zip(rows, sent, strict=True)
    ]
    async with session(database_url, "two") as two:
        new, also_new = await asyncio.gather(add(database, *answers), add(two, *answers[::-1]))
    assert len(new) + len(also_new) == 10
    assert query(database_url, "SELECT count(*) FROM findings") == [(10,)]


async def test_it_waits_for_whoever_holds_the_row(database_url: str, database: Database) -> None:
    """R8: the work row is the mutex of this write too."""
    row = open_attempt(database_url)
    async with session(database_url, "two") as two, database.transaction() as tx:
        await lease_verbs.lock(tx, [row.held])
        [(attempt,)] = query(database_url, "SELECT id FROM attempts")
        adding = asyncio.create_task(add(two, Answer(lost(row.id), attempt, Succeeded())))
        await until_blocked(database_url)
        [(waiting,)] = query(
            database_url, "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        )
        assert "FOR UPDATE" in waiting, "it takes the row before it writes anything"
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)


def open_attempt(url: str) -> Inserted:
    return insert(url, state=State.RUNNING, leased=Leased(), attempts=[Sent()])


async def test_begin_refuses_while_the_effect_is_known(
    database_url: str, database: Database
) -> None:
    """R7's third sentence, on whatever strength the send would go."""
    row = open_attempt(database_url)
    [(attempt,)] = query(database_url, "SELECT id FROM attempts")
    await add(database, Answer(lost(row.id), attempt, Succeeded()))
    for basis in Basis:
        async with database.transaction() as tx:
            locked = await lease_verbs.lock(tx, [row.held], unexpired=True)
            item = begin_of(row.held, step=STEP, basis=basis)
            assert await steps.begin(tx, [item], locked) == {}
    assert query(database_url, "SELECT count(*) FROM attempts") == [(1,)]
