"""`next_move` over a grid of states, classes and histories, and its numbers and reasons as tables.

tests/domain/test_course.py has the properties; here stands what each single case says. PROTOCOL.md,
'Transitions' and R3, R4, R7, R9, R10, R16, R18.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from app.domain.course import (
    ATTENTION_LOOKUP_SECONDS,
    Attention,
    Basis,
    BeginStep,
    Case,
    End,
    LookUpStep,
    Move,
    Rest,
    next_move,
    results_so_far,
    stopped_error,
)
from app.domain.identity import Direction, DownstreamKey
from app.domain.lifecycle import LIVE, Actor, Ending, State, StopCause
from app.domain.operation import History, StepRecord
from app.domain.outcome import AttemptRecord, FindingKind, FindingRecord, OutcomeKind
from app.domain.plan import Effect, EffectRequest, OperationType
from app.domain.policy import Backoff, TypePolicy
from app.domain.profile import KeyRules, LookupRules, ProviderProfile
from app.domain.verdict import InDoubt, derive
from tests.domain.rows import LAG, at, attempt, finding, late

DONE, NO, NOT, UNKNOWN = (
    OutcomeKind.SUCCEEDED,
    OutcomeKind.REJECTED,
    OutcomeKind.NOT_APPLIED,
    OutcomeKind.UNKNOWN,
)
WORKER, RECONCILER = Actor.WORKER, Actor.RECONCILER
DOUBTFUL = (State.UNCERTAIN, State.NEEDS_ATTENTION)


def profile_of(*, keys: bool = False, lookup: bool = False) -> ProviderProfile:
    return ProviderProfile(
        name="test",
        pinned_on="2026-01-01",
        answers=(),
        keys=KeyRules("K", memory_seconds=600.0) if keys else None,
        lookup=LookupRules("key", lag_seconds=LAG) if lookup else None,
        send_window_seconds=5.0,
        stall_seconds=5.0,
        delivery_seconds=5.0,
    )


KEYED, BOTH = profile_of(keys=True), profile_of(keys=True, lookup=True)
LOOKED_UP, NEITHER = profile_of(lookup=True), profile_of()
PROFILES = {"keys": KEYED, "keys and look-up": BOTH, "look-up": LOOKED_UP, "neither": NEITHER}
EACH_CLASS = pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))


def type_of(*steps: str, **policy: Any) -> OperationType:
    return OperationType(
        name="test.one",
        version=1,
        title="A test",
        input=BaseModel,
        result=BaseModel,
        steps=tuple(
            Effect(step, "test", lambda context: EffectRequest("POST", "/", b""))
            for step in steps or ("send",)
        ),
        build_result=lambda context: {"references": dict(context.references)},
        policy=TypePolicy(**{"backoff": Backoff(10.0, 100.0), **policy}),
    )


def case_of(
    attempts: tuple[AttemptRecord, ...] = (),
    findings: tuple[FindingRecord, ...] = (),
    *,
    profile: ProviderProfile = KEYED,
    type: OperationType | None = None,
    resend_by: float | None = 585.0,
    now: float = 100.0,
    deadline: float | None = None,
    **changes: Any,
) -> Case:
    record = StepRecord(
        step="send",
        item=0,
        direction=Direction.FORWARD,
        provider="test",
        key=DownstreamKey("k"),
        key_ordinal=max((one.key_ordinal for one in attempts), default=0),
        request=EffectRequest("POST", "/", b""),
        first_began_at=at(0),
        resend_by=None if resend_by is None or profile.keys is None else at(resend_by),
    )
    given: dict[str, Any] = {
        "type": type or type_of(),
        "profiles": {"test": profile},
        "input": None,
        "actor": WORKER,
        "state": State.RUNNING if attempts else State.PENDING,
        "ending": None,
        "stop_cause": None,
        "attention": None,
        "deadline": None if deadline is None else at(deadline),
        "started_at": at(0),
        "claims": 1,
        "claims_limit": 5,
        "suspect": False,
        "history": History((record,) if attempts else (), attempts, findings),
        "now": at(now),
        "turn_began_at": at(now - 1.0),
        "draw": 0.5,
    }
    return Case(**{**given, **changes})


UNSURE = (attempt(0, 0.0, UNKNOWN),)
OPEN = (attempt(0, 0.0),)
REFUSED_ONCE = (attempt(0, 0.0, NOT, code="http-503", detail="Busy."),)
IN_DOUBT = {"actor": RECONCILER, "state": State.UNCERTAIN}


# -- forward ---------------------------------------------------------------------------------------------


@EACH_CLASS
@pytest.mark.parametrize("attempts", [(), REFUSED_ONCE], ids=["nothing", "not applied"])
def test_a_worker_sends(profile: ProviderProfile, attempts: tuple[AttemptRecord, ...]) -> None:
    case = case_of(attempts, profile=profile)
    assert next_move(case) == BeginStep(case.type.steps[0], 0, Basis.FIRST)
    expected = Rest(State.RUNNING if attempts else State.PENDING, WORKER, 0.0)
    assert next_move(replace(case, actor=RECONCILER)) == expected, "sends are the workers'"


@pytest.mark.parametrize(("failures", "span"), [(1, 10.0), (2, 20.0), (3, 40.0), (9, 100.0)])
def test_after_an_answer_it_waits_its_back_off(failures: int, span: float) -> None:
    """Full jitter under an exponential ceiling, after any Retry-After floor."""
    attempts = tuple(attempt(n, n, NOT) for n in range(failures))
    rest = next_move(case_of(attempts, answered=True, floor_seconds=7.0))
    assert rest == Rest(State.RUNNING, WORKER, 7.0 + span / 2)


def test_a_wait_does_not_go_past_the_retry_horizon() -> None:
    kind = type_of(retry_horizon_seconds=103.0)
    rest = next_move(case_of(REFUSED_ONCE, type=kind, answered=True, floor_seconds=50.0))
    assert rest == Rest(State.RUNNING, WORKER, 3.0)


def test_the_retry_horizon_ends_what_is_known_not_to_be_applied() -> None:
    kind = type_of(retry_horizon_seconds=100.0)
    error = {
        "code": "provider-unavailable",
        "detail": "Busy.",
        "retryable": True,
        "step": "send",
        "provider": "test",
        "provider_code": "http-503",
    }
    assert next_move(case_of(REFUSED_ONCE, type=kind)) == End(State.FAILED, error=error)
    assert isinstance(next_move(case_of(REFUSED_ONCE, type=kind, now=99.9)), BeginStep)


def test_the_retry_horizon_after_counted_absence_needs_a_human() -> None:
    absent = tuple(finding(FindingKind.ABSENT, when) for when in (30.0, 40.0))
    kind = type_of(retry_horizon_seconds=50.0)
    move = next_move(case_of(UNSURE, absent, profile=LOOKED_UP, type=kind, actor=RECONCILER))
    assert isinstance(move, Rest)
    assert (move.state, move.attention) == (State.NEEDS_ATTENTION, Attention.ATTEMPTS_EXHAUSTED)


def test_steps_go_in_order_and_the_result_is_built_from_all() -> None:
    kind = type_of("one", "two")
    first = attempt(0, 0.0, DONE, step="one", reference="r1", result={"a": 1})
    second = attempt(1, 20.0, DONE, step="two", reference="r2")
    case = case_of((first,), type=kind)
    assert next_move(case) == BeginStep(kind.steps[1], 0, Basis.FIRST)
    assert results_so_far(case) == {"one": {"a": 1}}
    end = next_move(case_of((first, second), type=kind))
    assert end == End(State.SUCCEEDED, result={"references": {"one": "r1", "two": "r2"}})


def test_a_refusal_ends_it() -> None:
    move = next_move(case_of((attempt(0, 0.0, NO, code="declined", detail="No."),)))
    error = {
        "code": "provider-rejected",
        "detail": "No.",
        "retryable": False,
        "step": "send",
        "provider": "test",
        "provider_code": "declined",
    }
    assert move == End(State.FAILED, error=error)


# -- stop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [(), REFUSED_ONCE], ids=["nothing", "not applied"])
@pytest.mark.parametrize(
    ("stop", "deadline", "state"),
    [
        (StopCause.CANCEL, None, State.CANCELLED),
        (StopCause.DEADLINE, None, State.FAILED),
        (None, 100.0, State.FAILED),
        (StopCause.CANCEL, 50.0, State.CANCELLED),
    ],
)
@pytest.mark.parametrize("attention", [None, "claims-exhausted", "no-evidence-possible"])
def test_a_stop_with_nothing_begun(
    attempts: tuple[AttemptRecord, ...],
    stop: StopCause | None,
    deadline: float | None,
    state: State,
    attention: str | None,
) -> None:
    """R10: in every live state, `needs_attention` included."""
    live = State.NEEDS_ATTENTION if attention else State.RUNNING
    actor = RECONCILER if attention else WORKER
    case = case_of(
        attempts, actor=actor, stop_cause=stop, deadline=deadline, state=live, attention=attention
    )
    assert next_move(case) == End(state, error=stopped_error(stop or StopCause.DEADLINE))


def test_a_stop_past_an_effect_does_not_stop() -> None:
    """R10: an effect without a compensation is done, so it goes on."""
    kind = type_of("one", "two")
    done = attempt(0, 0.0, DONE, step="one")
    case = case_of((done,), type=kind, stop_cause=StopCause.CANCEL)
    assert next_move(case) == BeginStep(kind.steps[1], 0, Basis.FIRST)


@EACH_CLASS
@pytest.mark.parametrize("actor", list(Actor))
def test_a_passed_deadline_in_doubt_is_noted_and_decides_nothing(
    profile: ProviderProfile, actor: Actor
) -> None:
    move = next_move(case_of(UNSURE, profile=profile, actor=actor, deadline=50.0, answered=True))
    assert isinstance(move, Rest)
    assert move.note_stop is StopCause.DEADLINE
    assert move.state in DOUBTFUL


# -- doubt -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "resend_by", "burned", "expected"),
    [
        (KEYED, 585.0, False, Basis.KEY),
        (KEYED, 100.0, False, Attention.RESEND_DEADLINE_PASSED),
        (KEYED, None, False, Attention.RESEND_DEADLINE_PASSED),
        (KEYED, 585.0, True, Attention.KEY_BURNED),
        (BOTH, 585.0, False, LookUpStep),
        (BOTH, 100.0, False, LookUpStep),
        (LOOKED_UP, None, False, LookUpStep),
        (NEITHER, None, False, Attention.NO_EVIDENCE_POSSIBLE),
    ],
)
def test_what_a_reconciler_does_first(
    profile: ProviderProfile, resend_by: float | None, burned: bool, expected: object
) -> None:
    """DESIGN.md, 4: the table 'after Unknown'."""
    unsure = (attempt(0, 0.0, UNKNOWN, burned=burned),)
    case = case_of(unsure, profile=profile, resend_by=resend_by, **IN_DOUBT)
    move = next_move(case)
    if isinstance(expected, Basis):
        assert move == BeginStep(case.type.steps[0], 0, expected)
    elif isinstance(expected, Attention):
        assert isinstance(move, Rest)
        assert (move.state, move.attention) == (State.NEEDS_ATTENTION, expected)
    else:
        assert isinstance(move, LookUpStep)


@pytest.mark.parametrize(
    ("profile", "resend_by", "expected"),
    [(BOTH, 585.0, BeginStep), (BOTH, 100.0, Rest), (LOOKED_UP, None, Rest)],
)
def test_after_this_turns_look_up(
    profile: ProviderProfile, resend_by: float | None, expected: type
) -> None:
    """Asked once a turn; then the key, where it still helps; else it rests in doubt, without a human."""
    told = (finding(FindingKind.UNAVAILABLE, 99.5),)
    move = next_move(case_of(UNSURE, told, profile=profile, resend_by=resend_by, **IN_DOUBT))
    assert isinstance(move, expected)
    if isinstance(move, Rest):
        assert move.state is State.UNCERTAIN


@pytest.mark.parametrize(
    ("told", "now", "floor", "wait"),
    [
        ((), 17.0, 0.0, 1.5),  # the instant absence begins to count, and a little jitter
        ((), 17.0, 30.0, 35.0),  # never before what the provider asked for
        ((finding(FindingKind.ABSENT, 99.5),), 100.0, 0.0, LAG + 0.5),  # R4: a lag after the first
        ((finding(FindingKind.UNAVAILABLE, 99.5),), 100.0, 0.0, 10.0),  # back-off of two tries
    ],
)
def test_when_it_asks_again(
    told: tuple[FindingRecord, ...], now: float, floor: float, wait: float
) -> None:
    case = case_of(
        UNSURE, told, profile=LOOKED_UP, now=now, answered=True, floor_seconds=floor, **IN_DOUBT
    )
    assert next_move(case) == Rest(State.UNCERTAIN, RECONCILER, wait)


@pytest.mark.parametrize(("ordinal", "fresh"), [(0, True), (1, False)])
def test_a_burned_key_is_replaced_once_absence_is_proved(ordinal: int, fresh: bool) -> None:
    """R18: only the key that burned; the next one is not thrown away for it."""
    absent = tuple(finding(FindingKind.ABSENT, when) for when in (60.0, 70.0))
    attempts = (
        attempt(0, 0.0, UNKNOWN, burned=True),
        attempt(1, 20.0, UNKNOWN, key_ordinal=ordinal),
    )
    case = case_of(attempts, absent, profile=BOTH)
    assert next_move(case) == BeginStep(case.type.steps[0], 0, Basis.EVIDENCE, fresh_key=fresh)


# -- a human ---------------------------------------------------------------------------------------------


@EACH_CLASS
@pytest.mark.parametrize(("claims", "poison"), [(5, False), (6, True)])
def test_poison_goes_to_a_human(profile: ProviderProfile, claims: int, poison: bool) -> None:
    """CASES.md B10: also in doubt, before anything is asked or sent once more."""
    for attempts, more in (((), {}), (REFUSED_ONCE, {}), (UNSURE, IN_DOUBT)):
        move = next_move(case_of(attempts, profile=profile, claims=claims, **more))
        attention = getattr(move, "attention", None)
        assert (attention is Attention.CLAIMS_EXHAUSTED) is poison


@EACH_CLASS
def test_from_needs_attention_only_look_ups_go_on(profile: ProviderProfile) -> None:
    case = case_of(
        UNSURE,
        profile=profile,
        actor=RECONCILER,
        state=State.NEEDS_ATTENTION,
        attention="claims-exhausted",
    )
    move = next_move(case)
    if profile.lookup is not None:
        assert isinstance(move, LookUpStep)
        told = (finding(FindingKind.UNAVAILABLE, 99.5),)
        move = next_move(replace(case, history=replace(case.history, findings=told)))
    wait = 1.5 * ATTENTION_LOOKUP_SECONDS
    expected = Rest(State.NEEDS_ATTENTION, RECONCILER, wait, attention=Attention.CLAIMS_EXHAUSTED)
    assert move == expected


@pytest.mark.parametrize(
    ("attention", "goes_on"),
    [
        (Attention.NO_EVIDENCE_POSSIBLE, True),
        (Attention.RESEND_DEADLINE_PASSED, True),
        (Attention.KEY_BURNED, True),
        (Attention.CLAIMS_EXHAUSTED, False),
        (Attention.ATTEMPTS_EXHAUSTED, False),
        (Attention.SUSPECT, False),
    ],
)
def test_late_evidence_ends_the_reasons_that_spoke_of_doubt(
    attention: Attention, goes_on: bool
) -> None:
    """R7: the reconciler on `needs_attention` acts on it; poison and restores stay a human's."""
    case = case_of(
        OPEN,
        (late(0, NOT),),
        profile=NEITHER,
        actor=RECONCILER,
        state=State.NEEDS_ATTENTION,
        attention=attention.value,
    )
    stays = Rest(State.NEEDS_ATTENTION, RECONCILER, None, attention=attention)
    assert next_move(case) == (Rest(State.RUNNING, WORKER, 0.0) if goes_on else stays)
    done = replace(case, history=replace(case.history, findings=(late(0, DONE),)))
    assert isinstance(next_move(done), End)


