"""What operators do to live operations: every act and its audit row in the same commit (PROTOCOL.md R6, R8).

An act locks the operation's `work` row, so what it is judged by is read by later statements and cannot change
under it. It fences out whoever holds the lease: the generation rises, the lease is cleared, and a look-up or
a send that is under way records nothing any more (a send's answer stays welcome as late evidence, R7).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.identity import Direction, OperationId
from app.domain.lifecycle import Actor, State
from app.domain.outcome import FindingKind, JsonObject
from app.storage.database import Statement, Transaction
from app.storage.leases import Locked, as_locked
from app.storage.tables import Uuid, findings, operator_actions, work

_bucket = sa.bindparam("bucket", type_=sa.SmallInteger())
_operation = sa.bindparam("operation_id", type_=Uuid)
_this_work = sa.and_(work.c.bucket == _bucket, work.c.operation_id == _operation)


def _this(operation: OperationId) -> dict[str, object]:
    return {"bucket": operation.bucket, "operation_id": operation.uuid}


_tenant = sa.bindparam("tenant", type_=sa.Text())
_LOCK = Statement(
    "resolution.lock",
    sa.select(work, sa.func.now().label("now"))
    .where(_this_work, sa.or_(_tenant.is_(None), work.c.tenant == _tenant))
    .with_for_update(),
)


async def lock_of_tenant(
    tx: Transaction, operation: OperationId, tenant: str | None
) -> Locked | None:
    """Lock one live operation of a tenant (None: of any), whoever holds its lease; None: there is none."""
    rows = await tx.fetch(_LOCK, tenant=tenant, **_this(operation))
    return as_locked(rows[0]) if rows else None


@dataclass(frozen=True, slots=True)
class Act:
    """Who did what, why, on what evidence. `id` and `key_digest` are the caller's, so a repeat is known."""

    id: UUID
    action: str
    by: str
    reason: str
    key_digest: bytes
    evidence: str | None = None
    step: str | None = None
    item: int | None = None
    direction: Direction | None = None
    meaning: bytes | None = None
    """SHA-256 of the whole request: the same key with another one is a mismatch."""


@dataclass(frozen=True, slots=True)
class DoneAct:
    """An act that stands."""

    action: str
    meaning: str | None
    at: datetime


_FIND_ACT = Statement(
    "resolution.find_act",
    sa.select(operator_actions.c.action, operator_actions.c.detail, operator_actions.c.at).where(
        operator_actions.c.bucket == _bucket,
        operator_actions.c.operation_id == _operation,
        operator_actions.c.key_digest == sa.bindparam("key_digest", type_=sa.LargeBinary()),
    ),
)
_ADD_ACT = Statement(
    "resolution.add_act",
    pg.insert(operator_actions).values(
        bucket=_bucket,
        operation_id=_operation,
        id=sa.bindparam("id", type_=Uuid),
        action=sa.bindparam("action", type_=sa.Text()),
        by=sa.bindparam("by", type_=sa.Text()),
        at=sa.func.now(),
        key_digest=sa.bindparam("key_digest", type_=sa.LargeBinary()),
        step=sa.bindparam("step", type_=sa.Text()),
        item=sa.bindparam("item", type_=sa.Integer()),
        direction=sa.bindparam("direction", type_=sa.Text()),
        reason=sa.bindparam("reason", type_=sa.Text()),
        evidence=sa.bindparam("evidence", type_=sa.Text()),
        detail=sa.cast(sa.bindparam("detail", type_=sa.Text()), pg.JSONB),
    ),
)


async def find_act(tx: Transaction, operation: OperationId, key_digest: bytes) -> DoneAct | None:
    """The act done under this key on this operation, or None."""
    rows = await tx.fetch(_FIND_ACT, key_digest=key_digest, **_this(operation))
    if not rows:
        return None
    detail = rows[0]["detail"] or {}
    return DoneAct(rows[0]["action"], detail.get("meaning"), rows[0]["at"])


async def add_act(tx: Transaction, operation: OperationId, act: Act) -> None:
    """Write the audit row."""
    detail = {} if act.meaning is None else {"meaning": act.meaning.hex()}
    await tx.execute(
        _ADD_ACT,
        id=act.id,
        action=act.action,
        by=act.by,
        key_digest=act.key_digest,
        step=act.step,
        item=act.item,
        direction=None if act.direction is None else act.direction.value,
        reason=act.reason,
        evidence=act.evidence,
        detail=orjson.dumps(detail).decode(),
        **_this(operation),
    )


_ADD_EVIDENCE = Statement(
    "resolution.add_evidence",
    pg.insert(findings).values(
        bucket=_bucket,
        operation_id=_operation,
        id=sa.bindparam("id", type_=Uuid),
        step=sa.bindparam("step", type_=sa.Text()),
        item=sa.bindparam("item", type_=sa.Integer()),
        direction=sa.bindparam("direction", type_=sa.Text()),
        source="operator",
        asked_at=sa.func.now(),
        kind=sa.bindparam("kind", type_=sa.Text()),
        found_at=sa.func.now(),
        code=sa.bindparam("code", type_=sa.Text()),
        detail=sa.bindparam("detail", type_=sa.Text()),
        provider_reference=sa.bindparam("reference", type_=sa.Text()),
        result=sa.bindparam("result", type_=sa.LargeBinary()),
    ),
)


async def add_evidence(
    tx: Transaction,
    operation: OperationId,
    act: Act,
    *,
    kind: FindingKind,
    reference: str | None,
    result: JsonObject | None,
) -> None:
    """What an operator found out about a step, as a finding. The act's id is the finding's."""
    await tx.execute(
        _ADD_EVIDENCE,
        id=act.id,
        step=act.step,
        item=act.item,
        direction=(act.direction or Direction.FORWARD).value,
        kind=kind.value,
        code="rejected-by-operator" if kind is FindingKind.REFUSED else None,
        detail=act.evidence,
        reference=reference,
        result=None if result is None else orjson.dumps(dict(result)),
        **_this(operation),
    )


_GO_ON = Statement(
    "resolution.go_on",
    sa.update(work)
    .values(
        state=sa.bindparam("new_state", type_=sa.Text()),
        actor=sa.bindparam("new_actor", type_=sa.Text()),
        attention=sa.bindparam("new_attention", type_=sa.Text()),
        due_at=sa.func.now(),
        lease_owner_token=sa.null(),
        lease_expires_at=sa.null(),
        lease_generation=work.c.lease_generation + 1,
        claims=0,
        retried_at=sa.case(
            (sa.bindparam("restarts_horizon", type_=sa.Boolean()), sa.func.now()),
            else_=work.c.retried_at,
        ),
        version=work.c.version + 1,
        changed_at=sa.func.now(),
    )
    .where(_this_work),
)


async def go_on(
    tx: Transaction,
    operation: OperationId,
    *,
    state: State,
    actor: Actor,
    attention: str | None,
    restarts_horizon: bool,
) -> None:
    """Let a locked operation go on in `state`, due now, whoever held its lease fenced out."""
    await tx.execute(
        _GO_ON,
        new_state=state.value,
        new_actor=actor.value,
        new_attention=attention,
        restarts_horizon=restarts_horizon,
        **_this(operation),
    )
