"""One step's verdict from all its attempts and findings: PROTOCOL.md R4 to R7 and its counterexamples."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

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
    closed_by_absence,
    derive,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STORES = RejectionRules(stores_rejections=True, replays_success=True)
REPLAYS = RejectionRules(stores_rejections=False, replays_success=True)
NEITHER = RejectionRules(stores_rejections=False, replays_success=False)
LOOKED_UP = RejectionRules(
    stores_rejections=False, replays_success=False, absence_counts=True, lag_seconds=2
)
UNKNOWN, REJECTED = OutcomeKind.UNKNOWN, OutcomeKind.REJECTED
NOT_APPLIED, SUCCEEDED = OutcomeKind.NOT_APPLIED, OutcomeKind.SUCCEEDED


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def sent(began: float, outcome: OutcomeKind | None, **more: object) -> AttemptRecord:
    """An attempt begun then: sent by +10 s, arrived by +70 s, settled at +72 s."""
    record = AttemptRecord(
        id=uuid4(),
        step="charge",
        item=0,
        generation=1,
        began_at=at(began),
        send_by=at(began + 10),
        arrives_by=at(began + 70),
        settled_at=at(began + 72),
        outcome=outcome,
        code="card_declined" if outcome is REJECTED else None,
    )
    return replace(record, **more)  # type: ignore[arg-type]


def told(asked: float, kind: FindingKind, source: str = "lookup", **more: object) -> FindingRecord:
    """A finding asked for then and found a tenth of a second later."""
    record = FindingRecord(
        id=uuid4(),
        step="charge",
        item=0,
        source=source,  # type: ignore[arg-type]
        kind=kind,
        asked_at=at(asked),
        found_at=at(asked + 0.1),
    )
    return replace(record, **more)  # type: ignore[arg-type]


def absent(asked: float) -> FindingRecord:
    return told(asked, FindingKind.ABSENT)


def late(attempt: AttemptRecord, outcome: OutcomeKind, **more: object) -> FindingRecord:
    kind = FindingKind.APPLIED if outcome is SUCCEEDED else FindingKind.REFUSED
    return told(
        500,
        kind,
        "late_answer",
        attempt_id=attempt.id,
        attempt_outcome=outcome,
        **more,
    )


class TestRejection:
    """R5: what a refusal may end."""

    def test_8_a_refusal_before_the_key_is_read_ends_nothing(self) -> None:
        """Counterexample 8: 401, 429, 400 on a re-send are not-applied of that attempt only."""
        verdict = derive([sent(0, UNKNOWN), sent(1, NOT_APPLIED)], [], STORES)
        assert isinstance(verdict, InDoubt)

    def test_8_nor_does_a_final_one(self) -> None:
        attempts = [sent(0, UNKNOWN), sent(1, NOT_APPLIED, final=True)]
        assert isinstance(derive(attempts, [], STORES), InDoubt)

    def test_9_an_unstored_rejection_beside_doubt_ends_nothing(self) -> None:
        """Counterexample 9: the first may still arrive and be executed."""
        assert isinstance(derive([sent(0, UNKNOWN), sent(1, REJECTED)], [], REPLAYS), InDoubt)
        assert isinstance(derive([sent(0, None), sent(1, REJECTED)], [], REPLAYS), InDoubt)

    def test_10_not_applied_of_one_does_not_clear_another(self) -> None:
        """Counterexample 10."""
        assert isinstance(derive([sent(0, UNKNOWN), sent(1, NOT_APPLIED)], [], NEITHER), InDoubt)

    def test_way_1_nothing_else_in_doubt(self) -> None:
        verdict = derive([sent(0, NOT_APPLIED), sent(1, REJECTED)], [], NEITHER)
        assert verdict == Refusal("card_declined", None)

    def test_way_2_stored_under_the_key(self) -> None:
        assert isinstance(derive([sent(0, UNKNOWN), sent(1, REJECTED)], [], STORES), Refusal)

    @pytest.mark.parametrize(("began", "ends"), [(70, False), (70.1, True)])
    def test_way_3_begun_when_nothing_earlier_could_arrive(self, began: float, ends: bool) -> None:
        """At a provider that replays success, and not a moment too early."""
        attempts = [sent(0, UNKNOWN), sent(began, REJECTED)]
        assert isinstance(derive(attempts, [], REPLAYS), Refusal) is ends
        assert isinstance(derive(attempts, [], NEITHER), InDoubt)

    def test_way_3_not_with_a_later_one_in_doubt(self) -> None:
        attempts = [sent(0, UNKNOWN), sent(100, REJECTED), sent(101, None)]
        assert isinstance(derive(attempts, [], REPLAYS), InDoubt)

    def test_a_final_refusal_of_the_request_once_nothing_is_in_doubt(self) -> None:
        verdict = derive([sent(0, NOT_APPLIED, final=True, code="parameter_invalid")], [], NEITHER)
        assert verdict == Refusal("parameter_invalid", None)


class TestSuccess:
    def test_any_attempt_will_do(self) -> None:
        attempts = [sent(0, SUCCEEDED, reference="ch_1"), sent(1, REJECTED)]
        assert derive(attempts, [], STORES) == Done("ch_1", None)

    def test_applied_counts_at_any_time(self) -> None:
        """R4: also long before anything is settled, and beside a refusal."""
        found = told(0.5, FindingKind.APPLIED, reference="ch_2")
        assert derive([sent(0, UNKNOWN), sent(1, REJECTED)], [found], STORES) == Done("ch_2", None)


class TestLateAnswers:
    """R7, counterexample 14: the answer of a fenced-out owner is kept and used."""

    @pytest.mark.parametrize(
        ("outcome", "verdict"), [(SUCCEEDED, Done), (REJECTED, Refusal), (NOT_APPLIED, Clear)]
    )
    def test_it_completes_its_own_attempt(self, outcome: OutcomeKind, verdict: type) -> None:
        attempt = sent(0, None)
        assert isinstance(derive([attempt], [late(attempt, outcome)], NEITHER), verdict)

    def test_it_does_not_speak_for_another(self) -> None:
        first, second = sent(0, None), sent(1, None)
        assert isinstance(derive([first, second], [late(second, NOT_APPLIED)], NEITHER), InDoubt)

    def test_what_was_recorded_stays(self) -> None:
        """13: a stale refusal never replaces a recorded outcome."""
        attempt = sent(0, UNKNOWN)
        assert isinstance(derive([attempt], [late(attempt, REJECTED)], STORES), InDoubt)


class TestAbsence:
    """R4: two clean absences, late enough, a lag apart, with no attempt between."""

    def test_two_that_count_clear_the_attempt(self) -> None:
        assert isinstance(derive([sent(0, UNKNOWN)], [absent(72), absent(75)], LOOKED_UP), Clear)

    def test_one_is_not_enough(self) -> None:
        assert isinstance(derive([sent(0, UNKNOWN)], [absent(72)], LOOKED_UP), InDoubt)

    def test_6_it_counts_from_when_it_was_asked(self) -> None:
        """Counterexample 6: asked too early, recorded late."""
        early = told(71, FindingKind.ABSENT, found_at=at(300))
        assert isinstance(derive([sent(0, UNKNOWN)], [early, absent(400)], LOOKED_UP), InDoubt)

    def test_5_every_attempt_must_be_settled(self) -> None:
        """Counterexample 5: the first is long settled, the second just begun."""
        attempts = [sent(0, UNKNOWN), sent(100, None)]
        findings = [absent(101), absent(110)]
        assert isinstance(derive(attempts, findings, LOOKED_UP), InDoubt)

    def test_7_a_new_attempt_voids_what_was_counted(self) -> None:
        """Counterexample 7: one before it and one after it are not two."""
        attempts = [sent(0, UNKNOWN), sent(80, UNKNOWN)]
        assert isinstance(derive(attempts, [absent(75), absent(160)], LOOKED_UP), InDoubt)

    @pytest.mark.parametrize(("second", "counts"), [(73.9, False), (74.2, True)])
    def test_a_lag_apart(self, second: float, counts: bool) -> None:
        verdict = derive([sent(0, UNKNOWN)], [absent(72), absent(second)], LOOKED_UP)
        assert isinstance(verdict, Clear) is counts

    def test_the_second_is_asked_after_the_first_was_found(self) -> None:
        slow = told(72, FindingKind.ABSENT, found_at=at(90))
        assert isinstance(derive([sent(0, UNKNOWN)], [slow, absent(80)], LOOKED_UP), InDoubt)

    def test_closed_attempts_stay_closed_for_what_comes_later(self) -> None:
        """After counted absence a refusal of the next attempt is the only word there is."""
        attempts = [sent(0, UNKNOWN), sent(100, REJECTED)]
        assert isinstance(derive(attempts, [absent(72), absent(75)], LOOKED_UP), Refusal)

    def test_where_absence_is_not_trusted_it_never_counts(self) -> None:
        assert isinstance(derive([sent(0, UNKNOWN)], [absent(72), absent(75)], NEITHER), InDoubt)

    def test_unavailable_and_refused_are_no_evidence(self) -> None:
        findings = [
            told(s, k) for s, k in ((72, FindingKind.UNAVAILABLE), (75, FindingKind.REFUSED))
        ]
        assert isinstance(derive([sent(0, UNKNOWN)], findings, LOOKED_UP), InDoubt)

    @pytest.mark.parametrize(("asked", "closes"), [(69, False), (70, True)])
    def test_an_operator_closes_what_can_no_longer_arrive(self, asked: float, closes: bool) -> None:
        """R6, counterexample 11."""
        word = told(asked, FindingKind.ABSENT, "operator")
        verdict = derive([sent(0, UNKNOWN)], [word], NEITHER)
        assert isinstance(verdict, Clear) is closes

    def test_an_operators_rejection_ends_the_step(self) -> None:
        word = told(70, FindingKind.REFUSED, "operator", code="rejected-by-operator")
        assert derive([sent(0, UNKNOWN)], [word], NEITHER) == Refusal("rejected-by-operator", None)


def test_nothing_begun() -> None:
    assert derive([], [], STORES) == NotBegun()


def test_in_doubt_says_until_when() -> None:
    verdict = derive([sent(0, UNKNOWN), sent(5, None)], [], NEITHER)
    assert verdict == InDoubt(settled_at=at(77), arrives_by=at(75), open_attempts=1)


OUTCOMES = st.sampled_from([None, UNKNOWN, REJECTED, NOT_APPLIED, SUCCEEDED])
HISTORIES = st.lists(st.tuples(st.floats(0, 500), OUTCOMES), max_size=4)
RULES = st.sampled_from([STORES, REPLAYS, NEITHER, LOOKED_UP])


@given(HISTORIES, RULES, st.lists(st.floats(0, 1000), max_size=4))
def test_a_step_never_ends_beside_doubt_but_by_r5(
    history: list[tuple[float, OutcomeKind | None]], rules: RejectionRules, asked: list[float]
) -> None:
    """I5: whatever the rows, a refusal or a clear step has no attempt left whose effect may exist."""
    attempts = [sent(began, outcome) for began, outcome in history]
    findings = [absent(seconds) for seconds in asked]
    verdict = derive(attempts, findings, rules)
    closed: frozenset[UUID] = closed_by_absence(attempts, findings, rules)
    doubtful = [one for one in attempts if one.in_doubt and one.id not in closed]
    if any(one.outcome is SUCCEEDED for one in attempts):
        assert isinstance(verdict, Done)
    elif isinstance(verdict, Clear):
        assert not doubtful
    elif isinstance(verdict, Refusal) and doubtful:
        assert rules.stores_rejections or rules.replays_success
        if not rules.stores_rejections:
            refused = max(one.began_at for one in attempts if one.outcome is REJECTED)
            assert all(one.arrives_by < refused for one in doubtful)
    if not rules.absence_counts:
        assert closed == frozenset()
