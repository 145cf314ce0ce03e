"""Reconciliation: the end of doubt, by evidence. The same lease rules as a worker's.

A turn on an uncertain operation asks the provider first, where it can be asked; `Applied` settles at any
time. Then, at a provider that honours keys and while the resend deadline allows, it sends the stored request
again under the stored key (R3). What has no clear answer rests and is tried again, for as long as it takes:
age decides nothing (I5). What cannot be settled by asking or sending waits for a human, with the reason.
"""

from __future__ import annotations

from datetime import timedelta

from app.domain.course import BeginStep, Case, LookUpStep, next_move
from app.domain.errors import LeaseLost, StoreUnavailable
from app.domain.identity import Direction, new_id
from app.domain.lifecycle import Actor
from app.domain.operation import Claimed
from app.domain.outcome import Applied, Finding, Refused, finding_kind_of
from app.failpoints import Failpoint
from app.service import sending
from app.service.execution import claim
from app.service.turn import Decided, TurnEnd
from app.service.turns import Turns
from app.storage import findings
from app.telemetry import Event


class Reconciliation:
    """What a reconciler process does with operations that are in doubt."""

    actor = Actor.RECONCILER

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    async def claim(self, limit: int) -> list[Claimed]:
        """Lease up to `limit` due operations that are in doubt, also those whose worker is long gone.

        Raises:
            StoreUnavailable: nothing was claimed, as far as can be known.
        """
        claimed = await claim(self.turns, self.actor, limit)
        if len(claimed) < limit:
            grace = self.turns.policy.lease_seconds
            room = limit - len(claimed)
            try:
                claimed += await claim(self.turns, Actor.WORKER, room, abandoned_seconds=grace)
            except StoreUnavailable as error:  # what is claimed already is not left to end for that
                self.turns.telemetry.event(Event.STORE_UNAVAILABLE, "warning", detail=str(error))
        return claimed

    async def run(self, claimed: Claimed) -> None:
        """One turn: look up, send again, settle or rest. Raises nothing expected."""
        turns = self.turns
        try:
            case = self._case(claimed, None)
            move = next_move(case)
            while True:
                match move:
                    case LookUpStep():
                        decided = await self._look_up(claimed, move, case)
                    case BeginStep():
                        decided = await turns.send(claimed, self.actor, move, case)
                    case _:
                        decided = await turns.settle(TurnEnd(claimed, self.actor))
                move = decided.move
                if not isinstance(move, (LookUpStep, BeginStep)):
                    return
                case = self._case(claimed, decided)
        except LeaseLost:
            return
        except StoreUnavailable as error:
            turns.telemetry.event(
                Event.STORE_UNAVAILABLE, "warning", operation=str(claimed.id), detail=str(error)
            )
        except Exception as error:
            await turns.stumble(claimed, error)

    def _case(self, claimed: Claimed, decided: Decided | None) -> Case:
        return self.turns.case_of(
            claimed,
            self.actor,
            state=claimed.state if decided is None else decided.state,
            stop_cause=claimed.stop_cause if decided is None else decided.stop_cause,
            history=claimed.history if decided is None else decided.history,
            now=claimed.claimed_at if decided is None else decided.now,
        )

    async def _look_up(self, claimed: Claimed, move: LookUpStep, case: Case) -> Decided:
        """Ask, and settle what follows. The row with the time of asking is committed first (R4)."""
        turns, finding_id = self.turns, new_id()
        item = findings.LookUp(
            claimed.lease, finding_id, move.record.step, move.record.item, Direction.FORWARD
        )
        provider = move.record.provider
        async with turns.places[provider]:
            delayed = await turns.begin_look_up(claimed, item, provider)
            if delayed is not None:
                return await turns.delay(claimed, self.actor, case, delayed)
            finding: Finding = await sending.look_up(
                turns.adapters[provider], move.record.request, move.record.key, turns.telemetry
            )
        finding = _of_this_operation(finding, claimed, case)
        await turns.failpoints.hit(Failpoint.AFTER_LOOKUP)
        turns.telemetry.event(
            Event.FOUND,
            operation=str(claimed.id),
            generation=claimed.lease.generation,
            step=move.record.step,
            finding=finding_kind_of(finding).value,
        )
        found = findings.Found(claimed.lease, finding_id, finding)
        return await turns.settle(TurnEnd(claimed, self.actor, found=found, asked=provider))


def _of_this_operation(finding: Finding, claimed: Claimed, case: Case) -> Finding:
    """A hit much older than the operation is an earlier one's under the same derived key (R15)."""
    if not isinstance(finding, Applied) or finding.created_at is None:
        return finding
    horizon = timedelta(seconds=case.type.policy.retry_horizon_seconds)
    if finding.created_at >= claimed.created_at - horizon:
        return finding
    return Refused("older-than-operation", "The effect that was found is older than the operation.")