@pytest.mark.parametrize("attempts", [(), REFUSED_ONCE], ids=["nothing", "not applied"])
@pytest.mark.parametrize("stop", [None, StopCause.CANCEL])
def test_a_suspect_operation_begins_and_ends_nothing(
    attempts: tuple[AttemptRecord, ...], stop: StopCause | None
) -> None:
    """R16: what the copy does not know may have been sent."""
    move = next_move(case_of(attempts, suspect=True, stop_cause=stop))
    assert isinstance(move, Rest)
    assert (move.state, move.attention) == (State.NEEDS_ATTENTION, Attention.SUSPECT)


# -- the grid --------------------------------------------------------------------------------------------

HISTORIES: tuple[tuple[tuple[AttemptRecord, ...], tuple[FindingRecord, ...]], ...] = (
    ((), ()),
    (OPEN, ()),
    (UNSURE, ()),
    ((attempt(0, 0.0, UNKNOWN, burned=True),), ()),
    (REFUSED_ONCE, ()),
    ((*UNSURE, attempt(1, 30.0, NOT)), ()),
    ((*UNSURE, attempt(1, 1.0, NO)), ()),
    ((attempt(0, 0.0, NO),), ()),
    ((attempt(0, 0.0, DONE),), ()),
    (UNSURE, (finding(FindingKind.APPLIED, 50.0),)),
    (UNSURE, (finding(FindingKind.ABSENT, 50.0),)),
    (UNSURE, (finding(FindingKind.ABSENT, 50.0), finding(FindingKind.ABSENT, 60.0))),
    (OPEN, (late(0, NOT),)),
)


