"""What comes next for one operation, over everything its rows may say (PROTOCOL.md, Transitions; I5, I6)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.course import (
    Attention,
    Basis,
    BeginStep,
    Case,
    End,
    LookUpStep,
    Move,
    Rest,
    next_move,
)
from app.domain.identity import Direction, DownstreamKey
from app.domain.lifecycle import Actor, State, StopCause
from app.domain.operation import History, StepRecord
from app.domain.outcome import AttemptRecord, FindingKind, FindingRecord, OutcomeKind
from app.domain.plan import EffectRequest
from app.domain.profile import KeyRules, LookupRules, ProviderClass, ProviderProfile
from app.domain.verdict import Clear, InDoubt, NotBegun, derive, with_evidence
from app.operations.payments_charge import operation_type
from tests.domain.test_verdict import NOW, absent, at, late, sent

PROFILES = {
    "keys": ProviderProfile(
        "payments", "2026-01-01", (), 5.0, keys=KeyRules("K", memory_seconds=86_400)
    ),
    "keys and look-up": ProviderProfile(
        "payments",
        "2026-01-01",
        (),
        5.0,
        keys=KeyRules("K", memory_seconds=86_400),
        lookup=LookupRules("key", lag_seconds=2),
    ),
    "look-up": ProviderProfile(
        "payments", "2026-01-01", (), 5.0, lookup=LookupRules("reference", lag_seconds=2)
    ),
    "neither": ProviderProfile("payments", "2026-01-01", (), 5.0),
}
INPUT = operation_type.input.model_validate({"amount": 1, "currency": "eur", "source": "tok_ok"})
RESEND_BY = 1000.0


def case(
    profile: ProviderProfile,
    attempts: list[AttemptRecord],
    findings: list[FindingRecord] | None = None,
    *,
    actor: Actor = Actor.WORKER,
    state: State = State.RUNNING,
    now: float = 500.0,
    **more: object,
) -> Case:
    record = StepRecord(
        "charge",
        0,
        Direction.FORWARD,
        "payments",
        DownstreamKey("k"),
        0,
        EffectRequest("POST", "/v1/charges", b"{}"),
        NOW,
        at(RESEND_BY) if profile.keys else None,
    )
    made = Case(
        type=operation_type,
        profiles={"payments": profile},
        input=INPUT,
        actor=actor,
        state=state,
        ending=None,
        stop_cause=None,
        attention="no-evidence-possible" if state is State.NEEDS_ATTENTION else None,
        deadline=None,
        started_at=NOW,
        claims=1,
        claims_limit=5,
        suspect=False,
        history=History((record,) if attempts else (), tuple(attempts), tuple(findings or ())),
        now=at(now),
        turn_began_at=at(now),
        draw=0.5,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def move_of(*args: object, **more: object) -> Move:
    return next_move(case(*args, **more))  # type: ignore[arg-type]


KEYED, NEITHER = PROFILES["keys"], PROFILES["neither"]
BOTH, LOOKED_UP = PROFILES["keys and look-up"], PROFILES["look-up"]
UNKNOWN = OutcomeKind.UNKNOWN
RECONCILER = {"actor": Actor.RECONCILER, "state": State.UNCERTAIN}


def test_a_first_send() -> None:
    move = move_of(KEYED, [], state=State.PENDING)
    assert move == BeginStep(operation_type.steps[0], 0, Basis.FIRST)


def test_a_worker_parks_doubt() -> None:
    for profile in PROFILES.values():
        move = move_of(profile, [sent(0, UNKNOWN)])
        assert isinstance(move, Rest)
        assert (move.state, move.actor) == (State.UNCERTAIN, Actor.RECONCILER)


def test_a_reconciler_asks_before_it_sends() -> None:
    assert isinstance(move_of(BOTH, [sent(0, UNKNOWN)], **RECONCILER), LookUpStep)
    asked = [replace(absent(500), asked_at=at(500))]
    move = move_of(BOTH, [sent(490, UNKNOWN)], asked, **RECONCILER)
    assert isinstance(move, BeginStep)
    assert move.basis is Basis.KEY


@pytest.mark.parametrize(("now", "sends"), [(RESEND_BY - 0.1, True), (RESEND_BY, False)])
def test_the_resend_deadline(now: float, sends: bool) -> None:
    """R3, and what follows where nothing can be asked."""
    move = move_of(KEYED, [sent(0, UNKNOWN)], now=now, **RECONCILER)
    assert isinstance(move, BeginStep) is sends
    if not sends:
        assert isinstance(move, Rest)
        assert move.attention is Attention.RESEND_DEADLINE_PASSED


def test_neither_goes_to_a_human() -> None:
    move = move_of(NEITHER, [sent(0, UNKNOWN)], **RECONCILER)
    assert isinstance(move, Rest)
    assert (move.state, move.attention) == (
        State.NEEDS_ATTENTION,
        Attention.NO_EVIDENCE_POSSIBLE,
    )


def test_counted_absence_goes_back_to_a_worker_and_on_evidence() -> None:
    attempts, findings = [sent(0, UNKNOWN)], [absent(100), absent(110)]
    rest = move_of(LOOKED_UP, attempts, findings, **RECONCILER)
    assert rest == Rest(State.RUNNING, Actor.WORKER, 0.0)
    move = move_of(LOOKED_UP, attempts, findings)
    assert isinstance(move, BeginStep)
    assert (move.basis, move.fresh_key) == (Basis.EVIDENCE, False)


def test_a_burned_key_is_changed_only_then() -> None:
    """R18."""
    attempts = [sent(0, UNKNOWN, burned=True)]
    doubt = move_of(BOTH, attempts, [absent(500)], **RECONCILER)
    assert isinstance(doubt, Rest)
    assert doubt.state is State.UNCERTAIN
    move = move_of(BOTH, attempts, [absent(100), absent(110)])
    assert isinstance(move, BeginStep)
    assert move.fresh_key


def test_the_horizon_ends_what_was_never_applied() -> None:
    horizon = operation_type.policy.retry_horizon_seconds
    move = move_of(KEYED, [sent(0, OutcomeKind.NOT_APPLIED)], now=horizon)
    assert isinstance(move, End)
    assert move.error is not None
    assert (move.error["code"], move.error["retryable"]) == ("provider-unavailable", True)


@pytest.mark.parametrize("cause", list(StopCause))
def test_a_stop_is_granted_where_nothing_was_begun(cause: StopCause) -> None:
    """R10, and never beside doubt."""
    move = move_of(KEYED, [sent(0, OutcomeKind.NOT_APPLIED)], stop_cause=cause)
    assert isinstance(move, End)
    assert not isinstance(move_of(KEYED, [sent(0, UNKNOWN)], stop_cause=cause), End)


def test_a_floor_is_kept_with_jitter_on_top() -> None:
    """B32: nobody returns before Retry-After."""
    move = move_of(KEYED, [sent(0, OutcomeKind.NOT_APPLIED)], answered=True, floor_seconds=7.0)
    assert isinstance(move, Rest)
    assert move.due_in_seconds is not None
    assert move.due_in_seconds > 7.0


OUTCOMES = st.sampled_from([None, *OutcomeKind])
ATTEMPTS = st.lists(
    st.tuples(st.floats(0, 2000), OUTCOMES, st.booleans(), st.integers(0, 1)), max_size=3
)


@settings(max_examples=400)
@given(
    profile=st.sampled_from(list(PROFILES.values())),
    history=ATTEMPTS,
    asked=st.lists(st.floats(0, 2100), max_size=3),
    late_first=st.sampled_from([None, OutcomeKind.NOT_APPLIED, OutcomeKind.REJECTED]),
    actor=st.sampled_from(list(Actor)),
    state=st.sampled_from([State.RUNNING, State.UNCERTAIN, State.NEEDS_ATTENTION]),
    now=st.floats(0, 100_000),
    stop=st.sampled_from([None, *StopCause]),
    claims=st.integers(1, 8),
    answered=st.booleans(),
)
def test_whatever_the_rows_say(
    profile: ProviderProfile,
    history: list[tuple[float, OutcomeKind | None, bool, int]],
    asked: list[float],
    late_first: OutcomeKind | None,
    actor: Actor,
    state: State,
    now: float,
    stop: StopCause | None,
    claims: int,
    answered: bool,
) -> None:
    attempts = [
        sent(began, outcome, burned=burned and outcome is UNKNOWN, key_ordinal=ordinal)
        for began, outcome, burned, ordinal in history
    ]
    findings = [absent(seconds) for seconds in asked]
    if late_first is not None and attempts and attempts[0].outcome is None:
        findings.append(late(attempts[0], late_first))
    made = case(
        profile, attempts, findings, actor=actor, state=state, now=now,
        stop_cause=stop, claims=claims, answered=answered,
    )  # fmt: skip
    move = next_move(made)
    rules = profile.rejection_rules
    verdict = derive(attempts, findings, rules)
    doubtful = [one for one in with_evidence(attempts, findings, rules) if one.in_doubt]
    if isinstance(move, End) and move.state is not State.SUCCEEDED and doubtful:
        assert rules.stores_rejections or rules.replays_success  # R5, ways 2 and 3; test_verdict.py
        known = with_evidence(attempts, findings, rules)
        assert any(one.outcome is OutcomeKind.REJECTED for one in known)
    if isinstance(move, BeginStep):
        _may_be_begun(move, made, verdict, doubtful)
    if isinstance(move, LookUpStep):
        assert actor is Actor.RECONCILER
        assert profile.lookup is not None
    if isinstance(move, Rest):
        assert move.due_in_seconds is None or move.due_in_seconds >= 0
        assert (move.attention is not None) == (move.state is State.NEEDS_ATTENTION)
        if isinstance(verdict, InDoubt):
            assert move.state in (State.UNCERTAIN, State.NEEDS_ATTENTION)


def _may_be_begun(
    move: BeginStep, made: Case, verdict: object, doubtful: list[AttemptRecord]
) -> None:
    assert made.claims <= made.claims_limit
    profile = made.profiles["payments"]
    if move.basis is Basis.KEY:
        assert made.actor is Actor.RECONCILER
        assert made.state is not State.NEEDS_ATTENTION
        assert profile.provider_class is ProviderClass.HONOURS_KEYS
        assert made.now < at(RESEND_BY)
        assert not any(one.burned and one.key_ordinal == 0 for one in made.history.attempts)
        return
    assert made.actor is Actor.WORKER
    assert doubtful == []
    assert isinstance(verdict, (NotBegun, Clear))
    if move.basis is Basis.FIRST:
        assert all(one.outcome is OutcomeKind.NOT_APPLIED for one in made.history.attempts)


def test_applied_ends_attention() -> None:
    """Transitions, look-up Applied: also from needs_attention."""
    found = replace(
        absent(100), kind=FindingKind.APPLIED, reference="ch_1", result={"charge": "ch_1"}
    )
    move = move_of(
        NEITHER, [sent(0, UNKNOWN)], [found], actor=Actor.RECONCILER, state=State.NEEDS_ATTENTION
    )
    assert isinstance(move, End)
    assert move.state is State.SUCCEEDED


def test_overdue_is_no_verdict() -> None:
    """I5: a thousand years change nothing."""
    made = case(LOOKED_UP, [sent(0, UNKNOWN)], **RECONCILER)
    move = next_move(replace(made, now=NOW + timedelta(days=365_000)))
    assert isinstance(move, LookUpStep)
