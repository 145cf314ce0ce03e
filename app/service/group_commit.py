"""Group commit: what concurrent callers want written goes out together, one transaction after the other.

While one commit is in flight the next batch gathers; an idle process adds no wait. One bad item never fails
its neighbours: a batch that fails is tried again item by item. After an error at COMMIT the same batch runs
again: every verb is idempotent by ids its caller made, and compares before it writes (PROTOCOL.md R17).

A caller that is cancelled (a client hung up) does not disturb the batch: what is durable does not depend on
who still listens (CASES.md K22).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from app.domain.errors import CommitUnknown, StoreBusy, StoreUnavailable
from app.service.clock import elapsed
from app.telemetry import Event, Metric, Telemetry

Item = TypeVar("Item")
Result = TypeVar("Result")


LANES = 4
"""So many items at once, when a batch that failed is tried again item by item; so many batches at most."""


def _may_be_one_item(error: Exception) -> bool:
    """Whether the others could fare better alone: not when the database is away, or COMMIT unknown."""
    return isinstance(error, StoreBusy) or not isinstance(error, StoreUnavailable)


class GroupCommit(Generic[Item, Result]):
    """One verb's queue. `flush` writes a batch in one transaction of its own, one result per item.

    `patience_seconds`: how long an unknown COMMIT is settled by running again; with `keep_trying` also how
    long a database that is away is waited for (for what must not be lost lightly: answers of providers).
    `overtake_after_seconds`: what has waited so long behind a batch in flight goes beside it.
    """

    def __init__(
        self,
        verb: str,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        telemetry: Telemetry,
        *,
        patience_seconds: float,
        keep_trying: bool = False,
        overtake_after_seconds: float | None = None,
        max_batch: int = 200,
    ) -> None:
        self._verb = verb
        self._flush = flush
        self._telemetry = telemetry
        self._patience_seconds = patience_seconds
        self._keep_trying = keep_trying
        self._max_batch = max_batch
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._overtake_after_seconds = overtake_after_seconds
        self._overtaking: asyncio.TimerHandle | None = None
        self._runners: set[asyncio.Task[None]] = set()

    async def submit(self, item: Item) -> Result:
        """Write `item` with the next batch and return its result.

        Raises:
            StoreUnavailable: nothing of it was committed.
            CommitUnknown: whether it stands could not be settled in time.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if not self._runners:
            self._start()
        elif self._overtake_after_seconds is not None and self._overtaking is None:
            self._overtaking = asyncio.get_running_loop().call_later(
                self._overtake_after_seconds, self._overtake
            )
        return await future

    def _start(self) -> None:
        runner = asyncio.create_task(self._run(), name=f"group-commit-{self._verb}")
        self._runners.add(runner)

    def _overtake(self) -> None:
        """What waits behind a batch that somebody else holds up goes in another lane (CASES.md K32)."""
        self._overtaking = None
        if self._waiting and len(self._runners) < LANES:
            self._start()

    async def drain(self) -> None:
        """Return when nothing is waiting or in flight."""
        while self._runners:
            await asyncio.wait(set(self._runners))

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch = self._waiting[: self._max_batch]
                del self._waiting[: self._max_batch]
                await self._settle(batch)
        finally:  # at once, not in a callback: the next caller must see that nobody runs
            runner = asyncio.current_task()
            assert runner is not None
            self._runners.discard(runner)

    async def _settle(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        self._telemetry.count(Metric.FLUSHES, verb=self._verb)
        self._telemetry.count(Metric.FLUSHED_ITEMS, len(batch), verb=self._verb)
        try:
            results = await self._write([item for item, _ in batch])
        except Exception as error:
            if len(batch) > 1 and _may_be_one_item(error):
                for first in range(0, len(batch), LANES):
                    lanes = batch[first : first + LANES]
                    await asyncio.gather(*(self._settle([single]) for single in lanes))
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _write(self, items: list[Item]) -> Sequence[Result]:
        """One batch, again after an unknown COMMIT. Whatever else goes wrong is raised as it is."""
        gives_up_at = elapsed() + self._patience_seconds
        unknown: CommitUnknown | None = None
        wait = 0.02
        while True:
            try:
                return await self._flush(items)
            except CommitUnknown as error:
                unknown = error
            except StoreUnavailable as error:
                if unknown is None and not self._keep_trying:
                    raise
                self._telemetry.event(
                    Event.STORE_UNAVAILABLE, "warning", verb=self._verb, detail=str(error)
                )
                if elapsed() >= gives_up_at:
                    raise unknown or error from error
            self._telemetry.count(Metric.STORE_ERRORS, where=self._verb)
            if elapsed() >= gives_up_at and unknown is not None:
                raise unknown
            await asyncio.sleep(wait)
            wait = min(wait * 2, 1.0)