def holds(case: Case, move: Move) -> None:
    """What no move may ever do, whatever the rows say."""
    profile = case.profiles["test"]
    verdict = derive(case.history.attempts, case.history.findings, profile.rejection_rules)
    doubt = isinstance(verdict, InDoubt)
    match move:
        case End(state, result, error):
            assert not doubt, "nothing ends in doubt (I5)"
            assert (result is None) is (state is not State.SUCCEEDED)
            assert (error is None) is (state is State.SUCCEEDED)
        case BeginStep(basis=basis):
            assert doubt is (basis is Basis.KEY)
            assert case.actor is (RECONCILER if doubt else WORKER)
            assert case.state is not State.NEEDS_ATTENTION
            assert basis is Basis.KEY or not case.suspect
        case LookUpStep():
            assert profile.lookup is not None
            assert case.actor is RECONCILER
        case Rest(state, actor, due_in, attention):
            assert due_in is None or due_in >= 0
            assert (attention is not None) is (state is State.NEEDS_ATTENTION)
            assert actor is RECONCILER or state not in DOUBTFUL
            assert state in DOUBTFUL or not doubt, "doubt is shown"
            assert due_in is not None or state is State.NEEDS_ATTENTION, "stranded (I7)"


def test_the_grid() -> None:
    """Every state with each actor that may hold it, class, history; stopped, answered, poison, suspect."""
    seen: set[type] = set()
    grid = itertools.product(
        LIVE, Actor, PROFILES.values(), HISTORIES, (None, *StopCause), (False, True), (1, 6), (False, True)
    )  # fmt: skip
    for state, actor, profile, (attempts, findings), stop, answered, claims, suspect in grid:
        if state in DOUBTFUL and actor is WORKER:
            continue  # ck_work_doubt_is_reconciled
        case = case_of(
            attempts,
            findings,
            profile=profile,
            state=state,
            actor=actor,
            stop_cause=stop,
            answered=answered,
            claims=claims,
            suspect=suspect,
            ending=Ending.FAILED if state is State.COMPENSATING else None,
            attention="claims-exhausted" if state is State.NEEDS_ATTENTION else None,
        )
        move = next_move(case)
        seen.add(type(move))
        holds(case, move)
    assert seen == {BeginStep, LookUpStep, Rest, End}
