"""The storage verbs with values that mean nothing in particular."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from app.domain.identity import (
    Direction,
    DownstreamKey,
    Fingerprint,
    IdempotencyKey,
    OperationId,
    Scope,
    new_id,
)
from app.domain.lifecycle import Actor
from app.domain.operation import Lease, NewOperation
from app.domain.plan import EffectRequest
from app.storage import claims
from app.storage.database import Database, Row
from app.storage.steps import Begin
from tests.support.factories import TENANT, TYPE


def begin_of(lease: Lease, **changes: Any) -> Begin:
    """One send to begin, of the step `next` where nothing else is said."""
    given: dict[str, Any] = {
        "lease": lease,
        "attempt_id": new_id(),
        "step": "next",
        "item": 0,
        "direction": Direction.FORWARD,
        "provider": "test",
        "key": DownstreamKey("k"),
        "key_ordinal": 0,
        "request": EffectRequest("POST", "/effects", b"body", (("X-A", "1"),), "ref"),
        "send_window_seconds": 5.0,
        "in_transit_seconds": 5.0,
        "lag_seconds": 2.0,
        "resend_seconds": 60.0,
    }
    return Begin(**{**given, **changes})


def new_operation(key: str, tenant: str = TENANT, type: str = TYPE, **changes: Any) -> NewOperation:
    """One operation to admit."""
    scope = Scope(tenant, type, IdempotencyKey(key))
    given: dict[str, Any] = {
        "id": OperationId.new(scope.bucket),
        "tenant": tenant,
        "type": type,
        "type_version": 1,
        "key": scope.key,
        "fingerprint": Fingerprint(scope.key.digest, 1),
        "input": b'{"amount":100}',
        "metadata": {"a": "b"},
        "semantic_headers": {},
        "not_before": None,
        "deadline": None,
        "priority": 2,
        "retention_seconds": 3600.0,
        "tombstone_seconds": 7200.0,
    }
    return NewOperation(**{**given, **changes})


async def claim(
    database: Database, *, actor: Actor = Actor.WORKER, limit: int = 100, **changes: Any
) -> list[Row]:
    """One claim call, committed."""
    given: dict[str, Any] = {
        "owner_token": uuid4(),
        "lease_seconds": 30.0,
        "known": [(TYPE, 1)],
    }
    async with database.transaction() as tx:
        return await claims.claim(tx, actor=actor, limit=limit, **{**given, **changes})
