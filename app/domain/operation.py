"""Frozen records of one operation: what is admitted, what a claim brings, what a reader sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from app.domain.identity import Direction, DownstreamKey, Fingerprint, IdempotencyKey, OperationId
from app.domain.lifecycle import TERMINAL, Ending, State, StopCause
from app.domain.outcome import AttemptRecord, FindingRecord, OutcomeKind
from app.domain.plan import EffectRequest


class Trust:
    """Until when an owner may believe in its lease, on its own clock (seconds of `service.clock`).

    The keeper's thread writes, everybody else reads; each store is one assignment of one name.
    """

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until

    def end(self) -> None:
        """The lease is known to be lost: nothing more may be begun or sent under it."""
        self.until = float("-inf")


@dataclass(frozen=True, slots=True)
class Lease:
    """Ownership of one operation: what every fenced write carries in WHERE (DESIGN.md I3)."""

    operation: OperationId
    owner_token: UUID
    generation: int
    trust: Trust = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class NewOperation:
    """One operation to admit. `input` is the JSON text of the validated input, as stored and forwarded."""

    id: OperationId
    tenant: str
    type: str
    type_version: int
    key: IdempotencyKey
    fingerprint: Fingerprint
    input: bytes
    metadata: Mapping[str, str]
    semantic_headers: Mapping[str, str]
    not_before: datetime | None
    deadline: datetime | None
    priority: int
    retention_seconds: float
    tombstone_seconds: float


@dataclass(frozen=True, slots=True)
class Holder:
    """The operation (or tombstone) that holds a scope: what a repeat is judged by (CONTRACT.md 5, 7)."""

    id: OperationId
    type_version: int
    fingerprint: Fingerprint
    state: State
    purged: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A begun step item with its fixed request. `resend_by` is None where the provider has no keys."""

    step: str
    item: int
    direction: Direction
    provider: str
    key: DownstreamKey
    key_ordinal: int
    request: EffectRequest
    first_began_at: datetime
    resend_by: datetime | None


@dataclass(frozen=True, slots=True)
class History:
    """All rows of one operation that decisions are derived from, read under its lock or its lease."""

    steps: tuple[StepRecord, ...] = ()
    attempts: tuple[AttemptRecord, ...] = ()
    findings: tuple[FindingRecord, ...] = ()

    def step(self, name: str, item: int = 0) -> StepRecord | None:
        """The begun step of that name and item, or None."""
        for record in self.steps:
            if record.step == name and record.item == item:
                return record
        return None

    def attempts_of(self, name: str, item: int = 0) -> tuple[AttemptRecord, ...]:
        """The attempts of one step item, oldest first."""
        return tuple(a for a in self.attempts if a.step == name and a.item == item)

    def findings_of(self, name: str, item: int = 0) -> tuple[FindingRecord, ...]:
        """The findings about one step item, oldest first."""
        return tuple(f for f in self.findings if f.step == name and f.item == item)


@dataclass(frozen=True, slots=True)
class Claimed:
    """One claimed operation: the lease, the `work` row as the claim left it, the inputs, the history.

    `claimed_at` is the database's time of the claim; `taken_over`: the lease before it ended by expiry.
    """

    lease: Lease
    tenant: str
    type: str
    type_version: int
    state: State
    ending: Ending | None
    stop_cause: StopCause | None
    attention: str | None
    deadline: datetime | None
    claims: int
    taken_over: bool
    suspect: bool
    claimed_at: datetime
    due_at: datetime
    created_at: datetime
    not_before: datetime | None
    uncertain_since: datetime | None
    retried_at: datetime | None
    key_digest: bytes
    input: bytes
    history: History

    @property
    def id(self) -> OperationId:
        """The operation's id."""
        return self.lease.operation


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """What a reader learns of one attempt."""

    step: str
    item: int
    direction: Direction
    outcome: OutcomeKind | None
    reference: str | None


@dataclass(frozen=True, slots=True)
class OperationView:
    """One operation as a reader sees it. `result` and `error` are JSON texts as stored.

    `idempotency_expires_at` is a lower bound until the operation is done (R14).
    """

    id: OperationId
    tenant: str
    type: str
    type_version: int
    state: State
    version: int
    created_at: datetime
    updated_at: datetime
    completed_at: datetime | None
    idempotency_expires_at: datetime
    metadata: Mapping[str, str]
    cancel_requested: bool
    attention: str | None
    result: bytes | None
    error: bytes | None
    purged: bool
    attempts: tuple[AttemptSummary, ...] = ()
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the answer is final (CONTRACT.md 16)."""
        return self.state in TERMINAL
