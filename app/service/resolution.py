"""Operators: settle a doubt by hand, or let an operation that needs attention go on (CONTRACT.md 23, R6).

Every act carries evidence or a reason, is idempotent under the operator's key, is judged under the
operation's lock and commits with its audit row. What the operator says is a finding like any other: the
verdict on the step is derived from all rows, and the operation goes on as `next_move` says, in a worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import orjson

from app.domain.identity import Direction, OperationId, new_id
from app.domain.lifecycle import Actor, Event, State, live_state, sources
from app.domain.operation import History, OperationView
from app.domain.outcome import FindingKind, JsonObject
from app.domain.plan import OperationType
from app.domain.profile import ProviderProfile
from app.domain.registry import Registry
from app.domain.verdict import InDoubt, derive
from app.service.notifying import Notifier
from app.storage import findings, resolution, views
from app.storage.database import Database, Transaction
from app.storage.leases import Locked
from app.storage.notices import Channel
from app.storage.resolution import Act
from app.telemetry import Event as Logged
from app.telemetry import Metric, Telemetry


class Verdict(StrEnum):
    """What an operator found out about a step."""

    APPLIED = "applied"
    REJECTED = "rejected"
    ABSENT = "absent"


_KINDS = {
    Verdict.APPLIED: FindingKind.APPLIED,
    Verdict.REJECTED: FindingKind.REFUSED,
    Verdict.ABSENT: FindingKind.ABSENT,
}
_EVENTS = {
    Verdict.APPLIED: Event.RESOLVE_APPLIED,
    Verdict.REJECTED: Event.RESOLVE_REJECTED,
    Verdict.ABSENT: Event.RESOLVE_ABSENT,
}


@dataclass(frozen=True, slots=True)
class Request:
    """Who asks, for which operation, under which key, at which version (If-Match; None: any).

    `tenant` None: an operator at the terminal, who may act on every tenant's.
    """

    operation: OperationId
    tenant: str | None
    by: str
    key: str
    reason: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Resolve:
    """The verdict on one step, with its evidence; `reference` and `result` where it was applied."""

    step: str
    verdict: Verdict
    evidence: str
    item: int = 0
    direction: Direction = Direction.FORWARD
    reference: str | None = None
    result: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The act stands; `repeated`: it already stood under this key."""

    view: OperationView
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class NotFound:
    """No such operation of this tenant."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The act was refused and nothing was changed. `code` is stable; `retry_after_seconds` where it helps."""

    code: str
    detail: str
    retry_after_seconds: float | None = None


Answer = Accepted | NotFound | Refusal


