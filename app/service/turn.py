"""One turn's end: what it wants written, what was decided, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from app.domain.course import Basis, BeginStep, End, Move, Rest
from app.domain.lifecycle import Actor, State, StopCause, sources
from app.domain.lifecycle import Event as Happened
from app.domain.operation import Claimed, History, Lease
from app.domain.outcome import AttemptRecord, Finding, Outcome, Succeeded, kind_of
from app.storage import attempts, findings, leases
from app.storage.leases import Locked
from app.storage.steps import Begin, Begun
from app.telemetry import Event, Metric, Telemetry


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What a turn wants written: an attempt's answer, a look-up's finding, or nothing but the next move."""

    claimed: Claimed
    actor: Actor
    answer: attempts.Answer | None = None
    begun: Begun | None = None
    begin: Begin | None = None
    found: findings.Found | None = None
    asked: str | None = None
    """The provider the look-up asked."""
    first: bool = False
    """The answered attempt is the first row of its operation: there is no history to read."""


def answers_of(end: TurnEnd) -> list[tuple[str, Outcome | Finding]]:
    """What this turn heard from which provider."""
    told: list[tuple[str, Outcome | Finding]] = []
    if end.answer is not None and end.begin is not None:
        told.append((end.begin.provider, end.answer.outcome))
    if end.found is not None and end.asked is not None:
        told.append((end.asked, end.found.finding))
    return told


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is gone: nothing was written. `recorded`: this very answer already stands (R17)."""

    recorded: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """The move that was decided under the lock; a rest or an end is already written."""

    move: Move
    history: History
    state: State
    stop_cause: StopCause | None
    now: datetime


def history_of_first(end: TurnEnd) -> History | None:
    """The whole history of an operation whose first attempt was just answered, or None: read it."""
    if not end.first or end.answer is None or end.begun is None or end.begin is None:
        return None
    outcome = end.answer.outcome
    if not isinstance(outcome, Succeeded):
        return None
    return History(
        attempts=(
            AttemptRecord(
                id=end.begun.attempt_id,
                step=end.begin.step,
                item=end.begin.item,
                generation=end.claimed.lease.generation,
                began_at=end.begun.began_at,
                send_by=end.begun.send_by,
                arrives_by=end.begun.send_by,
                settled_at=end.begun.send_by,
                outcome=kind_of(outcome),
                reference=outcome.reference,
                result=outcome.result,
            ),
        )
    )


@dataclass(frozen=True, slots=True)
class Start:
    """One send to begin, and the move that asked for it: judged again under the operation's lock.

    `judged`: the stop cause the move was decided in the knowledge of; one that came since is judged first.
    """

    begin: Begin
    claimed: Claimed
    actor: Actor
    move: BeginStep
    judged: StopCause | None
    first: bool
    """There are no rows of sends yet, so there is nothing to read again."""


def may_begin(start: Start, row: Locked | None) -> bool:
    """The guards of `begin` that lie on the locked row (PROTOCOL.md, Transitions: begin, re-send)."""
    if row is None or row.ending is not None:
        return False
    if start.move.basis is Basis.KEY:
        return row.state in (*sources(Happened.RESEND), *sources(Happened.BEGIN))
    if row.stop_cause not in (None, start.judged):
        return False
    if row.deadline is not None and row.now >= row.deadline and start.first:
        return False  # it passed while the send waited for its turn
    return row.state in sources(Happened.BEGIN)


def release_of(lease: Lease, rest: Rest, *, visible: bool) -> leases.Release:
    """A rest as the write that puts the operation back."""
    return leases.Release(
        lease=lease,
        state=rest.state,
        actor=rest.actor,
        due_in_seconds=rest.due_in_seconds,
        attention=None if rest.attention is None else rest.attention.value,
        ending=rest.ending,
        note_stop=rest.note_stop,
        visible=visible,
    )


def tell(telemetry: Telemetry, end: TurnEnd, decided: Decided) -> None:
    """Count and log what one turn's end decided."""
    claimed, fields = end.claimed, {"operation": str(end.claimed.id)}
    fields["generation"] = str(claimed.lease.generation)
    if end.answer is not None:
        outcome = end.answer.outcome
        code = None if isinstance(outcome, Succeeded) else outcome.code
        telemetry.event(Event.RECORDED, outcome=kind_of(outcome).value, code=code, **fields)
    in_doubt = claimed.state in (State.UNCERTAIN, State.NEEDS_ATTENTION)
    match decided.move:
        case End(state):
            telemetry.event(Event.FINISHED, state=state.value, **fields)
            telemetry.count(Metric.FINISHED, type=claimed.type, state=state.value)
        case Rest() as rest:
            _tell_rest(telemetry, claimed, rest, fields)
        case _:
            return
    if in_doubt and not (
        isinstance(decided.move, Rest)
        and decided.move.state in (State.UNCERTAIN, State.NEEDS_ATTENTION)
    ):
        evidence = "finding" if end.found is not None else "resend" if end.answer else "late"
        telemetry.count(Metric.UNCERTAIN_SETTLED, type=claimed.type, evidence=evidence)


def _tell_rest(
    telemetry: Telemetry, claimed: Claimed, rest: Rest, fields: Mapping[str, str]
) -> None:
    doubtful = (State.UNCERTAIN, State.NEEDS_ATTENTION)
    if rest.state is State.UNCERTAIN and claimed.state not in doubtful:
        telemetry.count(Metric.UNCERTAIN_ENTERED, type=claimed.type)
        telemetry.event(Event.PARKED, **fields)
    elif rest.attention is not None and claimed.attention is None:
        telemetry.count(Metric.ATTENTION_RAISED, type=claimed.type, reason=rest.attention.value)
        telemetry.event(Event.ATTENTION, "warning", reason=rest.attention.value, **fields)
    else:
        telemetry.event(
            Event.RELEASED, state=rest.state.value, due_in_seconds=rest.due_in_seconds, **fields
        )


def tell_overdue(
    telemetry: Telemetry, after_seconds: float | None, claimed: Claimed, decided: Decided
) -> None:
    """Say at each look that doubt lasts longer than the type's `attention_after`; look-ups go on."""
    since = claimed.uncertain_since
    if after_seconds is None or since is None or not isinstance(decided.move, Rest):
        return
    seconds = (decided.now - since).total_seconds()
    if decided.move.state is State.UNCERTAIN and seconds > after_seconds:
        telemetry.event(
            Event.OVERDUE, "warning", operation=str(claimed.id), uncertain_seconds=round(seconds)
        )
