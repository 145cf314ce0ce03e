"""The loop of one process: room, wake-ups, polls, and how it stops (CASES.md K24; workers/loop.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import uuid4

import anyio
import pytest

from app.domain.errors import StoreUnavailable
from app.domain.identity import OperationId
from app.domain.lifecycle import Actor
from app.domain.operation import Claimed, Lease, Trust
from app.telemetry import Metric, Telemetry
from tests.support.core import CapturedLog, capturing_telemetry, counted
from tests.support.races import PATIENCE_SECONDS, Gate, until
from workers import loop as loop_module
from workers.loop import MAX_CLAIM, Loop

pytestmark = pytest.mark.anyio


@dataclass
class One:
    """As much of a `Claimed` as the loop looks at."""

    id: OperationId = field(default_factory=lambda: OperationId.new(1))
    lease: Lease = field(init=False)

    def __post_init__(self) -> None:
        self.lease = Lease(self.id, uuid4(), 1, Trust(0))


class Keeper:
    """Remembers what it was to hold."""

    def __init__(self) -> None:
        self.held: set[Lease] = set()
        self.ever: list[Lease] = []

    def hold(self, lease: Lease) -> None:
        self.held.add(lease)
        self.ever.append(lease)

    def drop(self, lease: Lease) -> None:
        self.held.discard(lease)


class ScriptedRole:
    """Gives what is due, as far as there is room; its turns wait at a gate until it is open."""

    actor = Actor.WORKER

    def __init__(self, due: int = 0) -> None:
        self.due = due
        self.limits: list[int] = []
        self.gate = Gate()
        self.done = 0
        self.cut_short = 0
        self.error: Exception | None = None
        self.on_claim: Callable[[], None] | None = None

    async def claim(self, limit: int) -> list[Claimed]:
        self.limits.append(limit)
        if self.on_claim is not None:
            self.on_claim()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        number = min(limit, self.due)
        self.due -= number
        return [cast(Claimed, One()) for _ in range(number)]

    async def run(self, claimed: Claimed) -> None:
        try:
            await self.gate.enter()
        except asyncio.CancelledError:
            self.cut_short += 1
            return
        self.done += 1


@dataclass
class Scene:
    role: ScriptedRole
    loop: Loop
    keeper: Keeper
    telemetry: Telemetry
    log: CapturedLog


def scene_of(due: int = 0, **changes: Any) -> Scene:
    role, keeper = ScriptedRole(due), Keeper()
    telemetry, log = capturing_telemetry()
    given = {"concurrency": 4, "poll_interval_seconds": 3600.0, "drain_seconds": 10.0, **changes}
    loop = Loop(role, cast(Any, keeper), telemetry, **given)
    return Scene(role, loop, keeper, telemetry, log)


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[asyncio.Task[None]]:
    """The loop, running; stopped at the end, with its gate open."""
    task = asyncio.create_task(scene.loop.run())
    try:
        yield task
    finally:
        scene.loop.stop()
        scene.role.gate.open()
        with anyio.fail_after(PATIENCE_SECONDS):
            await task


async def claims(scene: Scene, number: int) -> None:
    async def made() -> bool:
        return len(scene.role.limits) >= number

    await until(made)


async def test_it_claims_what_there_is_room_for() -> None:
    scene = scene_of(due=10)
    async with running(scene):
        await scene.role.gate.reached(4)
        assert scene.role.limits[0] == 4
        assert len(scene.keeper.held) == 4
        assert counted(scene.telemetry, Metric.IN_FLIGHT, actor="worker") == 4
        assert scene.role.done == 0
    assert scene.role.done == len(scene.keeper.ever)
    assert scene.keeper.held == set(), "what ended is renewed no more"


async def test_a_place_that_comes_free_is_filled_without_a_poll() -> None:
    """The poll is an hour away: only the end of a turn can have made it look again."""
    scene = scene_of(due=50)
    scene.role.gate.open()
    async with running(scene):

        async def all_done() -> bool:
            return scene.role.done == 50

        await until(all_done)
    assert max(scene.role.limits) <= 4


async def test_one_claim_takes_no_more_than_its_bound() -> None:
    scene = scene_of(due=3 * MAX_CLAIM, concurrency=10 * MAX_CLAIM)
    scene.role.gate.open()
    assert await scene.loop.run_once() == 3 * MAX_CLAIM
    assert max(scene.role.limits) == MAX_CLAIM


async def test_idle_it_waits_to_be_woken() -> None:
    scene = scene_of()
    async with running(scene):
        await claims(scene, 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(scene.role.limits) == 1, "no hot loop"
        scene.role.due = 1
        scene.loop.wake()
        await scene.role.gate.reached(1)


async def test_a_notice_while_it_claims_is_not_lost() -> None:
    """K24: what became due after the claim looked, and before it rests, is looked for at once."""
    scene = scene_of()

    def wake_once() -> None:
        scene.role.on_claim = None
        scene.loop.wake()

    scene.role.on_claim = wake_once
    async with running(scene):
        await claims(scene, 2)


async def test_it_polls_though_nobody_tells_it() -> None:
    """CASES.md B37: a listener that died silently costs one poll interval."""
    scene = scene_of(poll_interval_seconds=0.01)
    async with running(scene):
        await claims(scene, 3)
        scene.role.due = 1
        await scene.role.gate.reached(1)


async def test_a_database_that_is_away_is_said_and_waited_for() -> None:
    scene = scene_of(due=1, poll_interval_seconds=0.01)
    scene.role.error = StoreUnavailable("away")
    async with running(scene):
        await scene.role.gate.reached(1)
    assert counted(scene.telemetry, Metric.STORE_ERRORS, where="claim") == 1
    assert len(scene.log.of("store_unavailable")) == 1


async def test_stopping_claims_no_more_and_lets_turns_end() -> None:
    scene = scene_of(due=10)
    async with running(scene) as task:
        await scene.role.gate.reached(4)
        scene.loop.stop()

        async def stopping() -> bool:
            return scene.log.of("stopping") == [{"in_flight": 4}]

        await until(stopping)
        assert not task.done(), "it waits for its turns"
    assert scene.role.done == 4
    assert scene.role.cut_short == 0
    assert scene.role.due == 6


async def test_what_does_not_end_in_time_is_cut_short() -> None:
    scene = scene_of(due=3, drain_seconds=0.05)
    async with running(scene) as task:
        await scene.role.gate.reached(3)
        scene.loop.stop()
        with anyio.fail_after(PATIENCE_SECONDS):
            await task
        assert scene.role.cut_short == 3
        assert scene.keeper.held == set()


async def test_one_pass_ends_when_nothing_is_due() -> None:
    """`--once`: pass by pass until a claim comes back empty, each turn awaited."""
    scene = scene_of(due=9)
    scene.role.gate.open()
    assert await scene.loop.run_once() == 9
    assert scene.role.done == 9
    assert scene.role.due == 0
    assert scene.role.limits[-1] == 4


async def test_the_loops_lag_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md B04: a metric names the blocked loop."""
    monkeypatch.setattr(loop_module, "LAG_PROBE_SECONDS", 0.001)
    scene = scene_of()
    async with running(scene):

        async def observed() -> bool:
            name = f"{Metric.LOOP_LAG_SECONDS.value}_count"
            return (scene.telemetry.registry.get_sample_value(name) or 0) > 2

        await until(observed)
