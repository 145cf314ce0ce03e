"""Admission: the first POST with a key creates an operation, every other answers for it.

The insert decides (CASES.md K8). An error at COMMIT is settled by running admission again with the same id:
the insert waits for the transaction in doubt, and whoever holds the scope then is either this very id or
somebody else's (PROTOCOL.md R13); a plain read would not see a COMMIT that is still on its way. Replay and
mismatch are decided in one function, `_judge`, on every path (K7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from app.domain.errors import StoreUnavailable
from app.domain.identity import (
    FINGERPRINT_VERSION,
    IdempotencyKey,
    OperationId,
    Scope,
    fingerprint,
)
from app.domain.lifecycle import Repeat, State, repeat_of
from app.domain.operation import Holder, NewOperation, OperationView
from app.domain.registry import Registry
from app.domain.request import FieldError, ReadRequest, read_request
from app.failpoints import Failpoint, Failpoints
from app.service.group_commit import GroupCommit
from app.service.notifying import Notifier
from app.storage import operations, views
from app.storage.database import Database
from app.storage.notices import Channel
from app.telemetry import Event, Metric, Telemetry

KeyBound = Literal[True, False, "unknown"]
_ROUNDS = 5
OVERTAKE_AFTER_SECONDS = 0.1
"""A key that somebody else's open transaction holds does not hold up other keys for longer."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One POST as it came: who, under which key, the body's members, the headers (lower case)."""

    tenant: str
    key: IdempotencyKey
    members: Mapping[str, object]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The operation was created by this request, and is committed."""

    view: OperationView


@dataclass(frozen=True, slots=True)
class Replayed:
    """The key holds this operation, admitted by the same request before."""

    view: OperationView


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key holds an operation of another request; nothing was changed."""

    holder: OperationId


@dataclass(frozen=True, slots=True)
class Gone:
    """The key's operation is over and its payload was stripped; never a new execution."""

    view: OperationView


@dataclass(frozen=True, slots=True)
class Invalid:
    """The request does not hold; nothing was written."""

    errors: tuple[FieldError, ...]
    key_bound: KeyBound


@dataclass(frozen=True, slots=True)
class TypeUnknown:
    """There is no such operation type here; nothing was written."""


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """The key was admitted by code newer than this process (a deploy under way): it cannot compare."""

    holder: OperationId


Admission = Admitted | Replayed | Mismatched | Gone | Invalid | TypeUnknown | NotUnderstood


class HolderUnreadable(StoreUnavailable):
    """The key is bound, by this request or an earlier one; only what to answer could not be read."""


@dataclass(frozen=True, slots=True)
class _Inserted:
    created_at: datetime


