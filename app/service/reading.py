"""Reading: one operation, a page of them, the one that holds a key; always within one tenant.

An id of another tenant reads like one that does not exist (CONTRACT.md 13). Every read is a transaction of
its own that ends before the answer is written, so that no answer holds a connection (CASES.md K23). Reads of
single operations that come at the same time share one statement: many that poll cost little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.identity import IdempotencyKey, OperationId, Scope
from app.domain.operation import OperationView
from app.service.group_commit import GroupCommit
from app.storage import views
from app.storage.database import Database
from app.storage.views import Filter, Position
from app.telemetry import Telemetry

__all__ = ["Filter", "Page", "Position", "Reading"]


@dataclass(frozen=True, slots=True)
class Page:
    """Operations, newest first, and where the next page begins; None on the last one."""

    operations: tuple[OperationView, ...]
    next: Position | None


class Reading:
    """Reads operations for one tenant at a time."""

    def __init__(self, database: Database, telemetry: Telemetry) -> None:
        self._database = database
        self._group: GroupCommit[OperationId, OperationView | None] = GroupCommit(
            "read", self._read, telemetry, patience_seconds=0.0
        )

    async def _read(self, ids: Sequence[OperationId]) -> Sequence[OperationView | None]:
        async with self._database.transaction() as tx:
            found = await views.read(tx, list(dict.fromkeys(ids)))
        return [found.get(id) for id in ids]

    async def one(self, operation: OperationId, tenant: str) -> OperationView | None:
        """The operation or tombstone of that id, None where this tenant has none.

        Raises:
            StoreUnavailable: the database is away or too slow.
        """
        # The batch begins after it was asked for, so it sees whatever was committed before (CONTRACT.md 13).
        view = await self._group.submit(operation)
        return view if view is not None and view.tenant == tenant else None

    async def page(self, tenant: str, narrowed: Filter, after: Position | None, limit: int) -> Page:
        """At most `limit` operations behind `after`, in the total order (created_at, id) (CONTRACT.md 15).

        Raises:
            StoreUnavailable: as `one`.
        """
        async with self._database.transaction() as tx:
            found = await views.page(
                tx, tenant=tenant, narrowed=narrowed, after=after, limit=limit + 1
            )
        shown = tuple(found[:limit])
        if len(found) <= limit:
            return Page(shown, None)
        return Page(shown, Position(shown[-1].created_at, shown[-1].id.uuid))

    async def by_key(self, tenant: str, type: str, key: IdempotencyKey) -> OperationView | None:
        """The operation or tombstone that holds this tenant's key for that type, or None.

        Raises:
            StoreUnavailable: as `one`.
        """
        async with self._database.transaction() as tx:
            holder = await views.by_scope(tx, Scope(tenant, type, key))
            if holder is None:
                return None
            return (await views.read(tx, [holder])).get(holder)
