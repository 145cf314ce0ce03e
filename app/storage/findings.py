"""Findings: what look-ups told, and the history every decision is derived from.

A look-up's row is committed, with the database's time, before its first byte leaves: that time is what R4
compares with the attempts' `settled_at`. A row without `kind` is a look-up that never came back; it is no
evidence and no reader counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.identity import Direction, DownstreamKey, OperationId
from app.domain.operation import History, Lease, StepRecord
from app.domain.outcome import (
    Applied,
    AttemptRecord,
    Finding,
    FindingKind,
    FindingRecord,
    OutcomeKind,
    Refused,
    Unavailable,
    finding_kind_of,
)
from app.domain.plan import EffectRequest
from app.storage.database import Row, Statement, Transaction, arrays, batch
from app.storage.leases import Locked, held_by, holds, lease_arrays, lease_batch
from app.storage.steps import STEP_KEY
from app.storage.tables import Uuid, attempts, findings, steps, work


@dataclass(frozen=True, slots=True)
class LookUp:
    """One look-up to begin; `finding_id` is made by the caller (R17)."""

    lease: Lease
    finding_id: UUID
    step: str
    item: int
    direction: Direction


_ask = lease_batch("f", finding_id=Uuid, **STEP_KEY)
_ASK = Statement(
    "findings.ask",
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
        ],
        sa.select(
            work.c.bucket,
            work.c.operation_id,
            _ask.c.finding_id,
            _ask.c.step,
            _ask.c.item,
            _ask.c.direction,
            sa.literal("lookup"),
            work.c.lease_generation,
            sa.func.now(),
        ).select_from(sa.join(_ask, work, held_by(_ask))),
    )
    .on_conflict_do_nothing(index_elements=["bucket", "operation_id", "id"]),
)


async def ask(
    tx: Transaction, items: Sequence[LookUp], locked: Mapping[OperationId, Locked]
) -> None:
    """Write down that a look-up begins now, for operations that `locked` (unexpired) holds."""
    items = [item for item in items if holds(locked, item.lease)]
    if items:
        await tx.execute(
            _ASK,
            **lease_arrays(
                "f",
                [item.lease for item in items],
                {
                    "finding_id": [item.finding_id for item in items],
                    "step": [item.step for item in items],
                    "item": [item.item for item in items],
                    "direction": [item.direction.value for item in items],
                },
            ),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What one look-up told; texts are already storable and bounded."""

    lease: Lease
    finding_id: UUID
    finding: Finding


_found = lease_batch(
    "f",
    finding_id=Uuid,
    kind=sa.Text(),
    code=sa.Text(),
    detail=sa.Text(),
    provider_reference=sa.Text(),
    result=sa.LargeBinary(),
)
_FIND = Statement(
    "findings.find",
    sa.update(findings)
    .values(
        kind=_found.c.kind,
        found_at=sa.func.now(),
        code=_found.c.code,
        detail=_found.c.detail,
        provider_reference=_found.c.provider_reference,
        result=_found.c.result,
    )
    .where(
        held_by(_found),
        findings.c.bucket == _found.c.bucket,
        findings.c.operation_id == _found.c.operation_id,
        findings.c.id == _found.c.finding_id,
        findings.c.kind.is_(None),
    ),
)


async def find(
    tx: Transaction, items: Sequence[Found], locked: Mapping[OperationId, Locked]
) -> None:
    """Write what each look-up told, once, for operations that `locked` holds."""
    items = [item for item in items if holds(locked, item.lease)]
    if not items:
        return
    told = [item.finding for item in items]
    await tx.execute(
        _FIND,
        **lease_arrays(
            "f",
            [item.lease for item in items],
            {
                "finding_id": [item.finding_id for item in items],
                "kind": [finding_kind_of(finding).value for finding in told],
                "code": [f.code if isinstance(f, (Refused, Unavailable)) else None for f in told],
                "detail": [
                    f.detail if isinstance(f, (Refused, Unavailable)) else None for f in told
                ],
                "provider_reference": [
                    f.reference if isinstance(f, Applied) else None for f in told
                ],
                "result": [
                    orjson.dumps(f.result)
                    if isinstance(f, Applied) and f.result is not None
                    else None
                    for f in told
                ],
            },
        ),
    )


_told = batch("f", bucket=sa.SmallInteger(), operation_id=Uuid, finding_id=Uuid)
_FOUND_BEFORE = Statement(
    "findings.found_before",
    sa.select(findings.c.id).where(
        findings.c.bucket == _told.c.bucket,
        findings.c.operation_id == _told.c.operation_id,
        findings.c.id == _told.c.finding_id,
        findings.c.kind.is_not(None),
    ),
)


