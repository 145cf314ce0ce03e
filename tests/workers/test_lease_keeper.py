"""The keeper of leases: its own thread and connection, and what ends trust (CASES.md B04, DESIGN.md I9)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest

from app.domain.errors import CommitUnknown, StoreBusy, StoreUnavailable
from app.domain.identity import OperationId
from app.domain.operation import Lease, Trust
from app.domain.policy import LeasePolicy
from app.service.clock import elapsed
from app.service.execution import Renewal
from app.storage.database import Database
from app.telemetry import Metric, Telemetry
from tests.support.core import CapturedLog, capturing_telemetry, counted
from tests.support.factories import Leased, insert, lease_of, query, supersede
from tests.support.races import holding, until
from workers.lease_keeper import LeaseKeeper

pytestmark = pytest.mark.anyio
POLICY = LeasePolicy(lease_seconds=0.4, renew_interval_seconds=0.02, margin_seconds=0.1)


def a_lease(until: float = 0.0) -> Lease:
    return Lease(OperationId.new(1), uuid4(), 1, Trust(until))


class FakeRenewal:
    """Answers rounds as told, then renews all; remembers on which thread it was asked."""

    def __init__(self, *answers: Exception | list[Lease]) -> None:
        self.answers = list(answers)
        self.rounds: list[frozenset[Lease]] = []
        self.threads: set[int] = set()
        self.closed = threading.Event()
        self.asked = threading.Event()

    async def open(self) -> None:
        return None

    async def close(self) -> None:
        self.closed.set()

    async def renew(self, held: Sequence[Lease]) -> list[Lease]:
        self.rounds.append(frozenset(held))
        self.threads.add(threading.get_ident())
        answer = self.answers.pop(0) if self.answers else []
        if not self.answers:
            self.asked.set()
        if isinstance(answer, Exception):
            raise answer
        for lease in answer:
            lease.trust.end()
        return answer


def keeper_of(renewal: Any) -> tuple[LeaseKeeper, Telemetry, CapturedLog]:
    telemetry, log = capturing_telemetry()
    return LeaseKeeper(lambda: renewal, POLICY, telemetry), telemetry, log


@contextmanager
def running(keeper: LeaseKeeper) -> Iterator[None]:
    keeper.start()
    try:
        yield
    finally:
        keeper.stop()


async def awaited(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 10.0)


async def test_it_renews_what_is_held_on_a_thread_of_its_own() -> None:
    renewal = FakeRenewal([], [], [])
    keeper, _, _ = keeper_of(renewal)
    held, dropped = a_lease(), a_lease()
    keeper.hold(held)
    keeper.hold(dropped)
    keeper.drop(dropped)
    with running(keeper):
        await awaited(renewal.asked)
    assert set(renewal.rounds) == {frozenset({held})}
    assert threading.get_ident() not in renewal.threads
    assert renewal.closed.is_set()


async def test_nothing_held_is_nothing_asked() -> None:
    keeper, _, _ = keeper_of(renewal := FakeRenewal())
    assert await keeper.renew_once(renewal)  # type: ignore[arg-type]
    assert renewal.rounds == []


async def test_a_refused_renewal_is_told_once_and_not_tried_again() -> None:
    lost, kept = a_lease(), a_lease()
    renewal = FakeRenewal([lost])
    keeper, telemetry, log = keeper_of(renewal)
    keeper.hold(lost)
    keeper.hold(kept)
    for _ in range(2):
        assert await keeper.renew_once(renewal)  # type: ignore[arg-type]
    assert renewal.rounds == [frozenset({lost, kept}), frozenset({kept})]
    assert counted(telemetry, Metric.LEASE_LOST, verb="renew") == 1
    assert log.of("lease_lost") == [{"operation": str(lost.operation), "generation": 1}]


async def test_a_lease_given_back_during_the_renewal_is_not_lost() -> None:
    given_back = a_lease()

    class Slow(FakeRenewal):
        async def renew(self, held: Sequence[Lease]) -> list[Lease]:
            keeper.drop(given_back)
            return [given_back]

    keeper, telemetry, log = keeper_of(renewal := Slow())
    keeper.hold(given_back)
    assert await keeper.renew_once(renewal)  # type: ignore[arg-type]
    assert log.of("lease_lost") == []
    assert counted(telemetry, Metric.LEASE_LOST, verb="renew") == 0


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), CommitUnknown("lost"), RuntimeError("a defect")]
)
async def test_a_round_that_fails_ends_no_trust_and_the_next_one_comes(error: Exception) -> None:
    """A database that does not answer ends no trust early; whatever happens, the thread lives on."""
    lease = a_lease(until=123.0)
    renewal = FakeRenewal(error, error, [])
    keeper, telemetry, log = keeper_of(renewal)
    keeper.hold(lease)
    with running(keeper):
        await awaited(renewal.asked)
    assert len(renewal.rounds) >= 3
    assert lease.trust.until == 123.0
    assert counted(telemetry, Metric.RENEWALS_MISSED) == 2
    expected = "unexpected" if isinstance(error, RuntimeError) else "renewal_missed"
    assert len(log.of(expected)) == 2


async def test_a_row_that_somebody_holds_does_not_cost_the_others() -> None:
    """One by one after a busy round: only the held one is missed."""
    held = [a_lease() for _ in range(3)]
    busy = StoreBusy("a row was held")
    renewal = FakeRenewal(busy, [], busy, [])
    keeper, telemetry, _ = keeper_of(renewal)
    for lease in held:
        keeper.hold(lease)
    assert await keeper.renew_once(renewal)  # type: ignore[arg-type]
    assert [len(round) for round in renewal.rounds] == [3, 1, 1, 1]
    assert counted(telemetry, Metric.RENEWALS_MISSED) == 1


# -- on a database -----------------------------------------------------------------------------------------


async def test_renewing_extends_trust_and_the_row(database_url: str) -> None:
    """Trust counts from before the renewal was tried, less the margin: it ends before the row does."""
    policy = LeasePolicy(lease_seconds=30.0, renew_interval_seconds=10.0, margin_seconds=1.0)
    row = insert(database_url, leased=Leased(expires_in=5.0))
    lost = insert(database_url, leased=Leased(expires_in=5.0))
    supersede(database_url, lost.id)
    before = elapsed()
    renewal = Renewal(Database(database_url, application="keeper", pool_size=2), policy)
    await renewal.open()
    try:
        assert await renewal.renew([row.held, lost.held]) == [lost.held]
    finally:
        await renewal.close()
    assert before + 29.0 <= row.held.trust.until <= elapsed() + 29.0
    assert lost.held.trust.until == float("-inf")
    [(seconds,)] = query(
        database_url,
        "SELECT extract(epoch FROM lease_expires_at - now()) FROM work WHERE operation_id = %s",
        row.id.uuid,
    )
    assert 25 < seconds <= 30


async def test_an_unanswered_renewal_leaves_trust_as_it_was(database_url: str) -> None:
    """I9: nobody knows; trust runs out by itself."""
    leased = Leased(expires_in=30.0)
    row = insert(database_url, leased=leased)
    lease = lease_of(row.id, leased, trusted_until=elapsed() + 10.0)
    was = lease.trust.until
    database = Database(database_url, application="keeper", pool_size=2, timeout_seconds=0.2)
    renewal = Renewal(database, POLICY)
    await renewal.open()
    try:
        async with holding(database_url, "SELECT FROM work FOR UPDATE"):
            with pytest.raises(StoreUnavailable):
                await renewal.renew([lease])
        assert lease.trust.until == was
        assert await renewal.renew([lease]) == []
        assert lease.trust.until != was
    finally:
        await renewal.close()


async def test_it_keeps_a_lease_for_as_long_as_it_is_held(database_url: str) -> None:
    """Several leases' worth of renewals; once dropped the lease ends by itself."""
    leased = Leased(expires_in=0.4)
    row = insert(database_url, leased=leased)
    telemetry, log = capturing_telemetry()
    keeper = LeaseKeeper(
        lambda: Renewal(Database(database_url, application="keeper", pool_size=2), POLICY),
        POLICY,
        telemetry,
    )
    first = "SELECT lease_expires_at FROM work"
    [(start,)] = query(database_url, first)
    keeper.hold(row.held)

    async def renewed_for_long() -> bool:
        [(end,)] = query(database_url, first)
        return bool((end - start).total_seconds() > 2 * POLICY.lease_seconds)

    async def ended() -> bool:
        [(over,)] = query(database_url, "SELECT lease_expires_at <= now() FROM work")
        return bool(over)

    with running(keeper):
        await until(renewed_for_long)
        assert row.held.trust.until > elapsed()
        keeper.drop(row.held)
        await until(ended)
    assert log.of("lease_lost") == []
