"""What an operator does from the terminal: look at operations of any tenant (`cancel` has its own module)."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.identity import OperationId
from app.domain.lifecycle import LIVE, State
from app.domain.operation import OperationView
from app.storage import inspection, views
from app.storage.database import Database
from app.storage.inspection import LedgerEntry


@dataclass(frozen=True, slots=True)
class Inspected:
    """One operation with what its owner never sees: the generation, and every attempt."""

    view: OperationView
    generation: int
    attempts: tuple[LedgerEntry, ...]


async def show(database: Database, operation: OperationId) -> Inspected | None:
    """One operation of whichever tenant, read in one transaction; None where there is none of that id.

    Raises:
        StoreUnavailable: the database is away.
    """
    async with database.transaction() as tx:
        view = (await views.read(tx, [operation])).get(operation)
        if view is None:
            return None
        return Inspected(
            view,
            await inspection.generation(tx, operation),
            tuple(await inspection.ledger(tx, operation)),
        )


async def newest(
    database: Database,
    *,
    tenant: str | None,
    type: str | None,
    state: State | None,
    limit: int,
) -> list[OperationView]:
    """The newest operations, newest first, narrowed by what is given; of all tenants where `tenant` is None.

    Raises:
        StoreUnavailable: the database is away.
        StoreBusy: too many operations had to be looked at for the few that fit; narrow it by tenant.
    """
    async with database.transaction() as tx:
        if tenant is not None:
            narrowed = views.Filter(type=type, state=state)
            return await views.page(tx, tenant=tenant, narrowed=narrowed, after=None, limit=limit)
        ids = await inspection.newest(tx, type=type, state=state, live=state in LIVE, limit=limit)
        found = await views.read(tx, ids)
    return [found[each] for each in ids if each in found]
