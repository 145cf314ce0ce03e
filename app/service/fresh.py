"""A reading of the database that many callers share for a short while.

One read at a time, whoever asks meanwhile gets the same answer: a thousand requests a second cost the
database one statement per span. An answer's age counts from before its read began: it is never too old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from app.service.clock import elapsed

Value = TypeVar("Value")


class Fresh(Generic[Value]):
    """What `read` last answered, at most `seconds` old. Errors are shared with who waits, and never kept."""

    def __init__(self, read: Callable[[], Awaitable[Value]], seconds: float) -> None:
        self._read = read
        self._seconds = seconds
        self._reading: asyncio.Task[tuple[float, Value]] | None = None

    async def get(self) -> Value:
        """The answer, read anew where it has become too old.

        Raises:
            Whatever `read` raises.
        """
        reading = self._reading
        if reading is None or self._is_stale(reading):
            reading = self._reading = asyncio.create_task(self._timed())
            reading.add_done_callback(_seen)
        # A caller that hangs up must not cancel what others wait for (CASES.md K22).
        _, value = await asyncio.shield(reading)
        return value

    def _is_stale(self, reading: asyncio.Task[tuple[float, Value]]) -> bool:
        if not reading.done():
            return False
        if reading.cancelled() or reading.exception() is not None:
            return True
        return elapsed() - reading.result()[0] >= self._seconds

    async def _timed(self) -> tuple[float, Value]:
        started = elapsed()
        return started, await self._read()


def _seen(reading: asyncio.Task[tuple[float, Value]]) -> None:
    """Everybody who waited may have hung up: an error nobody takes is no news for the loop."""
    if not reading.cancelled():
        reading.exception()
