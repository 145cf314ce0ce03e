"""Long polls: who waits for an operation to change, in memory, with no connection held (CONTRACT.md 12).

One `Hub` per process. Notices make it look at once; a slow poll looks at everything that is waited for
anyway, because a notice is a hint (CASES.md K24). A look is one statement for all ids, and the operations
that changed are read by one more, so the cost does not depend on how many clients wait. A waiter that is
cancelled (a client hung up) leaves nothing behind, and a process that stops lets all of them go at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress

from app.domain.errors import StoreUnavailable
from app.domain.identity import OperationId
from app.domain.operation import OperationView
from app.service.listening import hear
from app.storage import views
from app.storage.database import Database
from app.storage.notices import Channel
from app.telemetry import Event, Metric, Telemetry

LOOK_AT_MOST = 2_000
"""So many ids in one statement."""


class Watch:
    """One client's interest in one operation. Made by `Hub.watching`, before the operation is read."""

    __slots__ = ("_hub", "changed", "noticed", "operation", "version")

    def __init__(self, hub: Hub, operation: OperationId) -> None:
        self._hub = hub
        self.operation = operation
        self.version: int | None = None
        self.noticed = False
        self.changed: asyncio.Future[OperationView | None] = (
            asyncio.get_running_loop().create_future()
        )

    async def change_from(self, version: int, seconds: float) -> OperationView | None:
        """The operation once its version is another one; None when `seconds` are over or the process stops.

        A notice that came after the watch began and before this call is not lost: it is looked into now.
        """
        self.version = version
        if self.noticed:
            self._hub.look_at([self.operation])
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                return await self.changed
        return None


class Hub:
    """Everybody who waits in this process. `run` it beside the server; `close` ends every wait."""

    def __init__(
        self, database: Database, telemetry: Telemetry, *, poll_interval_seconds: float
    ) -> None:
        self._database = database
        self._telemetry = telemetry
        self._poll_interval_seconds = poll_interval_seconds
        self._watches: dict[OperationId, set[Watch]] = {}
        self._to_look_at: set[OperationId] = set()
        self._something_to_do = asyncio.Event()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the process is stopping: nobody waits any more."""
        return self._closed

    @property
    def waiting(self) -> int:
        """How many clients wait now."""
        return sum(len(watches) for watches in self._watches.values())

    @contextmanager
    def watching(self, operation: OperationId) -> Iterator[Watch]:
        """A watch for as long as the block lasts."""
        watch = Watch(self, operation)
        self._watches.setdefault(operation, set()).add(watch)
        if self._closed:
            watch.changed.set_result(None)
        try:
            yield watch
        finally:
            watch.changed.cancel()
            others = self._watches[operation]
            others.discard(watch)
            if not others:
                del self._watches[operation]

    def look_at(self, operations: Iterable[OperationId]) -> None:
        """Compare the versions of these, soon; those nobody waits for are left out."""
        wanted = [operation for operation in operations if operation in self._watches]
        for operation in wanted:
            for watch in self._watches[operation]:
                watch.noticed = True
        if wanted:
            self._to_look_at.update(wanted)
            self._something_to_do.set()

    def close(self) -> None:
        """End every wait, and every later one, at once: the process stops."""
        self._closed = True
        for watches in self._watches.values():
            for watch in watches:
                if not watch.changed.done():
                    watch.changed.set_result(None)

    async def run(self) -> None:
        """Hear, look and poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(
                self._listen(hear(self._database, [Channel.CHANGED], self._telemetry))
            )
            group.create_task(self._look())
            group.create_task(self._poll())

    async def _listen(
        self, notices: AsyncIterator[tuple[Channel | None, tuple[OperationId, ...]]]
    ) -> None:
        async for _, ids in notices:
            self.look_at(ids or tuple(self._watches))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_interval_seconds)
            self.look_at(tuple(self._watches))

    async def _look(self) -> None:
        while True:
            await self._something_to_do.wait()
            self._something_to_do.clear()
            ids, self._to_look_at = list(self._to_look_at), set()
            try:
                for first in range(0, len(ids), LOOK_AT_MOST):
                    await self._compare(ids[first : first + LOOK_AT_MOST])
            except StoreUnavailable as error:
                self._telemetry.count(Metric.STORE_ERRORS, where="watching")
                self._telemetry.event(
                    Event.STORE_UNAVAILABLE, "warning", verb="watching", detail=str(error)
                )

    async def _compare(self, ids: list[OperationId]) -> None:
        async with self._database.transaction() as tx:
            versions = await views.versions(tx, ids)
            changed = [id for id, version in versions.items() if self._waiters(id, version)]
            seen = await views.read(tx, changed)
        for id, view in seen.items():
            for watch in self._waiters(id, view.version):
                watch.changed.set_result(view)

    def _waiters(self, operation: OperationId, version: int) -> list[Watch]:
        """Who waits for `operation` and knows another version of it than this one."""
        return [
            watch
            for watch in self._watches.get(operation, ())
            if watch.version is not None and watch.version != version and not watch.changed.done()
        ]
