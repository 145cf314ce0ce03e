"""Leases: claim, renew, lock, release. The fence of every write (DESIGN.md I3, PROTOCOL.md R8, R17).

The `work` row is the operation's only mutex. A claim gives it a random owner token, drawn by the client for
this one claim call, a generation one higher than before, and an end by the database's clock. From then on
each verb of the owner first runs `lock`: one ordered `SELECT ... FOR UPDATE` over its batch that matches only
rows `held_by` the given leases; later statements of the same transaction read guards and write, each
repeating the fence. A row that does not come back from `lock` is lost: nothing is written for it.

Expiry alone takes nothing away: a lease ends when somebody else claims the row. `due_at` of a leased row is
the lease's end, so "due" is one comparison for free and expired rows alike, and a crash needs no sweeper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa

from app.domain.identity import OperationId
from app.domain.lifecycle import Actor, Ending, State, StopCause
from app.domain.operation import Lease
from app.storage.database import Kind, Row, Statement, Transaction, arrays, batch, one_of, seconds
from app.storage.tables import Uuid, work

_LEASE: dict[str, Kind] = {
    "bucket": sa.SmallInteger(),
    "operation_id": Uuid,
    "owner_token": Uuid,
    "generation": sa.BigInteger(),
}


def held_by(lease: sa.TableValuedAlias) -> sa.ColumnElement[bool]:
    """The one fence: the `work` row belongs to this operation, owner token and generation."""
    return sa.and_(
        work.c.bucket == lease.c.bucket,
        work.c.operation_id == lease.c.operation_id,
        work.c.lease_owner_token == lease.c.owner_token,
        work.c.lease_generation == lease.c.generation,
    )


def lease_batch(name: str, /, **columns: Kind) -> sa.TableValuedAlias:
    """A batch whose first columns are a lease's, for `held_by`."""
    return batch(name, **_LEASE, **columns)


def lease_arrays(
    name: str, leases: Sequence[Lease], columns: Mapping[str, Sequence[object]] | None = None
) -> dict[str, object]:
    """The parameters of a `lease_batch`."""
    return arrays(
        name,
        {
            "bucket": [lease.operation.bucket for lease in leases],
            "operation_id": [lease.operation.uuid for lease in leases],
            "owner_token": [lease.owner_token for lease in leases],
            "generation": [lease.generation for lease in leases],
            **(columns or {}),
        },
    )


@dataclass(frozen=True, slots=True)
class Locked:
    """One operation's `work` row, locked until the transaction ends; `now` is the database's clock."""

    operation: OperationId
    owner_token: UUID
    generation: int
    state: State
    actor: Actor
    ending: Ending | None
    stop_cause: StopCause | None
    attention: str | None
    deadline: datetime | None
    due_at: datetime
    uncertain_since: datetime | None
    version: int
    suspect: bool
    now: datetime


_lock = lease_batch("l")


def _lock_statement(name: str, *conditions: sa.ColumnElement[bool]) -> Statement:
    return Statement(
        name,
        sa.select(work, sa.func.now().label("now"))
        .join(_lock, held_by(_lock))
        .where(*conditions)
        .order_by(work.c.bucket, work.c.operation_id)
        .with_for_update(of=work),
    )


_LOCK = _lock_statement("leases.lock")
_LOCK_UNEXPIRED = _lock_statement("leases.lock_unexpired", work.c.lease_expires_at > sa.func.now())


async def lock(
    tx: Transaction, leases: Iterable[Lease], *, unexpired: bool = False
) -> dict[OperationId, Locked]:
    """Lock the rows these leases still hold, in (bucket, id) order; the lost ones do not come back.

    `unexpired` also demands that the lease has not ended: what begins something new needs that (R1).
    """
    held = sorted(leases, key=lambda lease: (lease.operation.bucket, lease.operation.uuid))
    if not held:
        return {}
    statement = _LOCK_UNEXPIRED if unexpired else _LOCK
    rows = await tx.fetch(statement, **lease_arrays("l", held))
    return {locked.operation: locked for locked in map(as_locked, rows)}


def holds(locked: Mapping[OperationId, Locked], lease: Lease) -> bool:
    """Whether `locked` has its row by this very lease; a batch may carry an older one of the row too."""
    row = locked.get(lease.operation)
    return row is not None and (row.owner_token, row.generation) == (
        lease.owner_token,
        lease.generation,
    )


def as_locked(row: Row) -> Locked:
    """A row of `work`, with the database's `now`, that the transaction holds a lock on."""
    return Locked(
        operation=OperationId(row["operation_id"]),
        owner_token=row["lease_owner_token"],
        generation=row["lease_generation"],
        state=State(row["state"]),
        actor=Actor(row["actor"]),
        ending=None if row["ending"] is None else Ending(row["ending"]),
        stop_cause=None if row["stop_cause"] is None else StopCause(row["stop_cause"]),
        attention=row["attention"],
        deadline=row["deadline"],
        due_at=row["due_at"],
        uncertain_since=row["uncertain_since"],
        version=row["version"],
        suspect=row["suspect"],
        now=row["now"],
    )


