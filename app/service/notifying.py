"""Sending notices: after the commit they speak of, one at a time, what gathers meanwhile together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from app.domain.errors import StoreUnavailable
from app.domain.identity import OperationId
from app.service.group_commit import GroupCommit
from app.storage import notices
from app.storage.database import Database
from app.storage.notices import Channel
from app.telemetry import Telemetry


class Notifier:
    """Sends notices in the background. A lost notice costs a poll interval, so errors only count."""

    def __init__(self, database: Database, telemetry: Telemetry) -> None:
        self._database = database
        self._groups = {
            channel: GroupCommit(
                channel.value, self._flush_of(channel), telemetry, patience_seconds=0.0
            )
            for channel in Channel
        }
        self._sending: set[asyncio.Task[None]] = set()

    def announce(self, channel: Channel, ids: Sequence[OperationId] = ()) -> None:
        """Tell the listeners of `channel`; returns at once."""
        sending = asyncio.create_task(self._send(channel, tuple(ids)))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def drain(self) -> None:
        """Return when nothing is left to send."""
        while self._sending:
            await asyncio.wait(set(self._sending))

    async def _send(self, channel: Channel, ids: tuple[OperationId, ...]) -> None:
        try:
            await self._groups[channel].submit(ids)
        except StoreUnavailable:
            return

    def _flush_of(
        self, channel: Channel
    ) -> Callable[[Sequence[tuple[OperationId, ...]]], Awaitable[Sequence[None]]]:
        async def flush(batch: Sequence[tuple[OperationId, ...]]) -> list[None]:
            named = [operation for ids in batch for operation in ids]
            # A notice that could not name everything must name nothing.
            await notices.notify(self._database, channel, named if all(batch) else ())
            return [None] * len(batch)

        return flush
