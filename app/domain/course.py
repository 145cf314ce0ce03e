"""What comes next for one operation: `next_move` reads its rows and says a move; it touches nothing.

Worker and reconciler ask the same function, each as itself: a worker begins first sends and parks doubt; the
reconciler looks up, sends again under the stored key while the resend deadline allows (R3), and settles what
has a clear answer. It never guesses: what has no clear answer rests, or waits for a human with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, assert_never

import orjson

from app.domain.lifecycle import Actor, Ending, State, StopCause, live_state
from app.domain.operation import History, StepRecord
from app.domain.outcome import FindingKind, JsonObject, OutcomeKind
from app.domain.plan import Effect, OperationType, ResultContext
from app.domain.profile import ProviderClass, ProviderProfile
from app.domain.verdict import (
    Clear,
    Done,
    InDoubt,
    NotBegun,
    Refusal,
    Verdict,
    absences_that_count,
    derive,
)

ATTENTION_LOOKUP_SECONDS = 900.0
"""How often look-ups go on while an operation waits for a human."""


class Attention(StrEnum):
    """Why an operation needs a human; shown to operators, explained in the README."""

    CLAIMS_EXHAUSTED = "claims-exhausted"
    """Its claims ended by expiry too often, one after the other: it may be what kills its workers."""
    ATTEMPTS_EXHAUSTED = "attempts-exhausted"
    """The retry horizon passed after doubt that ended in absence; nothing is known to exist."""
    NO_EVIDENCE_POSSIBLE = "no-evidence-possible"
    """The provider has neither keys nor look-up: only a human can find out."""
    RESEND_DEADLINE_PASSED = "resend-deadline-passed"
    """The provider may have forgotten the key, and there is no look-up."""
    KEY_BURNED = "key-burned"
    """The provider made the key useless, and there is no look-up to learn whether it executed."""
    SUSPECT = "suspect-after-restore"
    """The database was restored; what may have been sent since is not settled yet."""


_ENDED_BY_EVIDENCE = (
    Attention.NO_EVIDENCE_POSSIBLE,
    Attention.RESEND_DEADLINE_PASSED,
    Attention.KEY_BURNED,
)
"""Reasons that are gone once the doubt they spoke of has an answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a move is decided from. `now` is the database's time, `draw` uniform in [0, 1).

    `turn_began_at` is the claim's time: a look-up asked since then belongs to this turn. `answered`: the
    turn just recorded an answer, so the next send waits its back-off, after `floor_seconds` (the answer's
    Retry-After).
    """

    type: OperationType
    profiles: Mapping[str, ProviderProfile]
    input: Any
    actor: Actor
    state: State
    ending: Ending | None
    stop_cause: StopCause | None
    attention: str | None
    deadline: datetime | None
    started_at: datetime
    claims: int
    claims_limit: int
    suspect: bool
    history: History
    now: datetime
    turn_began_at: datetime
    draw: float
    answered: bool = False
    floor_seconds: float = 0.0


class Basis(StrEnum):
    """On what strength a send may be begun; the begin checks it again under the operation's lock."""

    FIRST = "first"
    """Nothing was begun, or every attempt's own recorded answer says not applied."""
    KEY = "key"
    """A re-send under the stored key, beside doubt, before the resend deadline (R3)."""
    EVIDENCE = "evidence"
    """Every attempt was closed by evidence: counted absence (R4), a late answer (R7), an operator (R6)."""


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Send this step now. `fresh_key`: the stored key is proved burned, the next ordinal is used (R18)."""

    step: Effect
    item: int
    basis: Basis
    fresh_key: bool = False


@dataclass(frozen=True, slots=True)
class LookUpStep:
    """Ask the provider what became of this step."""

    step: Effect
    record: StepRecord


@dataclass(frozen=True, slots=True)
class Rest:
    """Give the lease back. `due_in_seconds` None: only evidence, a signal or an operator makes it due."""

    state: State
    actor: Actor
    due_in_seconds: float | None
    attention: Attention | None = None
    ending: Ending | None = None
    note_stop: StopCause | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Finish: `result` if succeeded, else `error`, as JSON objects."""

    state: State
    result: JsonObject | None = None
    error: JsonObject | None = None


Move = BeginStep | LookUpStep | Rest | End


def next_move(case: Case) -> Move:
    """The one decision how an operation goes on (PROTOCOL.md, Transitions)."""
    done: dict[str, Done] = {}
    for step in case.type.steps:
        profile = case.profiles[step.provider]
        verdict = _verdict(case, step, profile)
        match verdict:
            case Done():
                done[step.name] = verdict
            case Refusal():
                return End(State.FAILED, error=_refused(step, verdict, done))
            case InDoubt():
                return _doubt(case, step, profile, verdict)
            case NotBegun() | Clear():
                return _forward(case, step, verdict, done)
            case _:
                assert_never(verdict)
    return End(State.SUCCEEDED, result=_result(case, done))