lease_end = sa.func.now() + seconds(sa.bindparam("lease_seconds", type_=sa.Double()))
"""Where a claim or a renewal puts the end of a lease."""

_renewal = lease_batch("l")
_RENEW = Statement(
    "leases.renew",
    sa.update(work)
    .values(lease_expires_at=lease_end, due_at=lease_end)
    .where(held_by(_renewal), work.c.lease_expires_at > sa.func.now())
    .returning(work.c.operation_id),
)


async def renew(
    tx: Transaction, leases: Sequence[Lease], *, lease_seconds: float
) -> set[OperationId]:
    """Push the end of these leases to now + `lease_seconds`; the ones not returned are lost.

    An ended lease is not renewed, even where nobody took it yet: its owner stopped trusting it before.
    """
    locked = await lock(tx, leases, unexpired=True)
    held = [lease for lease in leases if holds(locked, lease)]
    if not held:
        return set()
    rows = await tx.fetch(_RENEW, lease_seconds=lease_seconds, **lease_arrays("l", held))
    return {OperationId(row["operation_id"]) for row in rows}


@dataclass(frozen=True, slots=True)
class Release:
    """How a leased operation is put back.

    `due_in_seconds` counts from the database's now; None is never (only evidence, a signal or an operator
    makes it due). `attention` is the reason if and only if `state` is needs_attention. `note_stop` records
    a stop cause where none is noted yet. `keep_claims`: do not reset the poison count.
    """

    lease: Lease
    state: State
    actor: Actor
    due_in_seconds: float | None
    attention: str | None = None
    ending: Ending | None = None
    note_stop: StopCause | None = None
    visible: bool = True
    keep_claims: bool = False


_release = lease_batch(
    "l",
    state=sa.Text(),
    actor=sa.Text(),
    due_in_seconds=sa.Double(),
    attention=sa.Text(),
    ending=sa.Text(),
    note_stop=sa.Text(),
    visible=sa.Boolean(),
    keep_claims=sa.Boolean(),
)
# Not 'infinity': Python's datetime ends with the year 9999, and rows are read.
_never: sa.ColumnElement[datetime] = sa.literal_column("'9999-01-01 00:00:00+00'::timestamptz")
_due_then = sa.func.least(
    sa.func.coalesce(sa.func.now() + seconds(_release.c.due_in_seconds), _never),
    # A deadline still ahead is judged when it comes; one already passed was judged by this claim.
    sa.case((work.c.deadline > sa.func.now(), work.c.deadline)),
)
_RELEASE = Statement(
    "leases.release",
    sa.update(work)
    .values(
        state=_release.c.state,
        actor=_release.c.actor,
        due_at=_due_then,
        attention=_release.c.attention,
        ending=sa.func.coalesce(work.c.ending, _release.c.ending),
        stop_cause=sa.func.coalesce(work.c.stop_cause, _release.c.note_stop),
        lease_owner_token=sa.null(),
        lease_expires_at=sa.null(),
        claims=sa.case((_release.c.keep_claims, work.c.claims), else_=0),
        version=work.c.version + sa.case((_release.c.visible, 1), else_=0),
        changed_at=sa.case((_release.c.visible, sa.func.now()), else_=work.c.changed_at),
        uncertain_since=sa.case(
            (
                one_of(_release.c.state, (State.UNCERTAIN, State.NEEDS_ATTENTION)),
                sa.func.coalesce(work.c.uncertain_since, sa.func.now()),
            ),
        ),
    )
    .where(held_by(_release))
    .returning(work.c.operation_id),
)


async def release(tx: Transaction, releases: Sequence[Release]) -> set[OperationId]:
    """Give leases back: release, park and raise are this one write. The ones not returned are lost.

    Resets the claim count, so that only claims that ended by expiry stay counted (poison, B10).
    """
    locked = await lock(tx, [item.lease for item in releases])
    held = [item for item in releases if holds(locked, item.lease)]
    if not held:
        return set()
    rows = await tx.fetch(
        _RELEASE,
        **lease_arrays(
            "l",
            [item.lease for item in held],
            {
                "state": [item.state.value for item in held],
                "actor": [item.actor.value for item in held],
                "due_in_seconds": [item.due_in_seconds for item in held],
                "attention": [item.attention for item in held],
                "ending": [item.ending and item.ending.value for item in held],
                "note_stop": [item.note_stop and item.note_stop.value for item in held],
                "visible": [item.visible for item in held],
                "keep_claims": [item.keep_claims for item in held],
            },
        ),
    )
    return {OperationId(row["operation_id"]) for row in rows}
