"""Operations: admit, tell who holds a scope, finish.

The insert decides who is first (CASES.md K8): `admit` inserts, and what it did not insert has a holder, found
by a *later* statement. A tombstone is the same row, stripped, so there is no gap in which a late retry could
slip through (DESIGN.md, 5). The terminal answer is written once, under the fence, and `work` is deleted last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.identity import Fingerprint, OperationId, Scope
from app.domain.lifecycle import Actor, State, StopCause
from app.domain.operation import Holder, Lease, NewOperation
from app.storage.database import Kind, Statement, Transaction, arrays, batch, seconds
from app.storage.leases import held_by, holds, lease_arrays, lease_batch, lock
from app.storage.steps import PAYLOAD_FORMAT_PLAIN
from app.storage.tables import (
    Instant,
    Uuid,
    installation,
    operations,
    work,
)

_new_columns: dict[str, Kind] = {
    "bucket": sa.SmallInteger(),
    "id": Uuid,
    "tenant": sa.Text(),
    "type": sa.Text(),
    "type_version": sa.Integer(),
    "key_digest": sa.LargeBinary(),
    "idempotency_key": sa.Text(),
    "fingerprint": sa.LargeBinary(),
    "fingerprint_version": sa.SmallInteger(),
    "input": sa.LargeBinary(),
    "metadata": sa.Text(),
    "semantic_headers": sa.Text(),
    "not_before": Instant,
    "deadline": Instant,
    "priority": sa.SmallInteger(),
    "retention_seconds": sa.Double(),
    "tombstone_seconds": sa.Double(),
}
_new = batch("n", **_new_columns)
_json_columns = ("metadata", "semantic_headers")
_admitted = (
    pg.insert(operations)
    .from_select(
        [*_new_columns, "payload_format", "created_at"],
        sa.select(
            *(
                sa.cast(_new.c[name], pg.JSONB) if name in _json_columns else _new.c[name]
                for name in _new_columns
            ),
            sa.literal(PAYLOAD_FORMAT_PLAIN),
            sa.func.now(),
        ).order_by(_new.c.bucket, _new.c.tenant, _new.c.type, _new.c.key_digest),
    )
    .on_conflict_do_nothing(index_elements=["bucket", "tenant", "type", "key_digest"])
    .returning(
        *(
            operations.c[name]
            for name in (
                "bucket",
                "id",
                "tenant",
                "type",
                "type_version",
                "priority",
                "created_at",
                "not_before",
                "deadline",
            )
        )
    )
    .cte("admitted")
)
# `work` comes from the insert's RETURNING and from nothing else: a repeat after an unknown COMMIT can never
# make a row for an operation that is already done (PROTOCOL.md, what a verb compares: admit).
_ADMIT = Statement(
    "operations.admit",
    pg.insert(work)
    .from_select(
        [
            "bucket",
            "operation_id",
            "tenant",
            "type",
            "type_version",
            "actor",
            "state",
            "priority",
            "due_at",
            "deadline",
            "lease_generation",
            "claims",
            "version",
            "changed_at",
            "epoch",
            "suspect",
        ],
        sa.select(
            _admitted.c.bucket,
            _admitted.c.id,
            _admitted.c.tenant,
            _admitted.c.type,
            _admitted.c.type_version,
            sa.literal(Actor.WORKER.value),
            sa.literal(State.PENDING.value),
            _admitted.c.priority,
            sa.func.least(
                sa.func.greatest(_admitted.c.not_before, sa.func.now()), _admitted.c.deadline
            ),
            _admitted.c.deadline,
            sa.literal(0, sa.BigInteger()),
            sa.literal(0),
            sa.literal(1, sa.BigInteger()),
            _admitted.c.created_at,
            installation.c.epoch,
            sa.false(),
        ).select_from(sa.join(_admitted, installation, sa.true())),
    )
    .returning(work.c.operation_id, work.c.changed_at),
)


async def admit(tx: Transaction, new: Sequence[NewOperation]) -> dict[OperationId, datetime]:
    """Insert those of `new` whose scope is free, in scope order; id to created_at of the inserted ones.

    Waits for a transaction in doubt that holds the same scope, and takes the scope if it rolls back. The
    ones not in the answer have a holder: read it with `holders`, in a later statement.
    """
    rows = await tx.fetch(
        _ADMIT,
        **arrays(
            "n",
            {
                "bucket": [item.id.bucket for item in new],
                "id": [item.id.uuid for item in new],
                "tenant": [item.tenant for item in new],
                "type": [item.type for item in new],
                "type_version": [item.type_version for item in new],
                "key_digest": [item.key.digest for item in new],
                "idempotency_key": [item.key.value for item in new],
                "fingerprint": [item.fingerprint.digest for item in new],
                "fingerprint_version": [item.fingerprint.version for item in new],
                "input": [item.input for item in new],
                "metadata": [orjson.dumps(item.metadata).decode() for item in new],
                "semantic_headers": [orjson.dumps(item.semantic_headers).decode() for item in new],
                "not_before": [item.not_before for item in new],
                "deadline": [item.deadline for item in new],
                "priority": [item.priority for item in new],
                "retention_seconds": [item.retention_seconds for item in new],
                "tombstone_seconds": [item.tombstone_seconds for item in new],
            },
        ),
    )
    return {OperationId(row["operation_id"]): row["changed_at"] for row in rows}


_scope_columns: dict[str, Kind] = {
    "bucket": sa.SmallInteger(),
    "tenant": sa.Text(),
    "type": sa.Text(),
    "key_digest": sa.LargeBinary(),
}
_scope = batch("s", **_scope_columns, n=sa.Integer())
_HOLDERS = Statement(
    "operations.holders",
    sa.select(
        _scope.c.n,
        operations.c.id,
        operations.c.type_version,
        operations.c.fingerprint,
        operations.c.fingerprint_version,
        sa.func.coalesce(operations.c.state, work.c.state, State.PENDING.value).label("state"),
        operations.c.purged_at.is_not(None).label("purged"),
    ).select_from(
        sa.join(
            _scope,
            operations,
            sa.and_(*(operations.c[name] == _scope.c[name] for name in _scope_columns)),
        ).outerjoin(
            work,
            sa.and_(work.c.bucket == operations.c.bucket, work.c.operation_id == operations.c.id),
        )
    ),
)


async def holders(tx: Transaction, scopes: Sequence[Scope]) -> list[Holder | None]:
    """Who holds each of these scopes, in their order; None where nobody does."""
    rows = await tx.fetch(
        _HOLDERS,
        **arrays(
            "s",
            {
                "bucket": [scope.bucket for scope in scopes],
                "tenant": [scope.tenant for scope in scopes],
                "type": [scope.type for scope in scopes],
                "key_digest": [scope.key.digest for scope in scopes],
                "n": list(range(len(scopes))),
            },
        ),
    )
    found: list[Holder | None] = [None] * len(scopes)
    for row in rows:
        found[row["n"]] = Holder(
            id=OperationId(row["id"]),
            type_version=row["type_version"],
            fingerprint=Fingerprint(row["fingerprint"], row["fingerprint_version"]),
            state=State(row["state"]),
            purged=row["purged"],
        )
    return found


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one operation: exactly one of `result` (succeeded) and `error`; both JSON texts."""

    lease: Lease
    state: State
    result: bytes | None = None
    result_version: int | None = None
    error: bytes | None = None


