"""Turns: what a worker and a reconciler do under one lease, in transactions that carry the fence.

A turn is a short run of moves. Each answer is recorded, the next move is decided from rows read under the
operation's lock, and the end or the rest is written, all in one transaction (PROTOCOL.md R8): evidence that
came in from elsewhere meanwhile is seen. `begin` and `record` are group commits over all turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from app.domain.course import (
    ATTENTION_LOOKUP_SECONDS,
    Attention,
    BeginStep,
    Case,
    End,
    LookUpStep,
    Rest,
    as_json,
    next_move,
)
from app.domain.errors import CommitUnknown, LeaseLost
from app.domain.identity import OperationId
from app.domain.lifecycle import Actor, State
from app.domain.operation import Claimed, History, Lease
from app.domain.policy import LeasePolicy
from app.domain.provider import ProviderAdapter
from app.domain.registry import Registry
from app.failpoints import Failpoint, Failpoints
from app.service import sending
from app.service.begins import Begins
from app.service.cases import Cases
from app.service.clock import elapsed
from app.service.group_commit import GroupCommit
from app.service.late_answers import LateAnswers
from app.service.notifying import Notifier
from app.service.places import Places
from app.service.restraint import Delayed, Restraint
from app.service.turn import (
    Decided,
    Lost,
    Start,
    TurnEnd,
    answers_of,
    history_of_first,
    release_of,
    tell,
    tell_overdue,
)
from app.storage import attempts, findings, leases, operations
from app.storage.database import Database, Transaction
from app.storage.leases import Locked, holds
from app.storage.notices import Channel
from app.storage.steps import Begun
from app.telemetry import Event, Metric, Telemetry

PLACE_SECONDS = 5.0  # who gets no place for a call by then gives the operation back
REFUSED_AGAIN_SECONDS = 1.0
"""When a begin was refused although its move still stands, the operation rests this long."""


class Turns:
    """The shared machinery of worker and reconciler in one process."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        adapters: Mapping[str, ProviderAdapter],
        installation: str,
        policy: LeasePolicy,
        notifier: Notifier,
        telemetry: Telemetry,
        failpoints: Failpoints,
    ) -> None:
        self.database = database
        self.registry = registry
        self.adapters = adapters
        self.policy = policy
        self.notifier = notifier
        self.telemetry = telemetry
        self.failpoints = failpoints
        self.draining = False
        """Set by a process that is stopping: what has not begun is given back instead."""
        profiles = {name: adapter.profile for name, adapter in adapters.items()}
        self._cases = Cases(registry, profiles, installation, policy)
        self.case_of = self._cases.case_of
        self._restraint = Restraint(profiles, telemetry)
        # The bound per provider is taken before the attempt's row is written, so that no send window passes
        # while a send waits for its place.
        self.places = Places(database, profiles)
        self._begins = Begins(
            database,
            self.case_of,
            self._restraint,
            telemetry,
            failpoints,
            patience_seconds=policy.lease_seconds / 3,
        )
        self._ends: GroupCommit[TurnEnd, Decided | Lost] = GroupCommit(
            "record",
            self._flush_ends,
            telemetry,
            patience_seconds=policy.lease_seconds,
            keep_trying=True,
        )

        self._lates = LateAnswers(database, telemetry)

    async def drain(self) -> None:
        """Return when nothing is being written."""
        await self._begins.drain()
        await self._ends.drain()
        await self._lates.drain()

    # -- sending ----------------------------------------------------------------------------------------

    async def send(self, claimed: Claimed, actor: Actor, move: BeginStep, case: Case) -> Decided:
        """Begin an attempt, send it, record the answer, and say what was decided.

        Raises:
            LeaseLost: nothing more may be done under this lease; an answer that came is kept as a finding.
            StoreUnavailable: the database was away for too long; the lease is left to end.
        """
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                await self.places[move.step.provider].take()
        except asyncio.CancelledError:  # cut short before anything was begun: it uses up no claim
            return await self._give_back(claimed, actor, case)
        except TimeoutError:
            return await self.delay(claimed, actor, case, Delayed(1.0 + case.draw))
        try:
            if self.draining:
                return await self._give_back(claimed, actor, case)
            return await self._send(claimed, actor, move, case)
        finally:
            self.places[move.step.provider].give()

    async def _give_back(self, claimed: Claimed, actor: Actor, case: Case) -> Decided:
        rest = await self._put_back(claimed, Rest(case.state, actor, 0.0))
        return Decided(rest, case.history, case.state, case.stop_cause, case.now)

    async def _send(self, claimed: Claimed, actor: Actor, move: BeginStep, case: Case) -> Decided:
        started = elapsed()
        adapter = self.adapters[move.step.provider]
        begin = self._cases.begin_of(claimed, move, case)
        first = case.state is State.PENDING and case.history == History()
        begun, cut_short = await self._begin(
            Start(begin, claimed, actor, move, case.stop_cause, first)
        )
        if begun is None:
            return await self._refused(claimed, actor)
        if isinstance(begun, Delayed):
            return await self.delay(claimed, actor, case, begun)
        self.telemetry.event(
            Event.BEGUN,
            operation=str(claimed.id),
            generation=claimed.lease.generation,
            step=move.step.name,
            attempt=str(begun.attempt_id),
        )
        if cut_short:
            unsent = attempts.Answer(claimed.lease, begun.attempt_id, sending.NOT_SENT)
            return await self.settle(TurnEnd(claimed, actor, unsent, begun, begin, first=first))
        await self.failpoints.hit(Failpoint.AFTER_BEGIN)
        outcome = await sending.perform(
            adapter,
            begin.request,
            begin.key,
            sending.last_check(claimed.lease, started + begun.window_seconds),
            self.telemetry,
        )
        await self.failpoints.hit(Failpoint.AFTER_EFFECT)
        answer = attempts.Answer(claimed.lease, begun.attempt_id, outcome)
        return await self.settle(TurnEnd(claimed, actor, answer, begun, begin, first=first))

    async def _begin(self, start: Start) -> tuple[Begun | Delayed | None, bool]:
        """Begin, and whether the turn was cut short: then the attempt stands and nothing is sent."""
        submitted = asyncio.ensure_future(self._begins.submit(start))
        try:
            return await asyncio.shield(submitted), False
        except asyncio.CancelledError:
            return await submitted, True
        except CommitUnknown:
            # The attempt may stand; it was certainly not sent, and says so as soon as it can.
            unsent = attempts.Answer(start.claimed.lease, start.begin.attempt_id, sending.NOT_SENT)
            await self._lates.keep(unsent)
            raise

    async def begin_look_up(
        self, claimed: Claimed, item: findings.LookUp, provider: str
    ) -> Delayed | None:
        """Commit that a look-up begins now (R4), or say for how long it may not.

        Raises:
            LeaseLost: nothing may be asked under this lease any more.
        """
        async with self.database.transaction() as tx:
            locked = await leases.lock(tx, [claimed.lease], unexpired=True)
            if claimed.id not in locked:
                raise LeaseLost(f"{claimed.id}: the lease is lost.")
            [delayed] = await self._restraint.permits(tx, [provider])
            if delayed is None:
                await findings.ask(tx, [item], locked)
        return delayed

    async def delay(self, claimed: Claimed, actor: Actor, case: Case, delayed: Delayed) -> Decided:
        """Put an operation off whose call may not go now; nothing visible changes."""
        state = (
            State.RUNNING if case.state is State.PENDING and case.history.attempts else case.state
        )
        attention = None if claimed.attention is None else Attention(claimed.attention)
        rest = Rest(state, actor, delayed.seconds, attention=attention)
        return Decided(
            await self._put_back(claimed, rest), case.history, state, case.stop_cause, case.now
        )

    async def _refused(self, claimed: Claimed, actor: Actor) -> Decided:
        """The begin wrote nothing: the lease is lost, or rows changed since the move was decided."""
        decided = await self.settle(TurnEnd(claimed, actor))
        if isinstance(decided.move, (BeginStep, LookUpStep)):
            rest = Rest(decided.state, actor, REFUSED_AGAIN_SECONDS)
            return replace(decided, move=await self._put_back(claimed, rest))
        return decided

    async def stumble(self, claimed: Claimed, error: Exception) -> None:
        """An error nobody expected in a turn: say it, and leave the lease to end, so the claim stays counted.

        Past the limit even deciding may be what fails (an input its own model no longer reads), so the
        operation goes to a human from here (CASES.md B10).
        """
        self.telemetry.event(Event.UNEXPECTED, "error", operation=str(claimed.id), exc_info=error)
        if claimed.claims > self.policy.claims_limit:
            reason = Attention(claimed.attention or Attention.CLAIMS_EXHAUSTED)
            wait = ATTENTION_LOOKUP_SECONDS if claimed.history.attempts else None
            rest = Rest(State.NEEDS_ATTENTION, Actor.RECONCILER, wait, attention=reason)
            self.telemetry.count(Metric.ATTENTION_RAISED, type=claimed.type, reason=reason.value)
            async with self.database.transaction() as tx:
                await leases.release(tx, [release_of(claimed.lease, rest, visible=True)])

    async def _put_back(self, claimed: Claimed, rest: Rest) -> Rest:
        """Give the lease back with nothing begun under it; nothing visible changes."""
        async with self.database.transaction() as tx:
            await leases.release(tx, [release_of(claimed.lease, rest, visible=False)])
        return rest

    # -- recording --------------------------------------------------------------------------------------

    async def settle(self, end: TurnEnd) -> Decided:
        """Write what a turn learned and what follows from it.

        Raises:
            LeaseLost: nothing was written under this lease; an answer was kept as a finding (R7).
        """
        try:
            decided = await self._ends.submit(end)
        except Exception:
            # Recording or deciding failed; what the provider said must not go with it (R7).
            if end.answer is not None:
                await self._lates.keep(end.answer)
            raise
        await self.failpoints.hit(Failpoint.AFTER_RECORD)
        if isinstance(decided, Lost):
            await self._lost(end, decided)
            raise LeaseLost(f"{end.claimed.id}: the lease is lost.")
        tell(self.telemetry, end, decided)
        after = self._cases.type_of(end.claimed).policy.attention_after_seconds
        tell_overdue(self.telemetry, after, end.claimed, decided)
        return decided

    async def _lost(self, end: TurnEnd, lost: Lost) -> None:
        if lost.recorded:
            return
        self.telemetry.count(Metric.LEASE_LOST, verb="record")
        self.telemetry.event(
            Event.LEASE_LOST,
            "warning",
            operation=str(end.claimed.id),
            generation=end.claimed.lease.generation,
        )
        if end.answer is not None:
            provider = end.begin.provider if end.begin is not None else "unknown"
            await self._lates.keep(end.answer, provider)

    async def _flush_ends(self, batch: Sequence[TurnEnd]) -> Sequence[Decided | Lost]:
        async with self.database.transaction() as tx:
            locked = await leases.lock(tx, [end.claimed.lease for end in batch])
            held = [end for end in batch if holds(locked, end.claimed.lease)]
            await attempts.record(tx, [end.answer for end in held if end.answer], locked)
            await findings.find(tx, [end.found for end in held if end.found], locked)
            histories = await self._histories(tx, held)
            decided = {
                end.claimed.id: self._decide(end, histories[end.claimed.id], locked) for end in held
            }
            await self._apply(tx, held, decided)
            await self._restraint.note(tx, [told for end in held for told in answers_of(end)])
            lost = await self._compare(
                tx, [end for end in batch if not holds(locked, end.claimed.lease)]
            )
            await self.failpoints.hit(Failpoint.BEFORE_RECORD_COMMIT)
        finished = [id for id, one in decided.items() if isinstance(one.move, End)]
        if finished:
            self.notifier.announce(Channel.CHANGED, finished)
        if any(
            isinstance(one.move, Rest) and one.move.due_in_seconds == 0.0
            for one in decided.values()
        ):
            self.notifier.announce(Channel.WORK)
        return [
            lost[end.claimed.lease] if end.claimed.lease in lost else decided[end.claimed.id]
            for end in batch
        ]

    async def _histories(
        self, tx: Transaction, held: Sequence[TurnEnd]
    ) -> dict[OperationId, History]:
        """Read under the lock, except where the one attempt there ever was has just been answered."""
        known: dict[OperationId, History] = {}
        to_read: list[OperationId] = []
        for end in held:
            first = history_of_first(end)
            if first is None:
                to_read.append(end.claimed.id)
            else:
                known[end.claimed.id] = first
        return known | await findings.history(tx, to_read)

    def _decide(
        self, end: TurnEnd, history: History, locked: Mapping[OperationId, Locked]
    ) -> Decided:
        row = locked[end.claimed.id]
        claimed = replace(
            end.claimed, ending=row.ending, attention=row.attention, suspect=row.suspect
        )
        case = self.case_of(
            claimed,
            end.actor,
            state=row.state,
            stop_cause=row.stop_cause,
            history=history,
            now=row.now,
            answered=None if end.answer is None else end.answer.outcome,
            told=None if end.found is None else end.found.finding,
        )
        return Decided(next_move(case), history, row.state, row.stop_cause, row.now)

    async def _apply(
        self, tx: Transaction, held: Sequence[TurnEnd], decided: Mapping[OperationId, Decided]
    ) -> None:
        ends: list[operations.Finish] = []
        rests: list[leases.Release] = []
        for end in held:
            lease = end.claimed.lease
            match decided[end.claimed.id].move:
                case End(state, result, error):
                    ends.append(
                        operations.Finish(
                            lease=lease,
                            state=state,
                            result=None if result is None else as_json(result),
                            result_version=self._cases.type_of(end.claimed).result_version
                            if result is not None
                            else None,
                            error=None if error is None else as_json(error),
                        )
                    )
                case Rest() as rest:
                    changed = (
                        end.answer is not None
                        or rest.state is not decided[end.claimed.id].state
                        or rest.attention != end.claimed.attention
                        or rest.note_stop is not None
                    )
                    rests.append(release_of(lease, rest, visible=changed))
                case BeginStep() | LookUpStep():
                    pass  # the lease is kept: the turn goes on
        if rests:
            await leases.release(tx, rests)
        if ends:
            await operations.finish(tx, ends)

    async def _compare(self, tx: Transaction, missing: Sequence[TurnEnd]) -> dict[Lease, Lost]:
        """Zero rows is a lost lease only after this comparison (R17)."""
        if not missing:
            return {}
        answers = [end.answer for end in missing if end.answer is not None]
        recorded = await attempts.recorded_before(tx, answers)
        found = await findings.found_before(tx, [end.found for end in missing if end.found])
        finished = await operations.finished_before(tx, [end.claimed.lease for end in missing])
        return {
            end.claimed.lease: Lost(
                recorded=end.claimed.lease in finished
                or (end.answer is not None and end.answer.attempt_id in recorded)
                or (end.found is not None and end.found.finding_id in found)
            )
            for end in missing
        }
