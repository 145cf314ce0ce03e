"""The life of an operation: its states, every transition, and what each state answers to a repeat.

`TRANSITIONS` is the only list: WHERE guards, CHECK constraints, the README's picture and the tests are made
from it (PROTOCOL.md, 'Transitions'). State, lease and retention are three axes: there is no leased state.
Several events may be applied in one transaction (record, then finish); only the last state is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where an operation stands. A client treats one it does not know as not done."""

    PENDING = "pending"
    """Admitted; nothing was begun."""
    RUNNING = "running"
    """Something was begun, and nothing is in doubt."""
    WAITING = "waiting"
    """A wait step is under way: an instant or a signal ends it."""
    UNCERTAIN = "uncertain"
    """An effect may or may not exist; the reconciler is finding out."""
    NEEDS_ATTENTION = "needs_attention"
    """Only a human can go on; look-ups continue."""
    COMPENSATING = "compensating"
    """Going backwards: done steps are being compensated."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = (
    State.PENDING,
    State.RUNNING,
    State.WAITING,
    State.UNCERTAIN,
    State.NEEDS_ATTENTION,
    State.COMPENSATING,
)
TERMINAL = (State.SUCCEEDED, State.FAILED, State.CANCELLED)


class Actor(StrEnum):
    """Which process may claim a live operation (`work.actor`)."""

    WORKER = "worker"
    RECONCILER = "reconciler"


class Ending(StrEnum):
    """Which way a plan runs: set once, never changed; backwards if and only if set (R9)."""

    FAILED = "failed"
    CANCELLED = "cancelled"


class StopCause(StrEnum):
    """Why an operation was asked to stop; an intent, judged by R10."""

    CANCEL = "cancel"
    DEADLINE = "deadline"


class Event(StrEnum):
    """What can happen to an operation; the verbs of DESIGN.md, with their endings apart."""

    ADMIT = "admit"
    CLAIM = "claim"
    RENEW = "renew"
    RELEASE = "release"
    BEGIN = "begin"
    RECORD_SUCCEEDED = "record_succeeded"
    RECORD_NOT_APPLIED = "record_not_applied"
    RECORD_REJECTED = "record_rejected"
    RECORD_UNKNOWN = "record_unknown"
    LEASE_ENDED_OPEN = "lease_ended_open"
    RESEND = "resend"
    FOUND_APPLIED = "found_applied"
    FOUND_ABSENT = "found_absent"
    FOUND_NOTHING = "found_nothing"
    CANNOT_SETTLE = "cannot_settle"
    LEAVE_UNCONFIRMED = "leave_unconfirmed"
    RESOLVE_APPLIED = "resolve_applied"
    RESOLVE_ABSENT = "resolve_absent"
    RESOLVE_REJECTED = "resolve_rejected"
    COMPENSATED_BY_HAND = "compensated_by_hand"
    RETRY = "retry"
    WAIT_BEGIN = "wait_begin"
    WAIT_END = "wait_end"
    WAIT_EXPIRED = "wait_expired"
    SIGNAL = "signal"
    STOP_AT_ONCE = "stop_at_once"
    STOP_NOTED = "stop_noted"
    STOP_GRANTED = "stop_granted"
    BEGIN_COMPENSATION = "begin_compensation"
    COMPENSATION_REJECTED = "compensation_rejected"
    FINISH_SUCCEEDED = "finish_succeeded"
    FINISH_STOPPED = "finish_stopped"
    EXHAUSTED = "exhausted"
    LATE_EVIDENCE = "late_evidence"
    TOMBSTONE = "tombstone"


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table. `to` empty: the state stays as it is. `sources` empty: there was none."""

    event: Event
    sources: tuple[State, ...]
    to: tuple[State, ...]
    guard: str
    who: str


_P, _R, _W = State.PENDING, State.RUNNING, State.WAITING
_U, _N, _C = State.UNCERTAIN, State.NEEDS_ATTENTION, State.COMPENSATING

