"""Execution: a worker's use cases: claim what is due, run a turn, renew leases.

Claimed means: leased to a token drawn for this one call, counted, committed. Each operation then gets a turn
of its own: begin, send, record, until it rests or ends. An exception nobody expected leaves the lease to
end: the claim stays counted, and after the limit a human is asked (CASES.md B10), never a guess made.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.course import Attention, BeginStep, next_move
from app.domain.errors import CommitUnknown, LeaseLost, StoreUnavailable
from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import Actor, Ending, State, StopCause
from app.domain.operation import Claimed, History, Lease, Trust
from app.domain.policy import LeasePolicy
from app.failpoints import Failpoint
from app.service.clock import elapsed
from app.service.turn import TurnEnd
from app.service.turns import Turns
from app.storage import claims, findings, leases
from app.storage.database import Database, Row
from app.telemetry import Event, Metric


class Execution:
    """What a worker process does with operations. `Turns` holds the machinery."""

    actor = Actor.WORKER

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    async def claim(self, limit: int) -> list[Claimed]:
        """Lease up to `limit` due operations.

        Raises:
            StoreUnavailable: nothing was claimed, as far as can be known; a claim nobody knows of ends by
                expiry.
        """
        return await claim(self.turns, self.actor, limit)

    async def run(self, claimed: Claimed) -> None:
        """One turn: until the operation rests, ends, or the lease is lost. Raises nothing expected."""
        turns = self.turns
        try:
            case = turns.case_of(
                claimed,
                self.actor,
                state=claimed.state,
                stop_cause=claimed.stop_cause,
                history=claimed.history,
                now=claimed.claimed_at,
            )
            move = next_move(case)
            while True:
                if isinstance(move, BeginStep):
                    decided = await turns.send(claimed, self.actor, move, case)
                else:
                    decided = await turns.settle(TurnEnd(claimed, self.actor))
                move = decided.move
                if not isinstance(move, BeginStep):
                    return
                case = turns.case_of(
                    claimed,
                    self.actor,
                    state=decided.state,
                    stop_cause=decided.stop_cause,
                    history=decided.history,
                    now=decided.now,
                )
        except LeaseLost:
            return
        except StoreUnavailable as error:
            turns.telemetry.event(
                Event.STORE_UNAVAILABLE, "warning", operation=str(claimed.id), detail=str(error)
            )
        except Exception as error:
            await turns.stumble(claimed, error)


async def claim(
    turns: Turns, actor: Actor, limit: int, *, abandoned_seconds: float | None = None
) -> list[Claimed]:
    """Claim for `actor`; after an unknown COMMIT read back by the token of this very call (R17)."""
    token = new_id()
    started = elapsed()
    try:
        async with turns.database.transaction() as tx:
            rows = await claims.claim(
                tx,
                actor=actor,
                owner_token=token,
                lease_seconds=turns.policy.lease_seconds,
                limit=limit,
                known=turns.registry.type_versions(),
                abandoned_seconds=abandoned_seconds,
            )
    except CommitUnknown:
        async with turns.database.transaction() as tx:
            rows = await claims.claimed_before(tx, owner_token=token)
    await turns.failpoints.hit(Failpoint.AFTER_CLAIM)
    if not rows:
        return []
    histories = await _histories(turns, rows)
    until = started + turns.policy.lease_seconds - turns.policy.margin_seconds
    claimed = []
    for row in rows:
        try:
            claimed.append(_claimed(row, until, histories))
        except Exception as error:  # one row that cannot be read does not stop the rest (K5, I12)
            await _set_aside(turns, row, error)
    _tell(turns, actor, claimed)
    return claimed


async def _histories(turns: Turns, rows: Sequence[Row]) -> dict[OperationId, History | Exception]:
    """Nothing was begun for a pending operation, so only the others are read; together, else one by one."""
    begun = [OperationId(row["operation_id"]) for row in rows if row["state"] != State.PENDING]
    if not begun:
        return {}
    try:
        async with turns.database.transaction() as tx:
            return dict(await findings.history(tx, begun))
    except StoreUnavailable:
        raise
    except Exception:
        read: dict[OperationId, History | Exception] = {}
        for id in begun:
            try:
                async with turns.database.transaction() as tx:
                    read |= await findings.history(tx, [id])
            except StoreUnavailable:
                raise
            except Exception as error:
                read[id] = error
        return read


async def _set_aside(turns: Turns, row: Row, error: Exception) -> None:
    """Say it and leave the lease to end, so the claim stays counted; past the limit a human is asked."""
    id = OperationId(row["operation_id"])
    turns.telemetry.event(Event.UNEXPECTED, "error", operation=str(id), exc_info=error)
    if row["claims"] <= turns.policy.claims_limit:
        return
    lease = Lease(id, row["lease_owner_token"], row["lease_generation"], Trust(float("-inf")))
    reason = row["attention"] or Attention.CLAIMS_EXHAUSTED.value
    async with turns.database.transaction() as tx:
        await leases.release(
            tx,
            [
                leases.Release(
                    lease, State.NEEDS_ATTENTION, Actor.RECONCILER, None, attention=reason
                )
            ],
        )


def _claimed(
    row: Row, trusted_until: float, histories: dict[OperationId, History | Exception]
) -> Claimed:
    id = OperationId(row["operation_id"])
    history = histories.get(id, History())
    if isinstance(history, Exception):
        raise history
    return Claimed(
        lease=Lease(
            operation=id,
            owner_token=row["lease_owner_token"],
            generation=row["lease_generation"],
            trust=Trust(trusted_until),
        ),
        tenant=row["tenant"],
        type=row["type"],
        type_version=row["type_version"],
        state=State(row["state"]),
        ending=None if row["ending"] is None else Ending(row["ending"]),
        stop_cause=None if row["stop_cause"] is None else StopCause(row["stop_cause"]),
        attention=row["attention"],
        deadline=row["deadline"],
        claims=row["claims"],
        taken_over=row["taken_over"],
        suspect=row["suspect"],
        claimed_at=row["claimed_at"],
        due_at=row["was_due_at"],
        created_at=row["created_at"],
        not_before=row["not_before"],
        uncertain_since=row["uncertain_since"],
        retried_at=row["retried_at"],
        key_digest=row["key_digest"],
        input=row["input"],
        history=history,
    )


def _tell(turns: Turns, actor: Actor, claimed: Sequence[Claimed]) -> None:
    turns.telemetry.count(Metric.CLAIMS, len(claimed), actor=actor.value)
    for one in claimed:
        if one.taken_over:
            turns.telemetry.count(Metric.TAKEOVERS, actor=actor.value)
        turns.telemetry.event(
            Event.CLAIMED,
            operation=str(one.id),
            generation=one.lease.generation,
            actor=actor.value,
            taken_over=one.taken_over,
        )


class Renewal:
    """Renews leases, on a database of its own: open it in the loop of the thread that renews."""

    def __init__(self, database: Database, policy: LeasePolicy) -> None:
        self._database = database
        self._policy = policy

    async def open(self) -> None:
        """Start connecting."""
        await self._database.open()

    async def close(self) -> None:
        """Close the connection."""
        await self._database.close()

    async def renew(self, held: Sequence[Lease]) -> list[Lease]:
        """Renew leases, extend the trust in each, and return the lost ones, their trust ended.

        Trust counts from before the renewal was tried: the database's new end can only be later (I9).

        Raises:
            StoreUnavailable: nobody knows; trust is left to end by itself.
        """
        started = elapsed()
        seconds = self._policy.lease_seconds
        async with self._database.transaction() as tx:
            renewed = await leases.renew(tx, held, lease_seconds=seconds)
        lost = []
        newest: dict[OperationId, int] = {}
        for lease in held:
            newest[lease.operation] = max(lease.generation, newest.get(lease.operation, 0))
        for lease in held:
            # An older lease of the same row is lost, whoever renewed the newer one.
            if lease.operation in renewed and lease.generation == newest[lease.operation]:
                lease.trust.until = started + seconds - self._policy.margin_seconds
            else:
                lease.trust.end()
                lost.append(lease)
        return lost
