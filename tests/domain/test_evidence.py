"""Absence and doubt, as tables and properties beside those of tests/domain/test_verdict.py (R4, R5, I5)."""

from __future__ import annotations

import itertools
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.outcome import AttemptRecord, FindingKind, FindingRecord, OutcomeKind
from app.domain.verdict import (
    Clear,
    Done,
    InDoubt,
    NotBegun,
    Refusal,
    RejectionRules,
    absences_that_count,
    closed_by_absence,
    derive,
)
from tests.domain.rows import LAG, attempt, finding, late

PLAIN = RejectionRules(stores_rejections=False, replays_success=True)
STORES = RejectionRules(stores_rejections=True, replays_success=True)
COUNTS = RejectionRules(
    stores_rejections=False, replays_success=False, absence_counts=True, lag_seconds=LAG
)
DONE, NO, NOT, UNKNOWN = (
    OutcomeKind.SUCCEEDED,
    OutcomeKind.REJECTED,
    OutcomeKind.NOT_APPLIED,
    OutcomeKind.UNKNOWN,
)
ABSENT = FindingKind.ABSENT


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], NotBegun),
        ([NOT, NOT], Clear),
        ([None], InDoubt),
        ([UNKNOWN, NOT], InDoubt),  # counterexample 10: one refused connection clears no other
        ([NOT, UNKNOWN], InDoubt),
        ([None, NOT], InDoubt),
        ([NOT, NO], Refusal),
        ([NO, NOT], Refusal),
        ([DONE, NO], Done),  # succeeded: any attempt
        ([NO, DONE], Done),
        ([UNKNOWN, DONE], Done),
        ([None, NO], InDoubt),  # counterexamples 8 and 9: the first may still be executed
        ([UNKNOWN, NO], InDoubt),
        ([NO, UNKNOWN], InDoubt),
    ],
    ids=str,
)
def test_attempts_close_together(outcomes: list[OutcomeKind | None], verdict: type) -> None:
    attempts = [attempt(n, began=n, outcome=one) for n, one in enumerate(outcomes)]
    assert type(derive(attempts, [], PLAIN)) is verdict


def absent(*asked: float) -> list[FindingRecord]:
    return [finding(ABSENT, when) for when in asked]


@pytest.mark.parametrize(
    ("attempts", "findings", "count"),
    [
        ([attempt(0, 0.0, UNKNOWN)], absent(18.0, 22.0), 2),
        # Counterexample 5: settled is counted from the latest attempt, not from the first.
        ([attempt(0, 0.0, NOT), attempt(1, 10.0, UNKNOWN)], absent(18.0, 22.0), 0),
        ([attempt(0, 0.0, NOT), attempt(1, 10.0, UNKNOWN)], absent(28.0, 32.0), 2),
        # Counterexample 6: judged by when it was asked, not by when it was recorded.
        ([attempt(0, 0.0, UNKNOWN)], [finding(ABSENT, 17.9, found=60.0)], 0),
        # Counterexample 7: any new attempt voids earlier ones.
        ([attempt(0, 0.0, UNKNOWN), attempt(1, 30.0, UNKNOWN)], absent(18.0, 22.0), 0),
        ([attempt(0, 0.0, UNKNOWN), attempt(1, 30.0, UNKNOWN)], absent(18.0, 22.0, 48.0), 1),
        # A lag apart, counted from when the first was in; and begun after that.
        ([attempt(0, 0.0, UNKNOWN)], absent(18.0, 21.4), 1),
        ([attempt(0, 0.0, UNKNOWN)], absent(18.0, 21.5), 2),
        ([attempt(0, 0.0, UNKNOWN)], [finding(ABSENT, 18.0, found=30.0), *absent(25.0)], 1),
        # Nothing else is absence.
        ([attempt(0, 0.0, UNKNOWN)], [*absent(18.0), finding(FindingKind.REFUSED, 25.0)], 1),
        ([attempt(0, 0.0, UNKNOWN)], [*absent(18.0), finding(FindingKind.UNAVAILABLE, 25.0)], 1),
        ([attempt(0, 0.0, UNKNOWN)], [finding(ABSENT, 25.0, source="operator")], 0),
    ],
)
def test_which_absences_count(
    attempts: list[AttemptRecord], findings: list[FindingRecord], count: int
) -> None:
    assert absences_that_count(attempts, findings, LAG) == count
    assert absences_that_count(attempts, findings[::-1], LAG) == count


