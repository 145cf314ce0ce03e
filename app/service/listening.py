"""Hearing notices for as long as a process lives: links again after each loss, and says so.

After every new link something may have been missed, so an empty notice is given: look (CASES.md B37).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from app.domain.errors import StoreUnavailable
from app.domain.identity import OperationId
from app.storage import notices
from app.storage.database import Database
from app.storage.notices import Channel
from app.telemetry import Event, Telemetry

AGAIN_SECONDS = 1.0


async def hear(
    database: Database, channels: Sequence[Channel], telemetry: Telemetry
) -> AsyncIterator[tuple[Channel | None, tuple[OperationId, ...]]]:
    """Notices without end. (None, ()) means: a link was lost or made, anything may have happened.

    Behind a pooler in transaction mode LISTEN is dropped silently, so nothing is ever heard there and
    polling does it all.
    """
    if not database.prepared_statements:
        await asyncio.Event().wait()
    while True:
        yield None, ()
        try:
            async for channel, ids in notices.listen(database, channels):
                yield channel, ids
        except StoreUnavailable as error:
            telemetry.event(Event.LISTENER_LOST, "warning", detail=str(error))
        await asyncio.sleep(AGAIN_SECONDS)
