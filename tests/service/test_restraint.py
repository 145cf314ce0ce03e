"""Restraint in the database, all workers together: an incident does not amplify load (CASES.md B32, K19)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from app.bootstrap import Core
from app.domain.profile import ProviderProfile
from app.domain.restraint import RestraintRules
from app.service.execution import Execution
from app.service.reconciliation import Reconciliation
from app.service.turns import Turns
from tests.support.recovery import admit, core_of, elapse, environment, rows
from tests.support.simulator import SimulatorThread

pytestmark = pytest.mark.anyio
OPERATIONS = 30


@pytest.fixture
def simulator() -> Iterator[SimulatorThread]:
    with SimulatorThread() as running:
        yield running


@pytest.fixture
async def core(database_url: str, simulator: SimulatorThread) -> AsyncIterator[Core]:
    async with core_of(environment(database_url, simulator.url)) as made:
        yield made


class Restrained:
    """The real adapter under a profile with other rules."""

    def __init__(self, adapter: Any, rules: RestraintRules) -> None:
        self._adapter = adapter
        self.profile: ProviderProfile = replace(adapter.profile, restraint=rules)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def worker(core: Core, rules: RestraintRules | None = None) -> Turns:
    """The machinery of one more process on the same database."""
    if rules is None:
        return core.turns()
    adapters = {"payments": Restrained(core.plugins.adapters["payments"], rules)}
    plugins = replace(core.plugins, adapters=MappingProxyType(adapters))
    return replace(core, plugins=plugins).turns()


async def passes(*turns: Turns, at_once: bool = False) -> int:
    """One pass of a worker and a reconciler in each process."""
    total = 0
    for each in turns:
        for role in (Execution(each), Reconciliation(each)):
            claimed = await role.claim(100)
            total += len(claimed)
            if at_once:
                await asyncio.gather(*(role.run(one) for one in claimed))
            else:
                for one in claimed:
                    await role.run(one)
    return total


def calls(simulator: SimulatorThread) -> int:
    return len(simulator.calls())


async def test_an_open_circuit_delays_and_fails_nothing(
    core: Core, database_url: str, simulator: SimulatorThread
) -> None:
    """Two processes, a provider that is down: ten calls open the circuit for both, then single probes."""
    first, second = worker(core), worker(core)
    for number in range(OPERATIONS):
        await admit(core, f"outage-{number}")
    simulator.fault(
        match={"method": "POST"}, times=None, effect="none", answer={"status": 503, "body": {}}
    )
    await passes(first, second)
    opened_after = calls(simulator)
    assert opened_after == 10
    await passes(second, first)
    assert calls(simulator) == opened_after
    assert rows(database_url, "SELECT breaker_state FROM providers") == [("open",)]
    for _ in range(3):
        elapse(database_url, 120)
        await passes(first, second)
    assert calls(simulator) <= opened_after + 3 * 2  # a look-up or a send per probe
    assert rows(database_url, "SELECT count(*) FROM operations WHERE state IS NOT NULL") == [(0,)]
    simulator.request_control("DELETE", "/faults")
    for _ in range(20):
        elapse(database_url, 600)
        if not await passes(first, second):
            break
    assert rows(database_url, "SELECT DISTINCT state FROM operations") == [("succeeded",)]
    assert rows(database_url, "SELECT breaker_state FROM providers") == [("closed",)]
    assert len(simulator.effects(kind="charge")) == OPERATIONS


async def test_a_delayed_send_leaves_no_attempt(
    core: Core, database_url: str, simulator: SimulatorThread
) -> None:
    """What the circuit puts off was not begun: pending stays pending, and its claims are not counted."""
    rules = RestraintRules(failure_threshold=1, cooldown_seconds=60, max_cooldown_seconds=60)
    turns = worker(core, rules)
    await admit(core, "first")
    await admit(core, "second")
    simulator.fault(match={"method": "POST"}, effect="none", answer={"status": 503, "body": {}})
    await passes(turns)
    assert rows(database_url, "SELECT count(*) FROM attempts") == [(1,)]
    waiting = rows(
        database_url,
        "SELECT state, claims, due_at > now() + interval '30 seconds' FROM work"
        " WHERE operation_id NOT IN (SELECT operation_id FROM attempts)",
    )
    assert waiting == [("pending", 0, True)]


async def test_the_rate_holds_over_all_processes(
    core: Core, database_url: str, simulator: SimulatorThread
) -> None:
    """Two processes under a rate of 5 in a burst of 5: five calls now, five more after a second."""
    rules = RestraintRules(rate_per_second=5, burst=5)
    first, second = worker(core, rules), worker(core, rules)
    for number in range(20):
        await admit(core, f"rate-{number}")
    await passes(first, second, at_once=True)
    now = calls(simulator)
    assert 5 <= now <= 7  # the passes themselves take time, and tokens come back meanwhile
    elapse(database_url, 30)
    await passes(first, second, at_once=True)
    assert calls(simulator) - now <= 7
    assert rows(database_url, "SELECT count(*) FROM attempts WHERE outcome <> 'succeeded'") == [
        (0,)
    ]


async def test_a_shared_cap_is_never_passed(core: Core, database_url: str) -> None:
    """Parts of one cap: evenly held, free again when a holder is gone."""
    rules = RestraintRules(shared_concurrency=6)
    first, second = worker(core, rules), worker(core, rules)
    await first.places.share_once()
    assert first.places["payments"].limit == 6
    await second.places.share_once()
    assert second.places["payments"].limit == 0  # nothing is free yet
    await first.places.share_once()
    await second.places.share_once()
    assert (first.places["payments"].limit, second.places["payments"].limit) == (3, 3)
    elapse(database_url, 60)  # both are gone but the first
    await first.places.share_once()
    assert first.places["payments"].limit == 6


async def test_a_process_without_its_part_waits(
    core: Core, database_url: str, simulator: SimulatorThread
) -> None:
    """No part of the cap, no call; with it, as many at once as it holds."""
    turns = worker(core, RestraintRules(shared_concurrency=2))
    simulator.control(latency_seconds=0.05)
    for number in range(4):
        await admit(core, f"share-{number}")
    role = Execution(turns)
    running = [asyncio.create_task(role.run(one)) for one in await role.claim(10)]
    await asyncio.sleep(0)
    assert calls(simulator) == 0
    await turns.places.share_once()
    await asyncio.gather(*running)
    assert len(simulator.effects(kind="charge")) == 4