TRANSITIONS: tuple[Transition, ...] = (
    Transition(Event.ADMIT, (), (_P,), "insert won", "API"),
    Transition(
        Event.CLAIM,
        LIVE,
        (),
        "due, unleased or expired; uncertain and needs_attention by the reconciler only",
        "worker, reconciler",
    ),
    Transition(Event.RENEW, LIVE, (), "held_by, unexpired", "keeper"),
    Transition(Event.RELEASE, LIVE, (), "held_by", "worker, reconciler"),
    Transition(
        Event.BEGIN,
        (_P, _R),
        (_R,),
        "held_by, unexpired; no ending, no grantable stop, no Applied "
        "finding; R3 or R4 if attempts exist",
        "executor",
    ),
    Transition(Event.RECORD_SUCCEEDED, (_R, _C), (), "held_by", "executor"),
    Transition(Event.RECORD_NOT_APPLIED, (_R, _C), (), "held_by", "executor"),
    Transition(
        Event.RECORD_REJECTED, (_R,), (_C, _U), "held_by; R5; sets ending=failed", "executor"
    ),
    Transition(Event.RECORD_UNKNOWN, (_R, _C), (_U,), "held_by, no own call open", "executor"),
    Transition(
        Event.LEASE_ENDED_OPEN,
        (_R, _C),
        (_U,),
        "expired, judged again, an attempt is open",
        "next claim",
    ),
    Transition(Event.RESEND, (_U,), (_R, _C), "held_by, unexpired; R3 or R4", "reconciler"),
    Transition(Event.FOUND_APPLIED, (_U, _N), (_R, _C, _U), "held_by", "reconciler"),
    Transition(Event.FOUND_ABSENT, (_U,), (_R, _C, _U, _N), "held_by; counted by R4", "reconciler"),
    Transition(Event.FOUND_NOTHING, (_U, _N), (), "held_by", "reconciler"),
    Transition(
        Event.CANNOT_SETTLE, (_U,), (_N,), "no evidence can be had, or poison", "reconciler"
    ),
    Transition(
        Event.LEAVE_UNCONFIRMED, (_U,), (_R,), "the type declares it; no compensation", "reconciler"
    ),
    Transition(Event.RESOLVE_APPLIED, (_N, _U), (_R, _C), "evidence", "operator"),
    Transition(Event.RESOLVE_ABSENT, (_N, _U), (_R, _C), "R6", "operator"),
    Transition(
        Event.RESOLVE_REJECTED, (_N, _U), (_C, _N), "R6; sets ending=failed if none", "operator"
    ),
    Transition(Event.COMPENSATED_BY_HAND, (_N,), (_C,), "evidence", "operator"),
    Transition(Event.RETRY, (_N,), (_R, _C), "R6, If-Match, nothing in doubt", "operator"),
    Transition(Event.WAIT_BEGIN, (_R,), (_W,), "held_by; no signal stored", "executor"),
    Transition(Event.WAIT_END, (_W,), (_R,), "signal stored, or due", "executor"),
    Transition(Event.WAIT_EXPIRED, (_W,), (_C, _R), "no signal stored", "executor"),
    Transition(Event.SIGNAL, LIVE, (), "wait not over, no ending", "client"),
    Transition(
        Event.STOP_AT_ONCE,
        (_P, _R, _W, _N),
        (State.CANCELLED, State.FAILED),
        "no attempt but not-applied ones, no step done",
        "client, executor",
    ),
    Transition(
        Event.STOP_NOTED, LIVE, (), "no stop cause yet; something was begun", "client, executor"
    ),
    Transition(Event.STOP_GRANTED, (_R, _W), (_C,), "R10", "executor"),
    Transition(
        Event.BEGIN_COMPENSATION, (_C,), (_C,), "nothing in doubt; reverse order", "executor"
    ),
    Transition(Event.COMPENSATION_REJECTED, (_C,), (_N,), "held_by", "executor"),
    Transition(
        Event.FINISH_SUCCEEDED,
        (_R,),
        (State.SUCCEEDED,),
        "all steps done, skipped or unconfirmed",
        "executor",
    ),
    Transition(
        Event.FINISH_STOPPED,
        (_C,),
        (State.FAILED, State.CANCELLED),
        "every done effect with a compensation compensated, nothing in doubt",
        "executor",
    ),
    Transition(Event.EXHAUSTED, (_P, _R, _W, _C), (_N,), "claims used up", "next claim"),
    Transition(Event.LATE_EVIDENCE, TERMINAL, (), "finding inserted, raised", "anyone"),
    Transition(Event.TOMBSTONE, TERMINAL, (), "retention over", "janitor"),
)


def sources(event: Event) -> tuple[State, ...]:
    """The states in which `event` may happen: what guards compare with."""
    return next(row.sources for row in TRANSITIONS if row.event is event)


class Repeat(StrEnum):
    """What a duplicate request is answered, by kind; HTTP gives the number (CONTRACT.md 4, 11)."""

    GOING_ON = "going_on"
    DONE = "done"
    GONE = "gone"


def repeat_of(state: State, *, purged: bool) -> Repeat:
    """What a repeat of the admitting request is answered in `state`; `purged`: the payload was stripped."""
    if state in LIVE:
        return Repeat.GOING_ON
    return Repeat.GONE if purged else Repeat.DONE


def live_state(
    *, attention: bool, in_doubt: bool, ending: Ending | None, waiting: bool, begun: bool
) -> State:
    """The state of a live operation, from its rows (R9).

    `in_doubt`: an attempt is unknown, or open without an owner who is sending it right now. `begun`: any
    attempt or step exists; once true an operation is never pending again.
    """
    if attention:
        return State.NEEDS_ATTENTION
    if in_doubt:
        return State.UNCERTAIN
    if ending is not None:
        return State.COMPENSATING
    if waiting:
        return State.WAITING
    return State.RUNNING if begun else State.PENDING