class Operators:
    """The use cases of people with the scope `operator`."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        profiles: Mapping[str, ProviderProfile],
        notifier: Notifier,
        telemetry: Telemetry,
    ) -> None:
        self._database = database
        self._registry = registry
        self._profiles = profiles
        self._notifier = notifier
        self._telemetry = telemetry

    async def resolve(self, request: Request, what: Resolve) -> Answer:
        """Settle the doubt about one step by hand.

        `applied` is always allowed; the others only once nothing that was sent can still arrive (R6).

        Raises:
            StoreUnavailable: nothing was changed, as far as is known; the same key is safe to repeat.
        """
        act = _act(request, "resolve", what)
        async with self._database.transaction() as tx:
            row = await resolution.lock_of_tenant(tx, request.operation, request.tenant)
            done = await _done_before(tx, request, act)
            refusal = done if isinstance(done, Refusal) else None
            if done is None:
                refusal = await self._judge_resolve(tx, request, what, row)
            if done is None and refusal is None and row is not None:
                await resolution.add_evidence(
                    tx,
                    request.operation,
                    act,
                    kind=_KINDS[what.verdict],
                    reference=what.reference,
                    result=what.result,
                )
                await resolution.add_act(tx, request.operation, act)
                await self._go_on(tx, request, row, restarts_horizon=False)
        return await self._answer(request, "resolve", refusal, repeated=done is not None)

    async def retry(self, request: Request) -> Answer:
        """Let an operation that needs attention go on, with nothing in doubt; its retry horizon restarts.

        Raises:
            StoreUnavailable: as `resolve`.
        """
        act = _act(request, "retry", None)
        async with self._database.transaction() as tx:
            row = await resolution.lock_of_tenant(tx, request.operation, request.tenant)
            done = await _done_before(tx, request, act)
            refusal = done if isinstance(done, Refusal) else None
            if done is None:
                refusal = await self._judge_retry(tx, request, row)
            if done is None and refusal is None and row is not None:
                await resolution.add_act(tx, request.operation, act)
                await self._go_on(tx, request, row, restarts_horizon=True)
        return await self._answer(request, "retry", refusal, repeated=done is not None)

    async def _answer(
        self, request: Request, action: str, refusal: Refusal | None, *, repeated: bool
    ) -> Answer:
        async with self._database.transaction() as tx:
            view = (await views.read(tx, [request.operation])).get(request.operation)
        if view is None or request.tenant not in (None, view.tenant):
            return NotFound()
        if refusal is not None:
            return refusal
        if not repeated:
            self._telemetry.count(Metric.OPERATOR_ACTIONS, action=action)
            self._telemetry.event(
                Logged.OPERATOR_ACTED,
                operation=str(request.operation),
                action=action,
                by=request.by,
            )
            self._notifier.announce(Channel.WORK)
            self._notifier.announce(Channel.CHANGED, [request.operation])
        return Accepted(view, repeated)

    # -- judging, under the lock ----------------------------------------------------------------------------

    async def _judge_resolve(
        self, tx: Transaction, request: Request, what: Resolve, row: Locked | None
    ) -> Refusal | None:
        if row is None:
            return Refusal("operation-done", "The operation is done; its answer never changes.")
        if (stale := _stale(request, row)) is not None:
            return stale
        if row.state not in sources(_EVENTS[what.verdict]):
            return Refusal(
                "not-in-doubt", f"Nothing is to be resolved while the operation is {row.state}."
            )
        history = (await findings.history(tx, [request.operation]))[request.operation]
        attempts = history.attempts_of(what.step, what.item)
        if what.direction is not Direction.FORWARD or not attempts:
            return Refusal("step-not-begun", f"No send of step {what.step} was ever begun.")
        if what.verdict is Verdict.APPLIED:
            return None
        return _not_settled([attempt.arrives_by for attempt in attempts], row.now)

    async def _judge_retry(
        self, tx: Transaction, request: Request, row: Locked | None
    ) -> Refusal | None:
        if row is None:
            return Refusal("operation-done", "The operation is done; its answer never changes.")
        if (stale := _stale(request, row)) is not None:
            return stale
        if row.state not in sources(Event.RETRY):
            return Refusal("not-stopped", f"The operation is {row.state}; it goes on by itself.")
        history = (await findings.history(tx, [request.operation]))[request.operation]
        late = _not_settled([attempt.arrives_by for attempt in history.attempts], row.now)
        if late is not None:
            return late
        type = await self._type_of(tx, request)
        if type is None or self._in_doubt(type, history):
            return Refusal("in-doubt", "A step is in doubt: resolve it first, with evidence.")
        return None

    def _in_doubt(self, type: OperationType, history: History) -> bool:
        return any(
            isinstance(
                derive(
                    history.attempts_of(step.name),
                    history.findings_of(step.name),
                    self._profiles[step.provider].rejection_rules,
                ),
                InDoubt,
            )
            for step in type.steps
        )

    async def _type_of(self, tx: Transaction, request: Request) -> OperationType | None:
        view = (await views.read(tx, [request.operation]))[request.operation]
        return self._registry.get(view.type, view.type_version)

    async def _go_on(
        self, tx: Transaction, request: Request, row: Locked, *, restarts_horizon: bool
    ) -> None:
        """The state the rows now give (R9); a worker decides what follows, another doubt stays in doubt."""
        history = (await findings.history(tx, [request.operation]))[request.operation]
        type = await self._type_of(tx, request)
        doubt = type is None or self._in_doubt(type, history)
        state = live_state(
            attention=doubt and row.attention is not None,
            in_doubt=doubt,
            ending=row.ending,
            waiting=False,
            begun=True,  # never back to pending (R9)
        )
        doubtful = state in (State.UNCERTAIN, State.NEEDS_ATTENTION)
        await resolution.go_on(
            tx,
            request.operation,
            state=state,
            actor=Actor.RECONCILER if doubtful else Actor.WORKER,
            attention=row.attention if state is State.NEEDS_ATTENTION else None,
            restarts_horizon=restarts_horizon,
        )


def _act(request: Request, action: str, what: Resolve | None) -> Act:
    meaning = {
        "action": action,
        "reason": request.reason,
        "what": None
        if what is None
        else [
            what.step,
            what.item,
            what.direction,
            what.verdict,
            what.evidence,
            what.reference,
            what.result,
        ],
    }
    return Act(
        id=new_id(),
        action=action,
        by=request.by,
        reason=request.reason,
        key_digest=hashlib.sha256(f"{request.tenant or ''}\0{request.key}".encode()).digest(),
        evidence=None if what is None else what.evidence,
        step=None if what is None else what.step,
        item=None if what is None else what.item,
        direction=None if what is None else what.direction,
        meaning=hashlib.sha256(orjson.dumps(meaning, option=orjson.OPT_SORT_KEYS)).digest(),
    )


async def _done_before(tx: Transaction, request: Request, act: Act) -> Refusal | bool | None:
    """None: this key is new. True: this very act stands. A refusal: the key did something else."""
    done = await resolution.find_act(tx, request.operation, act.key_digest)
    if done is None:
        return None
    if act.meaning is not None and done.meaning == act.meaning.hex():
        return True
    return Refusal("idempotency-key-reused", "This key was used for another act on the operation.")


def _stale(request: Request, row: Locked) -> Refusal | None:
    if request.version is None or request.version == row.version:
        return None
    return Refusal(
        "version-mismatch", f"The operation is at version {row.version}, not {request.version}."
    )


def _not_settled(arrivals: Sequence[datetime], now: datetime) -> Refusal | None:
    """R6: what was sent could still arrive, so absence and refusal cannot be known yet."""
    left = max(((arrival - now).total_seconds() for arrival in arrivals), default=0.0)
    if left <= 0:
        return None
    return Refusal(
        "attempt-not-settled",
        f"A send could still arrive for {left:.0f} s; ask again after that.",
        retry_after_seconds=left,
    )