def _verdict(case: Case, step: Effect, profile: ProviderProfile) -> Verdict:
    return derive(
        case.history.attempts_of(step.name),
        case.history.findings_of(step.name),
        profile.rejection_rules,
    )


def results_so_far(case: Case) -> dict[str, JsonObject]:
    """What each step that is done resulted in, by whatever evidence: what later builders see."""
    verdicts = {
        step.name: _verdict(case, step, case.profiles[step.provider]) for step in case.type.steps
    }
    return {name: told.result or {} for name, told in verdicts.items() if isinstance(told, Done)}


def _result(case: Case, done: Mapping[str, Done]) -> JsonObject:
    return case.type.build_result(
        ResultContext(
            input=case.input,
            references={name: step.reference for name, step in done.items()},
            results={name: step.result or {} for name, step in done.items()},
        )
    )


def _refused(step: Effect, refusal: Refusal, done: Mapping[str, Done]) -> JsonObject:
    kept = [{"step": name, "reference": one.reference} for name, one in done.items()]
    return ({"effects_kept": kept} if kept else {}) | {
        "code": "provider-rejected",
        "detail": refusal.detail or "The provider refused the effect.",
        "retryable": False,
        "step": step.name,
        "provider": step.provider,
        "provider_code": refusal.code,
    }


def stopped_error(cause: StopCause) -> JsonObject:
    """The error of an operation that was stopped before anything was begun (CONTRACT.md 17, 19)."""
    if cause is StopCause.CANCEL:
        return {
            "code": "cancelled",
            "detail": "The operation was cancelled before any effect.",
            "retryable": False,
        }
    return {
        "code": "deadline-exceeded",
        "detail": "The deadline passed before any effect.",
        "retryable": True,
    }


def _forward(case: Case, step: Effect, verdict: NotBegun | Clear, done: Mapping[str, Done]) -> Move:
    """Nothing is in doubt and `step` is to be sent: now, later, or not at all."""
    stop = _stop(case)
    if stop is not None and not done and not case.suspect:
        ended = State.CANCELLED if stop is StopCause.CANCEL else State.FAILED
        return End(ended, error=stopped_error(stop))
    settled = case.attention in _ENDED_BY_EVIDENCE  # that doubt is over: nothing is in doubt here
    if (case.state is State.NEEDS_ATTENTION and not settled) or case.suspect:
        reason = Attention(case.attention) if case.attention else Attention.SUSPECT
        return Rest(State.NEEDS_ATTENTION, Actor.RECONCILER, None, attention=reason)
    if case.claims > case.claims_limit:
        return Rest(
            State.NEEDS_ATTENTION,
            Actor.RECONCILER,
            None,
            attention=Attention.CLAIMS_EXHAUSTED,
            note_stop=stop,
        )
    begun = isinstance(verdict, Clear) or bool(done)
    state = live_state(
        attention=False, in_doubt=False, ending=case.ending, waiting=False, begun=begun
    )
    if isinstance(verdict, Clear):
        horizon = case.started_at + timedelta(seconds=case.type.policy.retry_horizon_seconds)
        if case.now >= horizon and not done:
            if _first_send(case, step).basis is Basis.EVIDENCE:
                return _exhausted(case)
            return End(State.FAILED, error=_unavailable(case, step))
        if case.answered:
            failures = len(case.history.attempts_of(step.name))
            wait = case.type.policy.backoff.wait_seconds(failures, case.draw, case.floor_seconds)
            until_horizon = max((horizon - case.now).total_seconds(), 0.0)
            return Rest(state, Actor.WORKER, min(wait, until_horizon) if not done else wait)
    if case.actor is Actor.RECONCILER:
        return Rest(state, Actor.WORKER, 0.0)
    return _first_send(case, step)


def _first_send(case: Case, step: Effect) -> BeginStep:
    """A send with nothing in doubt, and on what strength."""
    attempts = case.history.attempts_of(step.name)
    if all(attempt.outcome is OutcomeKind.NOT_APPLIED for attempt in attempts):
        return BeginStep(step, 0, Basis.FIRST)
    record = case.history.step(step.name)
    return BeginStep(
        step, 0, Basis.EVIDENCE, fresh_key=record is not None and _burned(case, record)
    )


def _burned(case: Case, record: StepRecord) -> bool:
    return any(
        attempt.burned and attempt.key_ordinal == record.key_ordinal
        for attempt in case.history.attempts_of(record.step, record.item)
    )


def _exhausted(case: Case) -> Rest:
    """The retry horizon passed, and what is known not to exist is known by evidence, not by an answer."""
    return Rest(
        State.NEEDS_ATTENTION,
        Actor.RECONCILER,
        None,
        attention=Attention.ATTEMPTS_EXHAUSTED,
    )


def _stop(case: Case) -> StopCause | None:
    if case.stop_cause is not None:
        return case.stop_cause
    if case.deadline is not None and case.now >= case.deadline:
        return StopCause.DEADLINE
    return None