async def found_before(tx: Transaction, items: Sequence[Found]) -> set[UUID]:
    """Which of these very findings stand already: not a lost lease but a repeat (R17)."""
    if not items:
        return set()
    rows = await tx.fetch(
        _FOUND_BEFORE,
        **arrays(
            "f",
            {
                "bucket": [item.lease.operation.bucket for item in items],
                "operation_id": [item.lease.operation.uuid for item in items],
                "finding_id": [item.finding_id for item in items],
            },
        ),
    )
    return {row["id"] for row in rows}


_wanted = batch("o", bucket=sa.SmallInteger(), operation_id=Uuid)


def _of_operations(name: str, table: sa.Table, *order: sa.ColumnElement[object]) -> Statement:
    return Statement(
        name,
        sa.select(table)
        .join(
            _wanted,
            sa.and_(
                table.c.bucket == _wanted.c.bucket,
                table.c.operation_id == _wanted.c.operation_id,
            ),
        )
        .order_by(*order),
    )


_STEPS_OF = _of_operations("findings.steps_of", steps, steps.c.first_began_at)
_ATTEMPTS_OF = _of_operations("findings.attempts_of", attempts, attempts.c.began_at, attempts.c.id)
_FINDINGS_OF = _of_operations("findings.findings_of", findings, findings.c.asked_at, findings.c.id)


async def history(tx: Transaction, operations: Sequence[OperationId]) -> dict[OperationId, History]:
    """All steps, attempts and findings of these operations; forward ones, oldest first."""
    if not operations:
        return {}
    wanted = arrays(
        "o",
        {
            "bucket": [operation.bucket for operation in operations],
            "operation_id": [operation.uuid for operation in operations],
        },
    )
    begun = _grouped(await tx.fetch(_STEPS_OF, **wanted))
    sent = _grouped(await tx.fetch(_ATTEMPTS_OF, **wanted))
    told = _grouped(await tx.fetch(_FINDINGS_OF, **wanted))
    return {
        operation: History(
            steps=tuple(map(_step_record, begun[operation.uuid])),
            attempts=tuple(map(_attempt_record, sent[operation.uuid])),
            findings=tuple(
                _finding_record(row) for row in told[operation.uuid] if row["kind"] is not None
            ),
        )
        for operation in operations
    }


def _grouped(rows: Sequence[Row]) -> defaultdict[UUID, list[Row]]:
    groups: defaultdict[UUID, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["operation_id"]].append(row)
    return groups


def _step_record(row: Row) -> StepRecord:
    return StepRecord(
        step=row["step"],
        item=row["item"],
        direction=Direction(row["direction"]),
        provider=row["provider"],
        key=DownstreamKey(row["downstream_key"]),
        key_ordinal=row["key_ordinal"],
        request=EffectRequest(
            method=row["request_method"],
            path=row["request_path"],
            body=row["request_body"],
            headers=tuple((name, value) for name, value in row["request_headers"]),
            lookup_reference=row["lookup_reference"],
        ),
        first_began_at=row["first_began_at"],
        resend_by=row["resend_by"],
    )


def _attempt_record(row: Row) -> AttemptRecord:
    return AttemptRecord(
        id=row["id"],
        step=row["step"],
        item=row["item"],
        generation=row["generation"],
        began_at=row["began_at"],
        send_by=row["send_by"],
        arrives_by=row["arrives_by"],
        settled_at=row["settled_at"],
        outcome=None if row["outcome"] is None else OutcomeKind(row["outcome"]),
        code=row["code"],
        detail=row["detail"],
        final=bool(row["final"]),
        burned=bool(row["burned"]),
        reference=row["provider_reference"],
        result=None if row["result"] is None else orjson.loads(row["result"]),
        key_ordinal=row["key_ordinal"],
    )


def _finding_record(row: Row) -> FindingRecord:
    outcome = row["attempt_outcome"]
    return FindingRecord(
        id=row["id"],
        step=row["step"],
        item=row["item"],
        source=row["source"],
        kind=FindingKind(row["kind"]),
        asked_at=row["asked_at"],
        found_at=row["found_at"],
        attempt_id=row["attempt_id"],
        attempt_outcome=None if outcome is None else OutcomeKind(outcome),
        code=row["code"],
        detail=row["detail"],
        final=bool(row["final"]),
        reference=row["provider_reference"],
        result=None if row["result"] is None else orjson.loads(row["result"]),
    )