def test_begun_in_the_instant_the_first_was_in_is_not_after_it() -> None:
    """With no lag at all the second must still be begun after the first was committed."""
    told = [finding(ABSENT, 18.0, found=19.0), finding(ABSENT, 19.0)]
    assert absences_that_count([attempt(0, 0.0, UNKNOWN)], told, 0.0) == 1


def test_closed_attempts_stay_closed_and_the_next_is_in_doubt_by_itself() -> None:
    told = absent(18.0, 22.0)
    attempts = [attempt(0, 0.0, UNKNOWN), attempt(1, 30.0)]
    assert closed_by_absence(attempts, told, COUNTS) == {UUID(int=0)}
    assert isinstance(derive(attempts, told, COUNTS), InDoubt)
    attempts[1] = attempt(1, 30.0, NOT)
    assert isinstance(derive(attempts, told, COUNTS), Clear)


def test_absence_asked_after_the_next_send_closes_nothing_alone() -> None:
    """Counterexample 7: one before and one after a re-send are not two; both sends stay in doubt."""
    attempts = [attempt(0, 0.0, UNKNOWN), attempt(1, 30.0, UNKNOWN)]
    told = absent(20.0, 40.0)
    assert closed_by_absence(attempts, told, COUNTS) == frozenset()
    assert isinstance(derive(attempts, told, COUNTS), InDoubt)


def test_absence_contradicts_no_answer() -> None:
    """Only what is in doubt is closed: a success stays one, whatever look-ups say (B27, a lying replica)."""
    told = absent(18.0, 22.0)
    assert isinstance(derive([attempt(0, 0.0, DONE)], told, COUNTS), Done)
    assert isinstance(derive([attempt(0, 0.0, NO)], told, COUNTS), Refusal)


SENT = st.builds(
    attempt,
    number=st.integers(0, 9),
    began=st.floats(0, 60),
    outcome=st.sampled_from([None, *OutcomeKind]),
    final=st.booleans(),
)
TOLD = st.one_of(
    st.builds(
        finding,
        kind=st.sampled_from([ABSENT, FindingKind.UNAVAILABLE, FindingKind.REFUSED]),
        asked=st.floats(0, 120),
    ),
    st.builds(late, number=st.integers(0, 9), outcome=st.sampled_from(OutcomeKind)),
)


@given(
    st.lists(SENT, max_size=4, unique_by=lambda one: one.id),
    st.lists(TOLD, max_size=4, unique_by=lambda one: one.attempt_id or one.id),
    st.sampled_from([PLAIN, STORES, COUNTS]),
)
def test_the_order_of_rows_decides_nothing(
    attempts: list[AttemptRecord], findings: list[FindingRecord], rules: RejectionRules
) -> None:
    orders = itertools.permutations(attempts)
    assert len({type(derive(list(order), findings, rules)) for order in orders}) == 1


@given(st.lists(SENT, max_size=5, unique_by=lambda one: one.id))
def test_without_evidence_doubt_never_turns_into_clearance(attempts: list[AttemptRecord]) -> None:
    """I5: an open or unknown attempt is cleared by nothing but evidence."""
    told = derive(attempts, [], PLAIN)
    if any(one.in_doubt for one in attempts):
        assert not isinstance(told, (Clear, NotBegun))
    if isinstance(told, Clear):
        assert all(one.outcome is NOT for one in attempts)
    if any(one.outcome is DONE for one in attempts):
        assert isinstance(told, Done)
