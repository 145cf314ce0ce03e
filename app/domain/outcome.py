"""What a send told us (`Outcome`), and what a look-up told us (`Finding`), as values and as stored.

Outcomes belong to attempts; what follows for the step is `app.domain.verdict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal
from uuid import UUID

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The provider says the effect exists. `result` is a JSON object, bounded by the adapter."""

    reference: str | None = None
    result: JsonObject | None = None
    provider_request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A definite refusal that speaks for the key (R5): the effect does not and will not exist.

    `code` is the provider's own code. Only what the profile marks as such becomes this outcome.
    """

    code: str
    detail: str | None = None
    provider_request_id: str | None = None


@dataclass(frozen=True, slots=True)
class NotApplied:
    """This attempt certainly had no effect: nothing was sent, or the answer came before the key was read.

    `final`: the request itself can never be accepted (a provider's validation error the profile calls
    final): the step is rejected once no attempt is open or unknown. `retry_after_seconds` is a floor.
    """

    code: str
    detail: str | None = None
    retry_after_seconds: float | None = None
    final: bool = False
    provider_request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can say whether the effect exists. The default for everything that is not understood.

    `burned`: the profile says this stored answer makes the key useless (R18).
    """

    code: str
    detail: str | None = None
    retry_after_seconds: float | None = None
    burned: bool = False
    provider_request_id: str | None = None


Outcome = Succeeded | Rejected | NotApplied | Unknown


class OutcomeKind(StrEnum):
    """The outcome's name in the database, the metrics and the timeline."""

    SUCCEEDED = "succeeded"
    REJECTED = "rejected"
    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"


def kind_of(outcome: Outcome) -> OutcomeKind:
    """The name under which an outcome is stored and counted."""
    match outcome:
        case Succeeded():
            return OutcomeKind.SUCCEEDED
        case Rejected():
            return OutcomeKind.REJECTED
        case NotApplied():
            return OutcomeKind.NOT_APPLIED
        case Unknown():
            return OutcomeKind.UNKNOWN


@dataclass(frozen=True, slots=True)
class Applied:
    """The look-up found the effect. Counts at any time (R4).

    `created_at`: when the provider says it came into being; an older operation's is no evidence (R15).
    """

    reference: str | None = None
    result: JsonObject | None = None
    created_at: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Absent:
    """The look-up answered cleanly and did not find the effect; counts only as R4 says."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The look-up answered, but the answer is no evidence for or against this effect (R15)."""

    code: str
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The look-up could not be made, or its answer could not be understood."""

    code: str
    detail: str | None = None
    retry_after_seconds: float | None = None


Finding = Applied | Absent | Refused | Unavailable


class FindingKind(StrEnum):
    """The finding's name in the database, the metrics and the timeline."""

    APPLIED = "applied"
    ABSENT = "absent"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"


def finding_kind_of(finding: Finding) -> FindingKind:
    """The name under which a finding is stored and counted."""
    match finding:
        case Applied():
            return FindingKind.APPLIED
        case Absent():
            return FindingKind.ABSENT
        case Refused():
            return FindingKind.REFUSED
        case Unavailable():
            return FindingKind.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One send as the attempt ledger has it. Times are the database's.

    `arrives_by` = send_by + stall + delivery: its bytes cannot arrive later. `settled_at` = arrives_by +
    look-up lag (R2). `outcome` is None while open: begun, and no answer recorded.
    """

    id: UUID
    step: str
    item: int
    generation: int
    began_at: datetime
    send_by: datetime
    arrives_by: datetime
    settled_at: datetime
    outcome: OutcomeKind | None = None
    code: str | None = None
    detail: str | None = None
    final: bool = False
    burned: bool = False
    reference: str | None = None
    result: JsonObject | None = None
    key_ordinal: int = 0

    @property
    def in_doubt(self) -> bool:
        """Open or unknown: its effect may exist."""
        return self.outcome is None or self.outcome is OutcomeKind.UNKNOWN


@dataclass(frozen=True, slots=True)
class FindingRecord:
    """One piece of evidence as stored. `asked_at`: database time before the look-up's first byte.

    A late answer (R7) names its attempt and what the answer made of it; for a look-up both are None.
    """

    id: UUID
    step: str
    item: int
    source: Literal["lookup", "late_answer", "operator"]
    kind: FindingKind
    asked_at: datetime
    found_at: datetime
    attempt_id: UUID | None = None
    attempt_outcome: OutcomeKind | None = None
    code: str | None = None
    detail: str | None = None
    final: bool = False
    reference: str | None = None
    result: JsonObject | None = None


def finding_kind_of_late(outcome: Outcome) -> FindingKind:
    """As which evidence an answer is stored that its own attempt could no longer record (R7)."""
    match outcome:
        case Succeeded():
            return FindingKind.APPLIED
        case Rejected() | NotApplied():
            return FindingKind.REFUSED
        case Unknown():
            return FindingKind.UNAVAILABLE
