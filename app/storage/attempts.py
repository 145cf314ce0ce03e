"""Attempts: record the answer of a send, once, under the fence.

An answer whose lease is lost goes through `add_late_answers` (PROTOCOL.md R7), the one write about an
operation that needs no lease: it inserts evidence and changes no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.identity import OperationId
from app.domain.operation import Lease
from app.domain.outcome import (
    NotApplied,
    Outcome,
    Succeeded,
    Unknown,
    finding_kind_of_late,
    kind_of,
)
from app.storage.database import Kind, Statement, Transaction, arrays, batch
from app.storage.leases import Locked, held_by, holds, lease_arrays, lease_batch
from app.storage.tables import Uuid, attempts, findings, work


@dataclass(frozen=True, slots=True)
class Answer:
    """What one attempt was answered; texts are already storable and bounded."""

    lease: Lease
    attempt_id: UUID
    outcome: Outcome


_answer_columns: dict[str, Kind] = {
    "attempt_id": Uuid,
    "outcome": sa.Text(),
    "code": sa.Text(),
    "detail": sa.Text(),
    "final": sa.Boolean(),
    "burned": sa.Boolean(),
    "provider_request_id": sa.Text(),
    "provider_reference": sa.Text(),
    "result": sa.LargeBinary(),
}
_answer = lease_batch("a", **_answer_columns)
_RECORD = Statement(
    "attempts.record",
    sa.update(attempts)
    .values(
        recorded_at=sa.func.now(),
        **{name: _answer.c[name] for name in _answer_columns if name != "attempt_id"},
    )
    .where(
        held_by(_answer),
        attempts.c.bucket == _answer.c.bucket,
        attempts.c.operation_id == _answer.c.operation_id,
        attempts.c.id == _answer.c.attempt_id,
        attempts.c.outcome.is_(None),
    ),
)


async def record(
    tx: Transaction, answers: Sequence[Answer], locked: Mapping[OperationId, Locked]
) -> None:
    """Write the outcome of each attempt whose operation `locked` holds; an outcome once set stays."""
    answers = [answer for answer in answers if holds(locked, answer.lease)]
    if answers:
        await tx.execute(
            _RECORD,
            **lease_arrays("a", [answer.lease for answer in answers], _outcome_arrays(answers)),
        )


def _outcome_arrays(answers: Sequence[Answer]) -> dict[str, list[object]]:
    outcomes = [answer.outcome for answer in answers]
    return {
        "attempt_id": [answer.attempt_id for answer in answers],
        "outcome": [kind_of(outcome).value for outcome in outcomes],
        "code": [None if isinstance(o, Succeeded) else o.code for o in outcomes],
        "detail": [None if isinstance(o, Succeeded) else o.detail for o in outcomes],
        "final": [isinstance(o, NotApplied) and o.final for o in outcomes],
        "burned": [isinstance(o, Unknown) and o.burned for o in outcomes],
        "provider_request_id": [o.provider_request_id for o in outcomes],
        "provider_reference": [o.reference if isinstance(o, Succeeded) else None for o in outcomes],
        "result": [
            orjson.dumps(o.result) if isinstance(o, Succeeded) and o.result is not None else None
            for o in outcomes
        ],
    }


_recorded = batch("a", bucket=sa.SmallInteger(), operation_id=Uuid, attempt_id=Uuid)
_RECORDED_BEFORE = Statement(
    "attempts.recorded_before",
    sa.select(attempts.c.id, attempts.c.outcome).where(
        attempts.c.bucket == _recorded.c.bucket,
        attempts.c.operation_id == _recorded.c.operation_id,
        attempts.c.id == _recorded.c.attempt_id,
        attempts.c.outcome.is_not(None),
    ),
)


async def recorded_before(tx: Transaction, answers: Sequence[Answer]) -> set[UUID]:
    """Which of these answers already stand, with the same outcome: not a lost lease but a repeat (R17)."""
    if not answers:
        return set()
    rows = await tx.fetch(
        _RECORDED_BEFORE,
        **arrays(
            "a",
            {
                "bucket": [answer.lease.operation.bucket for answer in answers],
                "operation_id": [answer.lease.operation.uuid for answer in answers],
                "attempt_id": [answer.attempt_id for answer in answers],
            },
        ),
    )
    standing = {row["id"]: row["outcome"] for row in rows}
    return {
        answer.attempt_id
        for answer in answers
        if standing.get(answer.attempt_id) == kind_of(answer.outcome).value
    }


_any_work = batch("o", bucket=sa.SmallInteger(), operation_id=Uuid)
_LOCK_ANY = Statement(
    "attempts.lock_any",
    sa.select(work.c.bucket, work.c.operation_id)
    .join(
        _any_work,
        sa.and_(
            work.c.bucket == _any_work.c.bucket, work.c.operation_id == _any_work.c.operation_id
        ),
    )
    .order_by(work.c.bucket, work.c.operation_id)
    .with_for_update(of=work),
)
_late = batch(
    "a",
    bucket=sa.SmallInteger(),
    operation_id=Uuid,
    finding_id=Uuid,
    kind=sa.Text(),
    **_answer_columns,
)
_INSERT_LATE = Statement(
    "attempts.insert_late",
    pg.insert(findings)
    .from_select(
        [
            "bucket",
            "operation_id",
            "id",
            "step",
            "item",
            "direction",
            "source",
            "generation",
            "asked_at",
            "kind",
            "found_at",
            "attempt_id",
            "attempt_outcome",
            "code",
            "detail",
            "final",
            "provider_reference",
            "result",
        ],
        sa.select(
            attempts.c.bucket,
            attempts.c.operation_id,
            _late.c.finding_id,
            attempts.c.step,
            attempts.c.item,
            attempts.c.direction,
            sa.literal("late_answer"),
            attempts.c.generation,
            attempts.c.began_at,
            _late.c.kind,
            sa.func.now(),
            attempts.c.id,
            _late.c.outcome,
            _late.c.code,
            _late.c.detail,
            _late.c.final,
            _late.c.provider_reference,
            _late.c.result,
        ).select_from(
            sa.join(
                _late,
                attempts,
                sa.and_(
                    attempts.c.bucket == _late.c.bucket,
                    attempts.c.operation_id == _late.c.operation_id,
                    attempts.c.id == _late.c.attempt_id,
                ),
            )
        ),
    )
    .on_conflict_do_nothing()
    .returning(findings.c.operation_id),
)
_WAKE = Statement(
    "attempts.wake",
    sa.update(work)
    .values(
        due_at=sa.func.least(work.c.due_at, sa.func.now()),
    )
    .where(work.c.bucket == _any_work.c.bucket, work.c.operation_id == _any_work.c.operation_id),
)


async def add_late_answers(
    tx: Transaction, late: Sequence[tuple[UUID, Answer]]
) -> set[OperationId]:
    """Store answers whose lease is lost as findings, each at most once (R7); changes no state.

    `late` pairs a finding id, made by the caller, with the answer. Locks the `work` rows that still exist
    and makes them due, so that the next owner or the reconciler acts on the evidence. Returns the
    operations for which a finding was new.
    """
    late = sorted(late, key=lambda pair: (pair[1].lease.operation.bucket, pair[1].lease.operation))
    keys: dict[str, list[object]] = {
        "bucket": [answer.lease.operation.bucket for _, answer in late],
        "operation_id": [answer.lease.operation.uuid for _, answer in late],
    }
    await tx.fetch(_LOCK_ANY, **arrays("o", keys))
    rows = await tx.fetch(
        _INSERT_LATE,
        **arrays(
            "a",
            {
                **keys,
                "finding_id": [finding_id for finding_id, _ in late],
                "kind": [finding_kind_of_late(answer.outcome).value for _, answer in late],
                **_outcome_arrays([answer for _, answer in late]),
            },
        ),
    )
    await tx.execute(_WAKE, **arrays("o", keys))
    return {OperationId(row["operation_id"]) for row in rows}
