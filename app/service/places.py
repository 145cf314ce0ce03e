"""Places: how many calls to each provider this process makes at once.

Each process has its own bound; a profile may ask for a cap over all processes together, of which each holds a
part for some seconds at a time (`storage.restraint.share`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from app.domain.errors import StoreUnavailable
from app.domain.identity import new_id
from app.domain.profile import ProviderProfile
from app.service.clock import elapsed
from app.storage import restraint
from app.storage.database import Database

SHARE_SECONDS = 5.0
"""How long a part of a shared cap is held without being renewed."""


class Slots:
    """`async with slots:` waits for a place. Lowering the limit ends no call; it lets fewer new ones in."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """How many may be taken at once."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._taken < self._limit:
            place = self._waiting.popleft()
            if not place.done():
                self._taken += 1
                place.set_result(None)

    async def take(self) -> None:
        """Wait for a place and take it."""
        if self._taken < self._limit and not self._waiting:
            self._taken += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give()  # the place was given in the same moment
            raise

    def give(self) -> None:
        """Give a place back."""
        self._taken -= 1
        self._admit()

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give()


class Places:
    """One `Slots` per provider, by name."""

    def __init__(self, database: Database, profiles: Mapping[str, ProviderProfile]) -> None:
        self._database = database
        self._holder = new_id()
        self._held_until = float("-inf")
        self._caps = {
            name: profile.restraint.shared_concurrency
            for name, profile in profiles.items()
            if profile.restraint.shared_concurrency is not None
        }
        # Where a cap is shared nothing goes before a part of it is held.
        self._slots = {
            name: Slots(0 if name in self._caps else profile.concurrency)
            for name, profile in profiles.items()
        }

    def __getitem__(self, provider: str) -> Slots:
        return self._slots[provider]

    async def share_once(self) -> None:
        """Renew this process's part of each shared cap, and keep to it.

        Raises:
            StoreUnavailable: nobody knows what the others hold; what is held ends with its time.
        """
        started = elapsed()
        try:
            for name, cap in self._caps.items():
                async with self._database.transaction() as tx:
                    self._slots[name].limit = await restraint.share(
                        tx, name, holder=self._holder, cap=cap, ttl_seconds=SHARE_SECONDS
                    )
        except StoreUnavailable:
            if elapsed() >= self._held_until:
                for name in self._caps:
                    self._slots[name].limit = 0
            raise
        self._held_until = started + SHARE_SECONDS
