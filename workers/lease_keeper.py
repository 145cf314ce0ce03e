"""The keeper of leases: renews what this process holds, on a thread and a connection of its own.

Blocking code in an adapter can stop the event loop that carries the work; it cannot stop this thread
(CASES.md B04). A renewal the database refuses ends the trust in that lease at once; a database that does not
answer ends no trust early: trust runs out by itself (DESIGN.md I9).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from app.domain.errors import StoreBusy, StoreUnavailable
from app.domain.operation import Lease
from app.domain.policy import LeasePolicy
from app.service.execution import Renewal
from app.telemetry import Event, Metric, Telemetry


class LeaseKeeper:
    """Start it once per process; `hold` and `drop` may be called from any thread."""

    def __init__(
        self,
        make_renewal: Callable[[], Renewal],
        policy: LeasePolicy,
        telemetry: Telemetry,
    ) -> None:
        self._make_renewal = make_renewal
        self._policy = policy
        self._telemetry = telemetry
        self._held: set[Lease] = set()
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="lease-keeper", daemon=True)

    def start(self) -> None:
        """Begin renewing."""
        self._thread.start()

    def hold(self, lease: Lease) -> None:
        """Renew this lease from now on."""
        with self._guard:
            self._held.add(lease)

    def drop(self, lease: Lease) -> None:
        """Renew this lease no more; it was given back, or is lost."""
        with self._guard:
            self._held.discard(lease)

    def stop(self) -> None:
        """Stop renewing and wait for the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._policy.lease_seconds)

    def _main(self) -> None:
        asyncio.run(self._renew_on_and_on())

    async def _renew_on_and_on(self) -> None:
        renewal = self._make_renewal()
        await renewal.open()
        interval = self._policy.renew_interval_seconds
        wait = interval
        try:
            while not await asyncio.to_thread(self._stop.wait, wait):
                wait = interval if await self.renew_once(renewal) else interval / 4
        finally:
            await renewal.close()

    async def renew_once(self, renewal: Renewal) -> bool:
        """One round over everything held; False where the database did not take it."""
        with self._guard:
            held = list(self._held)
        if not held:
            return True
        try:
            try:
                lost = await renewal.renew(held)
            except StoreBusy:  # somebody holds one of the rows: that must not cost the others
                lost = await self._renew_each(renewal, held)
        except StoreUnavailable as error:
            self._telemetry.count(Metric.RENEWALS_MISSED)
            self._telemetry.event(
                Event.RENEWAL_MISSED, "warning", leases=len(held), detail=str(error)
            )
            return False
        except Exception as error:  # a keeper that died would silently let every lease end
            self._telemetry.count(Metric.RENEWALS_MISSED)
            self._telemetry.event(Event.UNEXPECTED, "error", exc_info=error)
            return False
        for lease in lost:
            self._tell_lost(lease)
        return True

    async def _renew_each(self, renewal: Renewal, held: list[Lease]) -> list[Lease]:
        lost: list[Lease] = []
        for lease in held:
            try:
                lost += await renewal.renew([lease])
            except StoreBusy as error:
                self._telemetry.count(Metric.RENEWALS_MISSED)
                self._telemetry.event(
                    Event.RENEWAL_MISSED,
                    "warning",
                    operation=str(lease.operation),
                    detail=str(error),
                )
        return lost

    def _tell_lost(self, lease: Lease) -> None:
        with self._guard:
            if lease not in self._held:
                return  # given back while the renewal was under way
            self._held.discard(lease)
        self._telemetry.count(Metric.LEASE_LOST, verb="renew")
        self._telemetry.event(
            Event.LEASE_LOST,
            "warning",
            operation=str(lease.operation),
            generation=lease.generation,
        )