def _unavailable(case: Case, step: Effect) -> JsonObject:
    last = case.history.attempts_of(step.name)[-1]
    return {
        "code": "provider-unavailable",
        "detail": last.detail or "No send was applied before the retry horizon passed.",
        "retryable": True,
        "step": step.name,
        "provider": step.provider,
        "provider_code": last.code,
    }


def _doubt(case: Case, step: Effect, profile: ProviderProfile, doubt: InDoubt) -> Move:
    """An effect may or may not exist. Nothing here ends the step but an answer (I5)."""
    note_stop = None if case.stop_cause is not None else _stop(case)
    if case.actor is Actor.WORKER:
        wait = _wait_in_doubt(case, step, profile, doubt)
        return Rest(State.UNCERTAIN, Actor.RECONCILER, wait, note_stop=note_stop)
    record = case.history.step(step.name)
    if record is None:  # an attempt without its step: rows nobody wrote this way
        return _attention(case, Attention.NO_EVIDENCE_POSSIBLE, note_stop)
    poison = case.claims > case.claims_limit
    if poison and not case.answered:
        return _attention(case, Attention.CLAIMS_EXHAUSTED, note_stop)
    if profile.lookup is not None and not case.answered and not _asked_this_turn(case, step):
        return LookUpStep(step, record)
    hopeless = _why_no_resend(case, step, profile, record)
    if case.state is State.NEEDS_ATTENTION:
        reason = Attention(case.attention) if case.attention else Attention.SUSPECT
        return _attention(case, reason, note_stop)
    if hopeless is None and not case.answered:
        return BeginStep(step, 0, Basis.KEY)
    if hopeless is not None and not _evidence_may_come(case, step, profile, doubt):
        return _attention(case, hopeless, note_stop)
    wait = _wait_in_doubt(case, step, profile, doubt)
    return Rest(State.UNCERTAIN, Actor.RECONCILER, wait, note_stop=note_stop)


def _attention(case: Case, reason: Attention, note_stop: StopCause | None) -> Rest:
    """To a human, or still with one; look-ups go on where there are any."""
    return Rest(
        State.NEEDS_ATTENTION,
        Actor.RECONCILER,
        ATTENTION_LOOKUP_SECONDS * (1.0 + case.draw),
        attention=Attention(case.attention) if case.attention else reason,
        note_stop=note_stop,
    )


def _asked_this_turn(case: Case, step: Effect) -> bool:
    return any(
        finding.source == "lookup" and finding.asked_at >= case.turn_began_at
        for finding in case.history.findings_of(step.name)
    )


def _evidence_may_come(case: Case, step: Effect, profile: ProviderProfile, doubt: InDoubt) -> bool:
    """Whether look-ups can still settle this: not where they refuse, or are down for a burned key (R18)."""
    if profile.lookup is None:
        return False
    if case.now < doubt.settled_at:
        return True
    asked = [one for one in case.history.findings_of(step.name) if one.source == "lookup"]
    if not asked:
        return True
    last = max(asked, key=lambda one: one.asked_at)
    record = case.history.step(step.name)
    if last.kind is FindingKind.UNAVAILABLE:
        return record is None or not _burned(case, record)
    return last.kind is not FindingKind.REFUSED and profile.lookup.absent_trusted


def _why_no_resend(
    case: Case, step: Effect, profile: ProviderProfile, record: StepRecord
) -> Attention | None:
    """Why no further send under the stored key may be made now; None where it may (R3)."""
    if profile.provider_class is not ProviderClass.HONOURS_KEYS:
        return Attention.NO_EVIDENCE_POSSIBLE
    if _burned(case, record):
        return Attention.KEY_BURNED
    if record.resend_by is None or case.now >= record.resend_by:
        return Attention.RESEND_DEADLINE_PASSED
    return None


def _wait_in_doubt(case: Case, step: Effect, profile: ProviderProfile, doubt: InDoubt) -> float:
    """Seconds until the reconciler's next try: back-off with jitter, but not long past `settled_at`.

    A look-up before `settled_at` is worth its call: `Applied` counts at any time (R4).
    """
    attempts, findings = case.history.attempts_of(step.name), case.history.findings_of(step.name)
    wait = case.type.policy.backoff.wait_seconds(
        len(attempts) + len(findings), case.draw, case.floor_seconds
    )
    if profile.lookup is None:
        return wait if profile.provider_class is ProviderClass.HONOURS_KEYS else 0.0
    if case.floor_seconds > 0:
        return wait
    if case.now < doubt.settled_at:
        return min(wait, (doubt.settled_at - case.now).total_seconds() + case.draw)
    if absences_that_count(attempts, findings, profile.lag_seconds) == 1:
        return profile.lag_seconds + case.draw
    return wait


def as_json(value: JsonObject) -> bytes:
    """A result or an error as the JSON text that is stored."""
    return orjson.dumps(dict(value), option=orjson.OPT_SORT_KEYS)
