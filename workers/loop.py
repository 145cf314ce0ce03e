"""The loop of one process: claim when there is room, run turns, drain when told to stop.

Wake-ups are hints: a notice makes the next look earlier, a poll with jitter looks anyway (CASES.md K24). The
first SIGTERM stops claiming and waits for turns under way; the second leaves at once: leases then end by
themselves, and whoever claims next finds every begun attempt in the database.
"""

from __future__ import annotations

import asyncio
import random
from typing import Protocol

from app.domain.errors import StoreUnavailable
from app.domain.lifecycle import Actor
from app.domain.operation import Claimed
from app.service.clock import elapsed
from app.telemetry import Event, Metric, Telemetry
from workers.lease_keeper import LeaseKeeper

LAG_PROBE_SECONDS = 0.5
MAX_CLAIM = 100


class Role(Protocol):
    """What a process does with what it claims: `Execution` or `Reconciliation`."""

    actor: Actor

    async def claim(self, limit: int) -> list[Claimed]:
        """Lease up to `limit` due operations."""

    async def run(self, claimed: Claimed) -> None:
        """One turn."""


class Loop:
    """One role's loop. `stop()` drains; `run()` returns when nothing is left to do."""

    def __init__(
        self,
        role: Role,
        keeper: LeaseKeeper,
        telemetry: Telemetry,
        *,
        concurrency: int,
        poll_interval_seconds: float,
        drain_seconds: float,
    ) -> None:
        self._role = role
        self._keeper = keeper
        self._telemetry = telemetry
        self._concurrency = concurrency
        self._poll_interval_seconds = poll_interval_seconds
        self._drain_seconds = drain_seconds
        self._turns: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()

    def wake(self) -> None:
        """Look for work now rather than at the next poll."""
        self._woken.set()

    def stop(self) -> None:
        """Claim nothing more; `run` returns once the turns under way have ended."""
        self._stopping.set()
        self._woken.set()

    async def run(self) -> None:
        """Until `stop`, then drain."""
        probe = asyncio.create_task(self._probe_lag())
        try:
            while not self._stopping.is_set():
                self._woken.clear()
                if not await self.claim_once():
                    await self._rest()
            await self._drain()
        finally:
            probe.cancel()

    async def run_once(self) -> int:
        """One pass over everything due now, and its turns; how many operations were claimed."""
        total = 0
        while claimed := await self.claim_once():
            total += claimed
            await self._turns_done()
        return total

    async def claim_once(self) -> int:
        """Claim as many as there is room for and start their turns; how many there were."""
        room = min(self._concurrency - len(self._turns), MAX_CLAIM)
        if room <= 0:
            return 0
        try:
            claimed = await self._role.claim(room)
        except StoreUnavailable as error:
            self._telemetry.count(Metric.STORE_ERRORS, where="claim")
            self._telemetry.event(Event.STORE_UNAVAILABLE, "warning", detail=str(error))
            return 0
        for one in claimed:
            self._start(one)
        return len(claimed)

    def _start(self, claimed: Claimed) -> None:
        self._keeper.hold(claimed.lease)
        turn = asyncio.create_task(self._turn(claimed), name=f"turn-{claimed.id}")
        self._turns.add(turn)
        self._telemetry.gauge(Metric.IN_FLIGHT, len(self._turns), actor=self._role.actor.value)
        turn.add_done_callback(self._ended)

    async def _turn(self, claimed: Claimed) -> None:
        try:
            await self._role.run(claimed)
        finally:
            self._keeper.drop(claimed.lease)

    def _ended(self, turn: asyncio.Task[None]) -> None:
        full = len(self._turns) >= self._concurrency
        self._turns.discard(turn)
        self._telemetry.gauge(Metric.IN_FLIGHT, len(self._turns), actor=self._role.actor.value)
        if full:  # there may be more that is due than there was room for
            self._woken.set()

    async def _rest(self) -> None:
        """Until woken, or the poll interval (with jitter, so that many processes spread) is over."""
        pause = self._poll_interval_seconds * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
        try:
            async with asyncio.timeout(pause):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _turns_done(self) -> None:
        while self._turns:
            await asyncio.wait(set(self._turns))

    async def _drain(self) -> None:
        self._telemetry.event(Event.STOPPING, in_flight=len(self._turns))
        if self._turns:
            await asyncio.wait(set(self._turns), timeout=self._drain_seconds)
        left = set(self._turns)
        for turn in left:
            # A call that is cut short records what is known (unknown) and gives its lease back.
            turn.cancel()
        if left:
            await asyncio.wait(left, timeout=5.0)

    async def _probe_lag(self) -> None:
        while True:
            started = elapsed()
            await asyncio.sleep(LAG_PROBE_SECONDS)
            late = elapsed() - started - LAG_PROBE_SECONDS
            self._telemetry.observe(Metric.LOOP_LAG_SECONDS, max(late, 0.0))
