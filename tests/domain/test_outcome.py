"""Outcomes and findings by their stored names, and as which evidence a late answer is kept (R7)."""

from __future__ import annotations

from typing import get_args

import pytest

from app.domain.outcome import (
    Absent,
    Applied,
    Finding,
    FindingKind,
    NotApplied,
    Outcome,
    OutcomeKind,
    Refused,
    Rejected,
    Succeeded,
    Unavailable,
    Unknown,
    finding_kind_of,
    finding_kind_of_late,
    kind_of,
)

OUTCOMES = {
    OutcomeKind.SUCCEEDED: Succeeded(),
    OutcomeKind.REJECTED: Rejected("x"),
    OutcomeKind.NOT_APPLIED: NotApplied("x"),
    OutcomeKind.UNKNOWN: Unknown("x"),
}
FINDINGS = {
    FindingKind.APPLIED: Applied(),
    FindingKind.ABSENT: Absent(),
    FindingKind.REFUSED: Refused("x"),
    FindingKind.UNAVAILABLE: Unavailable("x"),
}


def test_every_outcome_and_finding_has_a_name_of_its_own() -> None:
    assert {kind_of(outcome): outcome for outcome in OUTCOMES.values()} == OUTCOMES
    assert {finding_kind_of(finding): finding for finding in FINDINGS.values()} == FINDINGS
    assert {type(outcome) for outcome in OUTCOMES.values()} == set(get_args(Outcome))
    assert {type(finding) for finding in FINDINGS.values()} == set(get_args(Finding))
    assert set(OUTCOMES) == set(OutcomeKind)
    assert set(FINDINGS) == set(FindingKind)


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (OutcomeKind.SUCCEEDED, FindingKind.APPLIED),
        (OutcomeKind.REJECTED, FindingKind.REFUSED),
        (OutcomeKind.NOT_APPLIED, FindingKind.REFUSED),
        (OutcomeKind.UNKNOWN, FindingKind.UNAVAILABLE),
    ],
)
def test_no_late_answer_is_kept_as_absence(outcome: OutcomeKind, kind: FindingKind) -> None:
    """Absence is what look-ups and operators show; an answer speaks of its own attempt alone."""
    assert finding_kind_of_late(OUTCOMES[outcome]) is kind
