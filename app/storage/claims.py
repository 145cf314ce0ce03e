"""Claims: lease what is due, most urgent first, skipping what others hold (PROTOCOL.md, Transitions: claim).

A claim is what gives leases, so it is the one write about live operations that carries none: it matches only
rows whose lease is absent or over, judged again on the locked row.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import sqlalchemy as sa

from app.domain.lifecycle import Actor
from app.storage.database import Row, Statement, Transaction, arrays, batch, looked_up, seconds
from app.storage.leases import lease_end
from app.storage.tables import Uuid, attempts, operations, work

_known = batch("k", type=sa.Text(), type_version=sa.Integer())
_priority = batch("p", priority=sa.SmallInteger())
_abandoned: sa.ColumnElement[float] = sa.cast(
    sa.bindparam("abandoned_seconds", type_=sa.Double()), sa.Double()
)
_due_in_priority = (
    sa.select(
        work.c.bucket,
        work.c.operation_id,
        work.c.lease_owner_token.is_not(None).label("taken_over"),
        work.c.due_at.label("was_due_at"),
    )
    .where(
        work.c.actor == sa.bindparam("actor", type_=sa.Text()),
        work.c.priority == _priority.c.priority,
        work.c.due_at <= sa.func.now(),
        sa.or_(work.c.lease_expires_at.is_(None), work.c.lease_expires_at <= sa.func.now()),
        sa.tuple_(work.c.type, work.c.type_version).in_(
            sa.select(_known.c.type, _known.c.type_version)
        ),
        sa.or_(
            _abandoned.is_(None),
            sa.and_(
                work.c.lease_expires_at <= sa.func.now() - seconds(_abandoned),
                looked_up(
                    attempts.c.bucket == work.c.bucket,
                    attempts.c.operation_id == work.c.operation_id,
                    attempts.c.outcome.is_(None),
                ),
            ),
        ),
    )
    .order_by(work.c.due_at)
    .limit(sa.bindparam("limit", type_=sa.Integer()))
    .with_for_update(of=work, skip_locked=True)
    .lateral("w")
)
# One priority after the other, lazily: the outer limit stops the walk, and operations that wait for a
# later day are never passed over on the way (they lie behind due_at in each priority's part of the index).
_due = (
    sa.select(_due_in_priority)
    .select_from(_priority.join(_due_in_priority, sa.true()))
    .limit(sa.bindparam("limit", type_=sa.Integer()))
    .cte("due")
    .prefix_with("MATERIALIZED", dialect="postgresql")
)
_claimed = (
    sa.update(work)
    .values(
        lease_owner_token=sa.bindparam("owner_token", type_=Uuid),
        lease_generation=work.c.lease_generation + 1,
        lease_expires_at=lease_end,
        due_at=lease_end,
        claims=work.c.claims + 1,
    )
    .where(work.c.bucket == _due.c.bucket, work.c.operation_id == _due.c.operation_id)
    .returning(
        work,
        _due.c.taken_over,
        _due.c.was_due_at,
    )
    .cte("claimed")
)
_CLAIM = Statement(
    "claims.claim",
    sa.select(
        _claimed,
        sa.func.now().label("claimed_at"),
        operations.c.created_at,
        operations.c.not_before,
        operations.c.key_digest,
        operations.c.input,
    ).join(
        operations,
        sa.and_(
            operations.c.bucket == _claimed.c.bucket,
            operations.c.id == _claimed.c.operation_id,
        ),
    ),
)
_CLAIMED_BEFORE = Statement(
    "claims.claimed_before",
    sa.select(
        work,
        sa.false().label("taken_over"),
        work.c.due_at.label("was_due_at"),
        sa.func.now().label("claimed_at"),
        operations.c.created_at,
        operations.c.not_before,
        operations.c.key_digest,
        operations.c.input,
    )
    .join(
        operations,
        sa.and_(operations.c.bucket == work.c.bucket, operations.c.id == work.c.operation_id),
    )
    .where(
        work.c.lease_owner_token == sa.bindparam("owner_token", type_=Uuid),
        work.c.lease_expires_at > sa.func.now(),
    ),
)


async def claim(
    tx: Transaction,
    *,
    actor: Actor,
    owner_token: UUID,
    lease_seconds: float,
    limit: int,
    known: Sequence[tuple[str, int]],
    abandoned_seconds: float | None = None,
) -> list[Row]:
    """Lease up to `limit` due operations of `known` (type, version) pairs, most urgent first.

    Due means: time reached, and no lease or an ended one. Each claim is counted here, before the work, and
    the count is committed with it (CASES.md K5). What this process does not know it leaves alone (I12).
    `abandoned_seconds`: only what nobody took for so long after its lease ended with a send open, so that
    doubt is settled also while no process of `actor` runs (DESIGN.md I7).
    Returns rows of `work` as the claim left them, with the operation's inputs.
    """
    return await tx.fetch(
        _CLAIM,
        actor=actor.value,
        owner_token=owner_token,
        lease_seconds=lease_seconds,
        limit=limit,
        abandoned_seconds=abandoned_seconds,
        **arrays("p", {"priority": [0, 1, 2, 3]}),
        **arrays(
            "k",
            {
                "type": [name for name, _ in known],
                "type_version": [version for _, version in known],
            },
        ),
    )


async def claimed_before(tx: Transaction, *, owner_token: UUID) -> list[Row]:
    """What a claim with this token leased, after its COMMIT ended in an error (R17): the same rows.

    The token was drawn for that one call, so unexpired rows that carry it are its claims, and nobody
    else's. Rare, so it may read the whole table of live operations.
    """
    return await tx.fetch(_CLAIMED_BEFORE, owner_token=owner_token)
