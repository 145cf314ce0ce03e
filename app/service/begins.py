"""Begins: the group commit that writes attempts before their first byte (DESIGN.md I4).

A move decided from rows read outside the lock is decided again from rows read under it (PROTOCOL.md R8), and
goes only as far as the provider's shared restraint lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import UUID

from app.domain.course import Case, next_move
from app.domain.operation import History
from app.failpoints import Failpoint, Failpoints
from app.service.group_commit import GroupCommit
from app.service.restraint import Delayed, Restraint
from app.service.turn import Start, may_begin
from app.storage import findings, leases, steps
from app.storage.database import Database
from app.storage.leases import Locked, holds
from app.storage.steps import Begun
from app.telemetry import Telemetry


class Begins:
    """One process's begins. `case_of` makes the case of a claimed operation from rows."""

    def __init__(
        self,
        database: Database,
        case_of: Callable[..., Case],
        restraint: Restraint,
        telemetry: Telemetry,
        failpoints: Failpoints,
        *,
        patience_seconds: float,
    ) -> None:
        self._database = database
        self._case_of = case_of
        self._restraint = restraint
        self._failpoints = failpoints
        self._group: GroupCommit[Start, Begun | Delayed | None] = GroupCommit(
            "begin", self._flush, telemetry, patience_seconds=patience_seconds
        )

    async def submit(self, start: Start) -> Begun | Delayed | None:
        """The attempt's row, committed; or for how long it may not go; or None: refused, or the lease lost.

        Raises:
            StoreUnavailable: nothing of it was committed.
            CommitUnknown: whether it stands could not be settled in time: nothing may be sent.
        """
        return await self._group.submit(start)

    async def drain(self) -> None:
        """Return when nothing is being written."""
        await self._group.drain()

    async def _flush(self, batch: Sequence[Start]) -> Sequence[Begun | Delayed | None]:
        async with self._database.transaction() as tx:
            locked = await leases.lock(tx, [start.claimed.lease for start in batch], unexpired=True)
            allowed = [
                start
                for start in batch
                if holds(locked, start.claimed.lease) and may_begin(start, locked[start.claimed.id])
            ]
            # What goes beside or after other sends is decided again from rows read under the lock (R8).
            later = [start for start in allowed if not start.first]
            histories = await findings.history(tx, [start.claimed.id for start in later])
            begins = [
                start.begin
                for start in allowed
                if start.claimed.id not in histories
                or self._stands(start, histories[start.claimed.id], locked[start.claimed.id])
            ]
            permits = await self._restraint.permits(tx, [begin.provider for begin in begins])
            verdicts: dict[UUID, Begun | Delayed] = {
                begin.attempt_id: permit
                for begin, permit in zip(begins, permits, strict=True)
                if permit is not None
            }
            verdicts |= await steps.begin(
                tx, [one for one in begins if one.attempt_id not in verdicts], locked
            )
            # What stands from before an unknown COMMIT is not refused for what came since (R17).
            others = [
                start.begin
                for start in batch
                if holds(locked, start.claimed.lease)
                and not isinstance(verdicts.get(start.begin.attempt_id), Begun)
            ]
            verdicts |= await steps.begun_before(tx, others)
            await self._failpoints.hit(Failpoint.BEFORE_BEGIN_COMMIT)
        return [verdicts.get(start.begin.attempt_id) for start in batch]

    def _stands(self, start: Start, history: History, row: Locked) -> bool:
        """Whether the move is still the one to make; one's own attempt, begun before, changes nothing."""
        others = tuple(one for one in history.attempts if one.id != start.begin.attempt_id)
        case = self._case_of(
            start.claimed,
            start.actor,
            state=row.state,
            stop_cause=row.stop_cause,
            history=replace(history, attempts=others),
            now=row.now,
        )
        return next_move(case) == start.move
