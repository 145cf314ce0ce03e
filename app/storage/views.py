"""What readers see: one operation, many, a page. Reads join `work`, which alone has a live state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.identity import Direction, OperationId, Scope
from app.domain.lifecycle import State, StopCause
from app.domain.operation import AttemptSummary, OperationView
from app.domain.outcome import FindingKind, OutcomeKind
from app.storage.database import Row, Statement, Transaction, arrays, batch
from app.storage.tables import Instant, Uuid, attempts, findings, operations, work

_state = sa.func.coalesce(operations.c.state, work.c.state)
_sent = (
    sa.select(
        sa.func.jsonb_agg(
            pg.aggregate_order_by(
                sa.func.jsonb_build_array(
                    attempts.c.step,
                    attempts.c.item,
                    attempts.c.direction,
                    attempts.c.outcome,
                    attempts.c.provider_reference,
                ),
                attempts.c.began_at,
                attempts.c.id,
            )
        )
    )
    .where(attempts.c.bucket == operations.c.bucket, attempts.c.operation_id == operations.c.id)
    .correlate(operations)
    .scalar_subquery()
)
_known_to_exist = (
    sa.select(
        sa.func.jsonb_object_agg(findings.c.step, findings.c.provider_reference).filter(
            findings.c.provider_reference.is_not(None)
        )
    )
    .where(
        findings.c.bucket == operations.c.bucket,
        findings.c.operation_id == operations.c.id,
        findings.c.kind == FindingKind.APPLIED.value,
        findings.c.direction == Direction.FORWARD.value,
    )
    .correlate(operations)
    .scalar_subquery()
)
_columns = (
    operations.c.id,
    operations.c.tenant,
    operations.c.type,
    operations.c.type_version,
    _state.label("state"),
    sa.func.coalesce(operations.c.version, work.c.version).label("version"),
    operations.c.created_at,
    sa.func.coalesce(operations.c.completed_at, work.c.changed_at).label("updated_at"),
    operations.c.completed_at,
    operations.c.idempotency_expires_at,
    operations.c.retention_seconds,
    operations.c.metadata,
    sa.func.coalesce(
        operations.c.cancel_requested, work.c.stop_cause == StopCause.CANCEL.value, sa.false()
    ).label("cancel_requested"),
    work.c.attention,
    operations.c.result,
    operations.c.error,
    operations.c.purged_at.is_not(None).label("purged"),
    _sent.label("sent"),
    _known_to_exist.label("known_to_exist"),
)
_live_part = sa.and_(work.c.bucket == operations.c.bucket, work.c.operation_id == operations.c.id)
_wanted = batch("o", bucket=sa.SmallInteger(), id=Uuid)
_is_wanted = sa.and_(operations.c.bucket == _wanted.c.bucket, operations.c.id == _wanted.c.id)
_READ = Statement(
    "views.read",
    sa.select(*_columns).select_from(
        sa.join(_wanted, operations, _is_wanted).outerjoin(work, _live_part)
    ),
)


async def read(tx: Transaction, ids: Sequence[OperationId]) -> dict[OperationId, OperationView]:
    """These operations, tombstones included, of whichever tenant; the caller compares the tenant."""
    if not ids:
        return {}
    rows = await tx.fetch(
        _READ, **arrays("o", {"bucket": [i.bucket for i in ids], "id": [i.uuid for i in ids]})
    )
    return {view.id: view for view in map(_view, rows)}


def _view(row: Row) -> OperationView:
    expires_at = row["idempotency_expires_at"]
    if expires_at is None:
        expires_at = row["created_at"] + timedelta(seconds=row["retention_seconds"])
    return OperationView(
        id=OperationId(row["id"]),
        tenant=row["tenant"],
        type=row["type"],
        type_version=row["type_version"],
        state=State(row["state"]),
        version=row["version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        completed_at=row["completed_at"],
        idempotency_expires_at=expires_at,
        metadata=row["metadata"] or {},
        cancel_requested=row["cancel_requested"],
        attention=row["attention"],
        result=row["result"],
        error=row["error"],
        purged=row["purged"],
        attempts=tuple(
            AttemptSummary(
                step, item, Direction(way), None if told is None else OutcomeKind(told), reference
            )
            for step, item, way, told, reference in row["sent"] or ()
        ),
        references=row["known_to_exist"] or {},
    )


_VERSIONS = Statement(
    "views.versions",
    sa.select(
        operations.c.id,
        sa.func.coalesce(operations.c.version, work.c.version).label("version"),
    ).select_from(sa.join(_wanted, operations, _is_wanted).outerjoin(work, _live_part)),
)


async def versions(tx: Transaction, ids: Sequence[OperationId]) -> dict[OperationId, int]:
    """The current version of each of these operations: all a waiting poll needs to look at."""
    if not ids:
        return {}
    rows = await tx.fetch(
        _VERSIONS, **arrays("o", {"bucket": [i.bucket for i in ids], "id": [i.uuid for i in ids]})
    )
    return {OperationId(row["id"]): row["version"] for row in rows}


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the list's total order, with the clock's full precision."""

    created_at: datetime
    id: UUID


