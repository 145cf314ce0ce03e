"""What all attempts and findings of one step say together (PROTOCOL.md R4 to R7).

A refusal of a later attempt never ends a step while an earlier one is in doubt, and the not-applied of one
attempt never clears another. Everything here is a query over rows: a repeated write cannot count twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from app.domain.outcome import (
    AttemptRecord,
    FindingKind,
    FindingRecord,
    JsonObject,
    OutcomeKind,
)


@dataclass(frozen=True, slots=True)
class RejectionRules:
    """What R4 and R5 need to know of a provider: does it store refusals and replay success under a key;
    may absence count, and how far (seconds) does its look-up lag behind the effect."""

    stores_rejections: bool
    replays_success: bool
    absence_counts: bool = False
    lag_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NotBegun:
    """No attempt was ever begun."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Attempts were begun and every one of them is known not to have been applied."""


@dataclass(frozen=True, slots=True)
class Done:
    """The effect exists."""

    reference: str | None
    result: JsonObject | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The effect does not exist and the provider will not make it."""

    code: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class InDoubt:
    """Some attempt is open or unknown. `settled_at`: when an `Absent` begins to count (R2, R4)."""

    settled_at: datetime
    arrives_by: datetime
    open_attempts: int


Verdict = NotBegun | Clear | Done | Refusal | InDoubt


def with_late_answers(
    attempts: Sequence[AttemptRecord], findings: Sequence[FindingRecord]
) -> tuple[AttemptRecord, ...]:
    """The attempts, each open one completed by its own late answer where there is one (R7).

    The ledger row keeps its NULL; only the reading changes. An outcome once recorded is never replaced.
    """
    late = {
        finding.attempt_id: finding
        for finding in findings
        if finding.source == "late_answer" and finding.attempt_outcome is not None
    }
    completed = []
    for attempt in attempts:
        answer = late.get(attempt.id) if attempt.outcome is None else None
        completed.append(
            attempt
            if answer is None
            else replace(
                attempt,
                outcome=answer.attempt_outcome,
                code=answer.code,
                detail=answer.detail,
                final=answer.final,
                reference=answer.reference,
                result=answer.result,
            )
        )
    return tuple(completed)


def derive(
    attempts: Sequence[AttemptRecord], findings: Sequence[FindingRecord], rules: RejectionRules
) -> Verdict:
    """The verdict on one step item from all its attempts and findings (PROTOCOL.md R5).

    Rejected only if the answer speaks for the key and (i) nothing else is open or unknown, or (ii) the
    provider stores such answers under the key, or (iii) the refused attempt began after every earlier one
    could no longer arrive, at a provider that replays success.
    """
    attempts = with_evidence(attempts, findings, rules)
    if (done := _done(attempts, findings)) is not None:
        return done
    if not attempts:
        return NotBegun()
    for attempt in attempts:
        if _rejects(attempt, attempts, rules):
            return Refusal(attempt.code or "rejected", attempt.detail)
    if any(attempt.in_doubt for attempt in attempts):
        return InDoubt(
            settled_at=max(attempt.settled_at for attempt in attempts),
            arrives_by=max(attempt.arrives_by for attempt in attempts),
            open_attempts=sum(1 for attempt in attempts if attempt.outcome is None),
        )
    for attempt in attempts:
        if attempt.outcome is OutcomeKind.NOT_APPLIED and attempt.final:
            return Refusal(attempt.code or "request-refused", attempt.detail)
    for finding in findings:
        if finding.source == "operator" and finding.kind is FindingKind.REFUSED:
            return Refusal(finding.code or "rejected-by-operator", finding.detail)
    return Clear()


def _done(attempts: Sequence[AttemptRecord], findings: Sequence[FindingRecord]) -> Done | None:
    for attempt in attempts:
        if attempt.outcome is OutcomeKind.SUCCEEDED:
            return Done(attempt.reference, attempt.result)
    for finding in findings:
        if finding.kind is FindingKind.APPLIED:
            return Done(finding.reference, finding.result)
    return None


def _rejects(
    attempt: AttemptRecord, attempts: Sequence[AttemptRecord], rules: RejectionRules
) -> bool:
    """R5: whether this attempt's answer is a refusal that ends the step."""
    if attempt.outcome is not OutcomeKind.REJECTED:
        return False
    doubtful = [other for other in attempts if other.in_doubt]
    if not doubtful or rules.stores_rejections:
        return True
    return rules.replays_success and all(
        other.began_at < attempt.began_at and other.arrives_by < attempt.began_at
        for other in doubtful
    )


def with_evidence(
    attempts: Sequence[AttemptRecord], findings: Sequence[FindingRecord], rules: RejectionRules
) -> tuple[AttemptRecord, ...]:
    """The attempts as all evidence has them: late answers (R7), absent ones not applied (R4, R6)."""
    answered = with_late_answers(attempts, findings)
    absent = closed_by_absence(answered, findings, rules)
    return tuple(
        replace(attempt, outcome=OutcomeKind.NOT_APPLIED, code="absent", burned=False)
        if attempt.id in absent and attempt.in_doubt
        else attempt
        for attempt in answered
    )


def closed_by_absence(
    attempts: Sequence[AttemptRecord], findings: Sequence[FindingRecord], rules: RejectionRules
) -> frozenset[UUID]:
    """The attempts that counted evidence shows to have had no effect (PROTOCOL.md R4, R6).

    An `Absent` speaks of the attempts begun before it was asked; where two of them count
    (`absences_that_count`) before another attempt begins, those attempts are closed. What a look-up cannot
    see, an operator may say: one finding with evidence closes what could no longer arrive.
    """
    in_order = sorted(attempts, key=lambda attempt: attempt.began_at)
    closed: set[UUID] = set()
    for finding in findings:
        if finding.source == "operator" and finding.kind is not FindingKind.APPLIED:
            closed |= {one.id for one in in_order if one.arrives_by <= finding.asked_at}
    if not rules.absence_counts:
        return frozenset(closed)
    for number, attempt in enumerate(in_order, start=1):
        before, after = in_order[:number], in_order[number:]
        told = [
            finding
            for finding in findings
            if attempt.began_at <= finding.asked_at
            and (not after or finding.asked_at < after[0].began_at)
        ]
        if absences_that_count(before, told, rules.lag_seconds) >= 2:
            closed |= {one.id for one in before}
    return frozenset(closed)


def absences_that_count(
    attempts: Sequence[AttemptRecord], findings: Sequence[FindingRecord], lag_seconds: float
) -> int:
    """How many `Absent` findings are evidence (PROTOCOL.md R4): 0, 1, or 2 and more.

    One counts if it was begun at or after `settled_at` of every attempt; the next, if it was begun after
    the one before was committed, a lag apart. A new attempt voids earlier ones by its `settled_at`. This is
    a query over rows, never a counter, so a repeated write cannot count twice.
    """
    settled_at = max((attempt.settled_at for attempt in attempts), default=None)
    counted = 0
    latest: datetime | None = None
    for finding in sorted(findings, key=lambda found: found.asked_at):
        if finding.kind is not FindingKind.ABSENT or finding.source != "lookup":
            continue
        if settled_at is not None and finding.asked_at < settled_at:
            continue
        if latest is not None and (finding.asked_at - latest).total_seconds() < lag_seconds:
            continue
        if latest is not None and finding.asked_at <= latest:
            continue
        counted += 1
        latest = finding.found_at
    return counted
