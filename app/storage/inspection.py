"""What an operator looks at, across tenants: operations, whole ledgers, the server itself. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from app.domain.identity import Direction, OperationId
from app.domain.lifecycle import State
from app.domain.outcome import OutcomeKind
from app.storage.database import Statement, Transaction
from app.storage.tables import Uuid, attempts, operations, work

_bucket = sa.bindparam("bucket", type_=sa.SmallInteger())
_operation = sa.bindparam("operation_id", type_=Uuid)
_GENERATION = Statement(
    "inspection.generation",
    sa.select(
        sa.func.coalesce(work.c.lease_generation, operations.c.finished_by_generation, 0).label(
            "generation"
        )
    )
    .select_from(
        sa.outerjoin(
            operations,
            work,
            sa.and_(work.c.bucket == operations.c.bucket, work.c.operation_id == operations.c.id),
        )
    )
    .where(operations.c.bucket == _bucket, operations.c.id == _operation),
)


async def generation(tx: Transaction, operation: OperationId) -> int:
    """How often the operation was claimed so far; 0 where it never was, or does not exist.

    Once done: the claim that finished it. An operation that ended without a claim shows 0.
    """
    rows = await tx.fetch(_GENERATION, bucket=operation.bucket, operation_id=operation.uuid)
    return int(rows[0]["generation"]) if rows else 0


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One send as the attempt ledger holds it. `outcome` None: no answer was recorded (yet)."""

    id: UUID
    step: str
    item: int
    direction: Direction
    generation: int
    began_at: datetime
    send_by: datetime
    settled_at: datetime
    recorded_at: datetime | None
    outcome: OutcomeKind | None
    code: str | None
    detail: str | None
    provider_request_id: str | None
    provider_reference: str | None


_ledger_columns = (
    "id",
    "step",
    "item",
    "direction",
    "generation",
    "began_at",
    "send_by",
    "settled_at",
    "recorded_at",
    "outcome",
    "code",
    "detail",
    "provider_request_id",
    "provider_reference",
)
_LEDGER = Statement(
    "inspection.ledger",
    sa.select(*(attempts.c[name] for name in _ledger_columns))
    .where(attempts.c.bucket == _bucket, attempts.c.operation_id == _operation)
    .order_by(attempts.c.began_at, attempts.c.id),
)


async def ledger(tx: Transaction, operation: OperationId) -> list[LedgerEntry]:
    """Every attempt of one operation, oldest first."""
    rows = await tx.fetch(_LEDGER, bucket=operation.bucket, operation_id=operation.uuid)
    return [
        LedgerEntry(
            **{
                **row,
                "direction": Direction(row["direction"]),
                "outcome": None if row["outcome"] is None else OutcomeKind(row["outcome"]),
            }
        )
        for row in rows
    ]


_type = sa.bindparam("type", type_=sa.Text())
_state = sa.bindparam("state", type_=sa.Text())
_limit = sa.bindparam("limit", type_=sa.Integer())
# No index orders all tenants' operations by time. Ids do, within a bucket (UUIDv7), so the newest of every
# bucket are read from the primary key's end, and the newest of those are the answer.
_buckets = sa.func.generate_series(0, 255).table_valued("bucket").render_derived(name="b")
_newest_of_bucket = (
    sa.select(operations.c.id, operations.c.created_at)
    .where(
        operations.c.bucket == sa.cast(_buckets.c.bucket, sa.SmallInteger),
        sa.or_(_type.is_(None), operations.c.type == _type),
        sa.or_(_state.is_(None), operations.c.state == _state),
    )
    .order_by(operations.c.id.desc())
    .limit(_limit)
    .lateral("newest")
)
_NEWEST = Statement(
    "inspection.newest",
    sa.select(_newest_of_bucket.c.id)
    .select_from(sa.join(_buckets, _newest_of_bucket, sa.true()))
    .order_by(_newest_of_bucket.c.created_at.desc(), _newest_of_bucket.c.id.desc())
    .limit(_limit),
)
_NEWEST_LIVE = Statement(
    "inspection.newest_live",
    sa.select(operations.c.id)
    .select_from(
        sa.join(
            work,
            operations,
            sa.and_(work.c.bucket == operations.c.bucket, work.c.operation_id == operations.c.id),
        )
    )
    .where(work.c.state == _state, sa.or_(_type.is_(None), work.c.type == _type))
    .order_by(operations.c.created_at.desc(), operations.c.id.desc())
    .limit(_limit),
)


async def newest(
    tx: Transaction, *, type: str | None, state: State | None, live: bool, limit: int
) -> list[OperationId]:
    """The newest operations of all tenants, newest first. `live` says that `state` is a live one."""
    rows = await tx.fetch(
        _NEWEST_LIVE if live else _NEWEST,
        type=type,
        state=None if state is None else state.value,
        limit=limit,
    )
    return [OperationId(row["id"]) for row in rows]


@dataclass(frozen=True, slots=True)
class Server:
    """The PostgreSQL behind the address: its version (`180003` and `18.3`), its clock."""

    version_number: int
    version: str
    now: datetime


_SERVER = Statement(
    "inspection.server",
    sa.select(
        sa.cast(sa.func.current_setting("server_version_num"), sa.Integer()).label("number"),
        sa.func.current_setting("server_version").label("version"),
        sa.func.clock_timestamp().label("now"),
    ),
)


async def server(tx: Transaction) -> Server:
    """What the server says of itself; needs no schema."""
    row = (await tx.fetch(_SERVER))[0]
    return Server(row["number"], row["version"], row["now"])
