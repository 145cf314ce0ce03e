"""Steps: begin a send. The attempt's row is committed before the first byte leaves (DESIGN.md I4).

Ids are made by the caller, so a call repeated after an unknown COMMIT compares instead of writing twice
(PROTOCOL.md R17).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.course import Basis
from app.domain.identity import Direction, DownstreamKey, OperationId
from app.domain.lifecycle import State
from app.domain.operation import Lease
from app.domain.outcome import FindingKind, OutcomeKind
from app.domain.plan import EffectRequest
from app.storage.database import Kind, Statement, Transaction, looked_up, one_of, seconds
from app.storage.leases import Locked, held_by, holds, lease_arrays, lease_batch
from app.storage.tables import Uuid, attempts, findings, steps, work

PAYLOAD_FORMAT_PLAIN = 1


@dataclass(frozen=True, slots=True)
class Begin:
    """One send to begin. Durations come from the provider's profile and are in seconds.

    With `Basis.KEY`, `send_by` is cut to the step's resend deadline, and refused where nothing is left (R3).
    `resend_seconds` is None where the provider has no keys. `restarts_window`: nothing that was sent before
    can exist, so this is a first send again, and the resend deadline counts from it. With `fresh_key`, `key`
    and `key_ordinal` replace the burned ones (R18).
    """

    lease: Lease
    attempt_id: UUID
    step: str
    item: int
    direction: Direction
    provider: str
    key: DownstreamKey
    key_ordinal: int
    request: EffectRequest
    send_window_seconds: float
    in_transit_seconds: float
    lag_seconds: float
    resend_seconds: float | None
    basis: Basis = Basis.FIRST
    restarts_window: bool = False
    fresh_key: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """The attempt's row stands. The window is (began_at, send_by] by the database's clock."""

    attempt_id: UUID
    began_at: datetime
    send_by: datetime

    @property
    def window_seconds(self) -> float:
        """How long after the begin the last check may still pass."""
        return (self.send_by - self.began_at).total_seconds()


_step = lease_batch(
    "b",
    step=sa.Text(),
    item=sa.Integer(),
    direction=sa.Text(),
    provider=sa.Text(),
    downstream_key=sa.Text(),
    key_ordinal=sa.SmallInteger(),
    method=sa.Text(),
    path=sa.Text(),
    headers=sa.Text(),
    body=sa.LargeBinary(),
    lookup_reference=sa.Text(),
    resend_seconds=sa.Double(),
)
_INSERT_STEPS = Statement(
    "steps.insert",
    pg.insert(steps)
    .from_select(
        [
            "bucket",
            "operation_id",
            "step",
            "item",
            "direction",
            "provider",
            "downstream_key",
            "key_ordinal",
            "request_method",
            "request_path",
            "request_headers",
            "request_body",
            "payload_format",
            "lookup_reference",
            "first_began_at",
            "resend_by",
        ],
        sa.select(
            work.c.bucket,
            work.c.operation_id,
            _step.c.step,
            _step.c.item,
            _step.c.direction,
            _step.c.provider,
            _step.c.downstream_key,
            _step.c.key_ordinal,
            _step.c.method,
            _step.c.path,
            sa.cast(_step.c.headers, pg.JSONB),
            _step.c.body,
            sa.literal(PAYLOAD_FORMAT_PLAIN),
            _step.c.lookup_reference,
            sa.func.now(),
            sa.func.now() + seconds(_step.c.resend_seconds),
        ).select_from(sa.join(_step, work, held_by(_step))),
    )
    .on_conflict_do_nothing(index_elements=["bucket", "operation_id", "step", "item", "direction"]),
)

STEP_KEY: dict[str, Kind] = {"step": sa.Text(), "item": sa.Integer(), "direction": sa.Text()}


def same_step(table: sa.Table, item: sa.TableValuedAlias) -> sa.ColumnElement[bool]:
    return sa.and_(
        table.c.bucket == item.c.bucket,
        table.c.operation_id == item.c.operation_id,
        table.c.step == item.c.step,
        table.c.item == item.c.item,
        table.c.direction == item.c.direction,
    )


def _may_have_effect(sent: sa.FromClause) -> sa.ColumnElement[bool]:
    """Not known as not applied by its own record; a first send goes only where there is none."""
    return sa.or_(sent.c.outcome.is_(None), sent.c.outcome != OutcomeKind.NOT_APPLIED.value)


_fresh = lease_batch("b", **STEP_KEY, basis=sa.Text(), resend_seconds=sa.Double())
_RESTART_WINDOW = Statement(
    "steps.restart_window",
    sa.update(steps)
    .values(resend_by=sa.func.now() + seconds(_fresh.c.resend_seconds))
    .where(
        held_by(_fresh),
        same_step(steps, _fresh),
        # Evidence was judged under this lock; without it a window in doubt is never moved (R3).
        sa.or_(
            _fresh.c.basis == Basis.EVIDENCE.value,
            ~looked_up(same_step(attempts, _fresh), _may_have_effect(attempts)),
        ),
    ),
)

_rotated = lease_batch("b", **STEP_KEY, downstream_key=sa.Text(), key_ordinal=sa.SmallInteger())
_ROTATE_KEY = Statement(
    "steps.rotate_key",
    sa.update(steps)
    .values(
        burned_keys=sa.func.array_append(steps.c.burned_keys, steps.c.downstream_key),
        downstream_key=_rotated.c.downstream_key,
        key_ordinal=_rotated.c.key_ordinal,
    )
    .where(
        held_by(_rotated),
        same_step(steps, _rotated),
        steps.c.key_ordinal == _rotated.c.key_ordinal - 1,
    ),
)

_attempt = lease_batch(
    "b",
    **STEP_KEY,
    attempt_id=Uuid,
    send_window_seconds=sa.Double(),
    in_transit_seconds=sa.Double(),
    lag_seconds=sa.Double(),
    basis=sa.Text(),
)
_send_by = sa.func.least(
    sa.func.now() + seconds(_attempt.c.send_window_seconds),
    sa.case((_attempt.c.basis == Basis.KEY.value, steps.c.resend_by)),
)
_arrives_by = _send_by + seconds(_attempt.c.in_transit_seconds)
_other = attempts.alias("other")
_in_the_way = sa.exists().where(
    _other.c.bucket == _attempt.c.bucket,
    _other.c.operation_id == _attempt.c.operation_id,
    _other.c.step == _attempt.c.step,
    _other.c.item == _attempt.c.item,
    _other.c.direction == _attempt.c.direction,
    sa.or_(
        # A re-send goes on beside doubt, evidence was judged under this lock; a first send needs more.
        sa.and_(
            _attempt.c.basis == Basis.FIRST.value,
            _may_have_effect(_other),
        ),
        one_of(_other.c.outcome, (OutcomeKind.SUCCEEDED, OutcomeKind.REJECTED)),
    ),
)
_applied_is_known = sa.exists().where(
    same_step(findings, _attempt), findings.c.kind == FindingKind.APPLIED.value
)
_INSERT_ATTEMPTS = Statement(
    "steps.insert_attempts",
    pg.insert(attempts)
    .from_select(
        [
            "bucket",
            "operation_id",
            "id",
            "step",
            "item",
            "direction",
            "key_ordinal",
            "generation",
            "began_at",
            "send_by",
            "arrives_by",
            "settled_at",
        ],
        sa.select(
            work.c.bucket,
            work.c.operation_id,
            _attempt.c.attempt_id,
            _attempt.c.step,
            _attempt.c.item,
            _attempt.c.direction,
            steps.c.key_ordinal,
            work.c.lease_generation,
            sa.func.now(),
            _send_by,
            _arrives_by,
            _arrives_by + seconds(_attempt.c.lag_seconds),
        )
        .select_from(
            sa.join(_attempt, work, held_by(_attempt)).join(steps, same_step(steps, _attempt))
        )
        .where(~_in_the_way, ~_applied_is_known, _send_by > sa.func.now()),
    )
    .on_conflict_do_nothing(index_elements=["bucket", "operation_id", "id"])
    .returning(attempts.c.id, attempts.c.began_at, attempts.c.send_by),
)

_written = lease_batch("b", attempt_id=Uuid)
_BEGUN_BEFORE = Statement(
    "steps.begun_before",
    sa.select(attempts.c.id, attempts.c.began_at, attempts.c.send_by).where(
        held_by(_written),
        attempts.c.bucket == _written.c.bucket,
        attempts.c.operation_id == _written.c.operation_id,
        attempts.c.id == _written.c.attempt_id,
    ),
)

_shown = lease_batch("b")
_SHOW_RUNNING = Statement(
    "steps.show_running",
    sa.update(work)
    .values(
        state=State.RUNNING.value,
        version=work.c.version + 1,
        changed_at=sa.func.now(),
    )
    .where(held_by(_shown)),
)


async def begin(
    tx: Transaction, items: Sequence[Begin], locked: Mapping[OperationId, Locked]
) -> dict[UUID, Begun]:
    """Begin sends of operations that `locked` (of `leases.lock(unexpired=True)`) holds; by attempt id.

    Refused, and so not in the answer: an effect already known to exist, an attempt in the way, nothing left
    before the resend deadline (R3). Called again after an unknown COMMIT it finds its own rows (R17).
    """
    items = [item for item in items if holds(locked, item.lease)]
    if not items:
        return {}
    await tx.execute(_INSERT_STEPS, **_step_arrays(items))
    rotated = [item for item in items if item.fresh_key]
    if rotated:
        await tx.execute(
            _ROTATE_KEY,
            **lease_arrays(
                "b",
                [item.lease for item in rotated],
                {
                    **_step_key_arrays(rotated),
                    "downstream_key": [item.key.value for item in rotated],
                    "key_ordinal": [item.key_ordinal for item in rotated],
                },
            ),
        )
    fresh = [item for item in items if item.restarts_window and item.resend_seconds is not None]
    if fresh:
        await tx.execute(
            _RESTART_WINDOW,
            **lease_arrays(
                "b",
                [item.lease for item in fresh],
                {
                    **_step_key_arrays(fresh),
                    "basis": [item.basis.value for item in fresh],
                    "resend_seconds": [item.resend_seconds for item in fresh],
                },
            ),
        )
    begun = await _insert_attempts(tx, items)
    new = [item.lease for item in items if item.attempt_id in begun]
    if new:
        await tx.execute(_SHOW_RUNNING, **lease_arrays("b", new))
    missing = [item for item in items if item.attempt_id not in begun]
    return begun | await begun_before(tx, missing)


async def _insert_attempts(tx: Transaction, items: Sequence[Begin]) -> dict[UUID, Begun]:
    rows = await tx.fetch(
        _INSERT_ATTEMPTS,
        **lease_arrays(
            "b",
            [item.lease for item in items],
            {
                **_step_key_arrays(items),
                "attempt_id": [item.attempt_id for item in items],
                "send_window_seconds": [item.send_window_seconds for item in items],
                "in_transit_seconds": [item.in_transit_seconds for item in items],
                "lag_seconds": [item.lag_seconds for item in items],
                "basis": [item.basis.value for item in items],
            },
        ),
    )
    return {row["id"]: Begun(row["id"], row["began_at"], row["send_by"]) for row in rows}


async def begun_before(tx: Transaction, items: Sequence[Begin]) -> dict[UUID, Begun]:
    """Those of these very attempts that stand already, under leases that still hold (R17); by id."""
    if not items:
        return {}
    rows = await tx.fetch(
        _BEGUN_BEFORE,
        **lease_arrays(
            "b",
            [item.lease for item in items],
            {"attempt_id": [item.attempt_id for item in items]},
        ),
    )
    return {row["id"]: Begun(row["id"], row["began_at"], row["send_by"]) for row in rows}


def _step_key_arrays(items: Sequence[Begin]) -> dict[str, list[object]]:
    return {
        "step": [item.step for item in items],
        "item": [item.item for item in items],
        "direction": [item.direction.value for item in items],
    }


def _step_arrays(items: Sequence[Begin]) -> dict[str, object]:
    return lease_arrays(
        "b",
        [item.lease for item in items],
        {
            **_step_key_arrays(items),
            "provider": [item.provider for item in items],
            "downstream_key": [item.key.value for item in items],
            "key_ordinal": [item.key_ordinal for item in items],
            "method": [item.request.method for item in items],
            "path": [item.request.path for item in items],
            "headers": [orjson.dumps(item.request.headers).decode() for item in items],
            "body": [item.request.body for item in items],
            "lookup_reference": [item.request.lookup_reference for item in items],
            "resend_seconds": [item.resend_seconds for item in items],
        },
    )