_end = lease_batch(
    "f",
    state=sa.Text(),
    result=sa.LargeBinary(),
    result_version=sa.SmallInteger(),
    error=sa.LargeBinary(),
)
_FINISH = Statement(
    "operations.finish",
    sa.update(operations)
    .values(
        state=_end.c.state,
        result=_end.c.result,
        result_version=_end.c.result_version,
        error=_end.c.error,
        cancel_requested=sa.func.coalesce(work.c.stop_cause == StopCause.CANCEL.value, sa.false()),
        finished_by_token=_end.c.owner_token,
        finished_by_generation=_end.c.generation,
        version=work.c.version + 1,
        completed_at=sa.func.now(),
        idempotency_expires_at=sa.func.now() + seconds(operations.c.retention_seconds),
    )
    .where(
        held_by(_end),
        operations.c.bucket == _end.c.bucket,
        operations.c.id == _end.c.operation_id,
        operations.c.state.is_(None),
    )
    .returning(operations.c.id),
)
_gone = lease_batch("f")
_DELETE_WORK = Statement("operations.delete_work", sa.delete(work).where(held_by(_gone)))


async def finish(tx: Transaction, finishes: Sequence[Finish]) -> set[OperationId]:
    """Write terminal answers and delete the `work` rows; the ones not returned were lost.

    Terminal answers are written once and never change (I8): a row that is already done is not touched.
    """
    locked = await lock(tx, [item.lease for item in finishes])
    held = [item for item in finishes if holds(locked, item.lease)]
    if not held:
        return set()
    leases = [item.lease for item in held]
    rows = await tx.fetch(
        _FINISH,
        **lease_arrays(
            "f",
            leases,
            {
                "state": [item.state.value for item in held],
                "result": [item.result for item in held],
                "result_version": [item.result_version for item in held],
                "error": [item.error for item in held],
            },
        ),
    )
    await tx.execute(_DELETE_WORK, **lease_arrays("f", leases))
    return {OperationId(row["id"]) for row in rows}


_finished = lease_batch("f")
_FINISHED_BEFORE = Statement(
    "operations.finished_before",
    sa.select(operations.c.id, operations.c.finished_by_generation).join(
        _finished,
        sa.and_(
            operations.c.bucket == _finished.c.bucket,
            operations.c.id == _finished.c.operation_id,
            operations.c.finished_by_token == _finished.c.owner_token,
            operations.c.finished_by_generation == _finished.c.generation,
        ),
    ),
)


async def finished_before(tx: Transaction, leases: Sequence[Lease]) -> set[Lease]:
    """Which of these very leases already finished their operation: not lost, but a repeat (R17)."""
    if not leases:
        return set()
    rows = await tx.fetch(_FINISHED_BEFORE, **lease_arrays("f", leases))
    done = {(row["id"], row["finished_by_generation"]) for row in rows}
    return {lease for lease in leases if (lease.operation.uuid, lease.generation) in done}
