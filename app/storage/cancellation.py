"""Cancel: at once where nothing was begun, else a wish that the executor judges (PROTOCOL.md R10).

Judged under the operation's lock, by statements after the one that took it (R8): a begin that committed
first is seen, and none can commit in between.
"""

from __future__ import annotations

from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.identity import OperationId
from app.domain.lifecycle import Event, State, StopCause, sources
from app.domain.outcome import FindingKind, OutcomeKind
from app.storage.database import Statement, Transaction, arrays, batch, one_of, seconds
from app.storage.tables import Uuid, attempts, findings, operations, operator_actions, work

_one = batch("o", bucket=sa.SmallInteger(), operation_id=Uuid)
_this_work = sa.and_(work.c.bucket == _one.c.bucket, work.c.operation_id == _one.c.operation_id)
_LOCK_OF_TENANT = Statement(
    "cancellation.lock_of_tenant",
    sa.select(work.c.operation_id, work.c.state)
    .join(_one, _this_work)
    .where(work.c.tenant == sa.bindparam("tenant", type_=sa.Text()))
    .with_for_update(of=work),
)


def _concerns(table: sa.Table) -> sa.ColumnElement[bool]:
    return sa.and_(table.c.bucket == _one.c.bucket, table.c.operation_id == _one.c.operation_id)


# R10: no attempt was begun except ones known not to have been applied, and no step is done. Read by a
# statement after the lock (R8): an attempt committed before it is seen, and none can be begun meanwhile.
_nothing_begun = sa.and_(
    ~sa.exists().where(
        _concerns(attempts),
        sa.or_(attempts.c.outcome.is_(None), attempts.c.outcome != OutcomeKind.NOT_APPLIED.value),
    ),
    ~sa.exists().where(_concerns(findings), findings.c.kind == FindingKind.APPLIED.value),
)
_CANCEL_AT_ONCE = Statement(
    "cancellation.cancel_at_once",
    sa.update(operations)
    .values(
        state=State.CANCELLED.value,
        error=sa.bindparam("error", type_=sa.LargeBinary()),
        cancel_requested=sa.true(),
        version=work.c.version + 1,
        completed_at=sa.func.now(),
        idempotency_expires_at=sa.func.now() + seconds(operations.c.retention_seconds),
    )
    .where(
        _this_work,
        operations.c.bucket == _one.c.bucket,
        operations.c.id == _one.c.operation_id,
        operations.c.state.is_(None),
        one_of(work.c.state, sources(Event.STOP_AT_ONCE)),
        ~work.c.suspect,  # after a restore: what may have been sent is not known here (R16)
        _nothing_begun,
    )
    .returning(operations.c.id),
)
_DELETE_CANCELLED = Statement("cancellation.delete_cancelled", sa.delete(work).where(_this_work))
_NOTE_CANCEL = Statement(
    "cancellation.note_cancel",
    sa.update(work)
    .values(
        stop_cause=StopCause.CANCEL.value,
        due_at=sa.case(
            (work.c.lease_expires_at.is_(None), sa.func.least(work.c.due_at, sa.func.now())),
            else_=work.c.due_at,
        ),
        version=work.c.version + 1,
        changed_at=sa.func.now(),
    )
    .where(_this_work, work.c.stop_cause.is_(None)),
)
_ADD_ACTION = Statement(
    "cancellation.add_action",
    pg.insert(operator_actions)
    .from_select(
        ["bucket", "operation_id", "id", "action", "by", "at", "reason"],
        sa.select(
            _one.c.bucket,
            _one.c.operation_id,
            sa.bindparam("id", type_=Uuid),
            sa.bindparam("action", type_=sa.Text()),
            sa.bindparam("by", type_=sa.Text()),
            sa.func.now(),
            sa.bindparam("reason", type_=sa.Text()),
        ),
    )
    .on_conflict_do_nothing(index_elements=["bucket", "operation_id", "id"]),
)


async def cancel(
    tx: Transaction,
    operation: OperationId,
    *,
    tenant: str,
    action_id: UUID,
    by: str,
    reason: str | None,
    error: bytes,
) -> State | None:
    """Cancel at once where nothing was begun, else note the wish (CONTRACT.md 17, R10), with its audit row.

    Returns the state the operation has now, or None where it is not live (done, or not the tenant's): then
    nothing was changed. `error` is the JSON text a cancelled operation shows.
    """
    this = arrays("o", {"bucket": [operation.bucket], "operation_id": [operation.uuid]})
    rows = await tx.fetch(_LOCK_OF_TENANT, tenant=tenant, **this)
    if not rows:
        return None
    cancelled = await tx.fetch(_CANCEL_AT_ONCE, error=error, **this)
    if cancelled:
        await tx.execute(_DELETE_CANCELLED, **this)
    else:
        await tx.execute(_NOTE_CANCEL, **this)
    await tx.execute(_ADD_ACTION, id=action_id, action="cancel", by=by, reason=reason, **this)
    return State.CANCELLED if cancelled else State(rows[0]["state"])