class AdmissionService:
    """Admits operations. One per process, in the loop that serves."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        notifier: Notifier,
        telemetry: Telemetry,
        failpoints: Failpoints,
        *,
        patience_seconds: float,
    ) -> None:
        self._database = database
        self._registry = registry
        self._notifier = notifier
        self._telemetry = telemetry
        self._failpoints = failpoints
        self._group: GroupCommit[NewOperation, _Inserted | Holder] = GroupCommit(
            "admit",
            self._flush,
            telemetry,
            patience_seconds=patience_seconds,
            overtake_after_seconds=OVERTAKE_AFTER_SECONDS,
        )

    async def submit(self, draft: Draft) -> Admission:
        """Admit, or answer for the operation that holds the key.

        Raises:
            StoreUnavailable: nothing was written (`key_bound` false).
            CommitUnknown: whether it stands could not be settled (`key_bound` unknown).
            HolderUnreadable: the key is bound; the database went away before the answer was read.
        """
        answer = await self._answer(draft)
        name = _type_name(draft) if not isinstance(answer, TypeUnknown) else "unknown"
        self._telemetry.count(Metric.ADMISSIONS, type=name, outcome=_outcome_of(answer))
        await self._failpoints.hit(Failpoint.BEFORE_ADMIT_ANSWER)
        return answer

    async def _answer(self, draft: Draft) -> Admission:
        type = self._registry.latest(_type_name(draft))
        if type is None:
            return TypeUnknown()
        scope = Scope(draft.tenant, type.name, draft.key)
        read = read_request(type, draft.members, draft.headers)
        if not isinstance(read, ReadRequest):
            return await self._invalid(draft, scope, read, type.version)
        new = _new_operation(scope, read)
        result = await self._group.submit(new)
        if isinstance(result, Holder):
            return await self._judge(draft, result, read, new)
        self._telemetry.event(Event.ADMITTED, operation=str(new.id), type=new.type)
        return Admitted(_first_view(new, result.created_at))

    async def _invalid(
        self, draft: Draft, scope: Scope, errors: tuple[FieldError, ...], version: int
    ) -> Admission:
        """A request that does not hold today may hold under the version its key was admitted with."""
        try:
            async with self._database.transaction() as tx:
                [holder] = await operations.holders(tx, [scope])
        except StoreUnavailable:
            return Invalid(errors, "unknown")
        if holder is None or holder.type_version == version:
            return Invalid(errors, holder is not None)
        return await self._judge(draft, holder, None, None)

    async def _judge(
        self,
        draft: Draft,
        holder: Holder,
        read: ReadRequest | None,
        new: NewOperation | None,
    ) -> Admission:
        """Replay or mismatch, under the version and algorithm the key was admitted with (CONTRACT.md 7)."""
        same = (
            read is not None
            and read.type.version == holder.type_version
            and new is not None
            and new.fingerprint.version == holder.fingerprint.version
        )
        if same and new is not None:
            meant = new.fingerprint
        else:
            type = self._registry.get(_type_name(draft), holder.type_version)
            if type is None or holder.fingerprint.version > FINGERPRINT_VERSION:
                return NotUnderstood(holder.id)
            old = read_request(type, draft.members, draft.headers)
            if not isinstance(old, ReadRequest):
                return Invalid(old, True)
            meant = fingerprint(old.meaning, holder.fingerprint.version)
        if meant != holder.fingerprint:
            return Mismatched(holder.id)
        view = await self._read(holder.id)
        if new is not None and new.id == holder.id:
            return Admitted(view)
        gone = repeat_of(view.state, purged=view.purged) is Repeat.GONE
        return Gone(view) if gone else Replayed(view)

    async def _read(self, holder: OperationId) -> OperationView:
        try:
            async with self._database.transaction() as tx:
                return (await views.read(tx, [holder]))[holder]
        except StoreUnavailable as error:
            raise HolderUnreadable(str(error)) from error

    async def _flush(self, batch: Sequence[NewOperation]) -> Sequence[_Inserted | Holder]:
        results: dict[OperationId, _Inserted | Holder] = {}
        left = list(batch)
        for _ in range(_ROUNDS):
            async with self._database.transaction() as tx:
                inserted = await operations.admit(tx, left)
                losers = [item for item in left if item.id not in inserted]
                held = (
                    await operations.holders(tx, [_scope_of(item) for item in losers])
                    if losers
                    else []
                )
                await self._failpoints.hit(Failpoint.BEFORE_ADMIT_COMMIT)
            await self._failpoints.hit(Failpoint.AFTER_ADMIT_COMMIT)
            results |= {id: _Inserted(created_at) for id, created_at in inserted.items()}
            results |= {
                item.id: holder
                for item, holder in zip(losers, held, strict=True)
                if holder is not None
            }
            if inserted:
                self._notifier.announce(Channel.WORK)
            # A holder purged between insert and read leaves the scope free: insert again (R13).
            left = [item for item in losers if item.id not in results]
            if not left:
                return [results[item.id] for item in batch]
        raise StoreUnavailable("A key was freed and taken again too often; try once more.")

    async def drain(self) -> None:
        """Return when no admission is in flight."""
        await self._group.drain()


def _type_name(draft: Draft) -> str:
    name = draft.members.get("type")
    return name if isinstance(name, str) else ""


def _scope_of(item: NewOperation) -> Scope:
    return Scope(item.tenant, item.type, item.key)


def _new_operation(scope: Scope, read: ReadRequest) -> NewOperation:
    policy = read.type.policy
    return NewOperation(
        id=OperationId.new(scope.bucket),
        tenant=scope.tenant,
        type=scope.type,
        type_version=read.type.version,
        key=scope.key,
        fingerprint=fingerprint(read.meaning),
        input=read.input,
        metadata=read.metadata,
        semantic_headers=read.semantic_headers,
        not_before=read.not_before,
        deadline=read.deadline,
        priority=read.priority,
        retention_seconds=policy.retention_seconds,
        tombstone_seconds=policy.tombstone_seconds,
    )


def _first_view(new: NewOperation, created_at: datetime) -> OperationView:
    """The operation as its own INSERT left it; no read is needed to answer the first POST."""
    return OperationView(
        id=new.id,
        tenant=new.tenant,
        type=new.type,
        type_version=new.type_version,
        state=State.PENDING,
        version=1,
        created_at=created_at,
        updated_at=created_at,
        completed_at=None,
        idempotency_expires_at=created_at + timedelta(seconds=new.retention_seconds),
        metadata=new.metadata,
        cancel_requested=False,
        attention=None,
        result=None,
        error=None,
        purged=False,
    )


def _outcome_of(answer: Admission) -> str:
    match answer:
        case Admitted():
            return "new"
        case Replayed():
            return "replayed"
        case Mismatched():
            return "mismatched"
        case Gone():
            return "gone"
        case Invalid() | TypeUnknown() | NotUnderstood():
            return "refused"
