"""Cancel, for whoever asks: the API for its caller, the command line for an operator (CONTRACT.md 17).

The judgement is made under the operation's lock, in `app.storage.cancellation`. An error at COMMIT is settled
by running the same action again: it is known by its id, and a second time changes nothing (PROTOCOL.md R17).
"""

from __future__ import annotations

import asyncio

from app.domain.course import as_json, stopped_error
from app.domain.errors import CommitUnknown, StoreUnavailable
from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import State, StopCause
from app.domain.operation import OperationView
from app.domain.text import bounded_text
from app.service.clock import elapsed
from app.service.notifying import Notifier
from app.storage import cancellation, views
from app.storage.database import Database
from app.storage.notices import Channel
from app.telemetry import Event, Metric, Telemetry

PATIENCE_SECONDS = 5.0


async def cancel(
    database: Database,
    notifier: Notifier,
    operation: OperationId,
    *,
    tenant: str | None,
    by: str,
    reason: str | None,
    telemetry: Telemetry | None = None,
) -> OperationView | None:
    """Ask for cancellation; the operation as it is then, or None where `tenant` has none of that id.

    Cancelled at once where nothing was begun, else noted for the executor to judge; on a done operation
    nothing changes. `tenant` None: whichever it is (operators only). `by` says who, for the audit row.

    Raises:
        StoreUnavailable: nothing was changed.
        CommitUnknown: whether it was noted could not be settled; asking again is safe.
    """
    before = await _read(database, operation)
    if before is None or (tenant is not None and before.tenant != tenant):
        return None
    if before.done:
        return before
    state = await _settled(database, before, by, reason)
    notifier.announce(Channel.CHANGED, [operation])
    if state is State.CANCELLED and telemetry is not None:
        telemetry.count(Metric.FINISHED, type=before.type, state=state.value)
        telemetry.event(Event.CANCELLED, operation=str(operation), type=before.type)
    elif state is not None:
        notifier.announce(Channel.WORK)  # a wish that was noted made it due
    return await _read(database, operation)


async def _settled(
    database: Database, view: OperationView, by: str, reason: str | None
) -> State | None:
    """The state it has after the action, None where it had ended; again after an unknown COMMIT."""
    action_id = new_id()
    gives_up_at = elapsed() + PATIENCE_SECONDS
    unknown: CommitUnknown | None = None
    wait = 0.02
    while True:
        try:
            async with database.transaction() as tx:
                return await cancellation.cancel(
                    tx,
                    view.id,
                    tenant=view.tenant,
                    action_id=action_id,
                    by=bounded_text(by),
                    reason=None if reason is None else bounded_text(reason, 1000),
                    error=as_json(stopped_error(StopCause.CANCEL)),
                )
        except CommitUnknown as error:
            unknown = error
        except StoreUnavailable:
            if unknown is None:
                raise
        if elapsed() >= gives_up_at:
            raise unknown
        await asyncio.sleep(wait)
        wait = min(wait * 2, 1.0)


async def _read(database: Database, operation: OperationId) -> OperationView | None:
    async with database.transaction() as tx:
        return (await views.read(tx, [operation])).get(operation)