@dataclass(frozen=True, slots=True)
class Filter:
    """What a list is narrowed to; None leaves a member out. `metadata` pairs must all match."""

    type: str | None = None
    state: State | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    metadata: tuple[tuple[str, str], ...] = ()


_type = sa.bindparam("type", type_=sa.Text())
_wanted_state = sa.bindparam("state", type_=sa.Text())
_after = sa.bindparam("created_after", type_=Instant)
_before = sa.bindparam("created_before", type_=Instant)
_at = sa.bindparam("position_at", type_=Instant)
_id = sa.bindparam("position_id", type_=Uuid)
_pairs = sa.bindparam("metadata", type_=sa.Text())
_PAGE = Statement(
    "views.page",
    sa.select(*_columns)
    .select_from(sa.outerjoin(operations, work, _live_part))
    .where(
        operations.c.tenant == sa.bindparam("tenant", type_=sa.Text()),
        sa.or_(_type.is_(None), operations.c.type == _type),
        sa.or_(_wanted_state.is_(None), _state == _wanted_state),
        sa.or_(_after.is_(None), operations.c.created_at > _after),
        sa.or_(_before.is_(None), operations.c.created_at < _before),
        sa.or_(_pairs.is_(None), operations.c.metadata.contains(sa.cast(_pairs, pg.JSONB))),
        sa.or_(
            _at.is_(None),
            sa.tuple_(operations.c.created_at, operations.c.id) < sa.tuple_(_at, _id),
        ),
    )
    .order_by(operations.c.created_at.desc(), operations.c.id.desc())
    .limit(sa.bindparam("limit", type_=sa.Integer())),
)


async def page(
    tx: Transaction,
    *,
    tenant: str,
    narrowed: Filter,
    after: Position | None,
    limit: int,
) -> list[OperationView]:
    """One page of a tenant's operations, newest first, by (created_at, id) (CONTRACT.md 15)."""
    rows = await tx.fetch(
        _PAGE,
        tenant=tenant,
        type=narrowed.type,
        state=narrowed.state and narrowed.state.value,
        created_after=narrowed.created_after,
        created_before=narrowed.created_before,
        metadata=_json_pairs(narrowed.metadata),
        position_at=after and after.created_at,
        position_id=after and after.id,
        limit=limit,
    )
    return [_view(row) for row in rows]


def _json_pairs(pairs: tuple[tuple[str, str], ...]) -> str | None:
    return orjson.dumps(dict(pairs)).decode() if pairs else None


_BY_SCOPE = Statement(
    "views.by_scope",
    sa.select(operations.c.id).where(
        operations.c.bucket == sa.bindparam("bucket", type_=sa.SmallInteger()),
        operations.c.tenant == sa.bindparam("tenant", type_=sa.Text()),
        operations.c.type == sa.bindparam("type", type_=sa.Text()),
        operations.c.key_digest == sa.bindparam("key_digest", type_=sa.LargeBinary()),
    ),
)


async def by_scope(tx: Transaction, scope: Scope) -> OperationId | None:
    """The operation or tombstone that holds a scope (look-up by key), or None."""
    rows = await tx.fetch(
        _BY_SCOPE,
        bucket=scope.bucket,
        tenant=scope.tenant,
        type=scope.type,
        key_digest=scope.key.digest,
    )
    return OperationId(rows[0]["id"]) if rows else None
