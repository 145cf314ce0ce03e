"""Failpoint x role x disturbance x recovery x provider class: one effect, a stated ending.

Made from the enum. Disturbances: `kill` (SIGKILL of a real process), `pause` (past the lease) and
`cut` (its database connections are terminated at the window). Recoverers: one, or two that race. For the
class with neither keys nor look-up: at most one effect, and a human asked where a send is in doubt.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import anyio
import psycopg
import pytest

from app.bootstrap import Core
from app.domain.lifecycle import State
from app.domain.operation import OperationView
from app.failpoints import Failpoint, Failpoints
from app.service import sending
from app.service.clock import elapsed
from app.service.execution import Execution
from app.service.reconciliation import Reconciliation
from tests.support.recovery import (
    admit,
    core_of,
    death_of,
    elapse,
    environment,
    process,
    rows,
    view_of,
)
from tests.support.simulator import SimulatorThread

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
LONG = 3600.0

API_WINDOWS = (
    Failpoint.BEFORE_ADMIT_COMMIT,
    Failpoint.AFTER_ADMIT_COMMIT,
    Failpoint.BEFORE_ADMIT_ANSWER,
)
WINDOWS = tuple(point for point in Failpoint if point not in API_WINDOWS)
CLASSES = {
    "honours_keys": {},
    "looked_up": {"PAYMENTS_HONOUR_KEYS": "false"},
    "neither": {"PAYMENTS_HONOUR_KEYS": "false", "PAYMENTS_LOOK_UP": "false"},
}


@dataclass(frozen=True)
class Scene:
    """One cell of the matrix."""

    role: str
    window: Failpoint
    disturbance: str
    provider: str
    recoverers: int

    def __str__(self) -> str:
        return f"{self.role}-{self.window}-{self.disturbance}-{self.provider}-{self.recoverers}"

    @property
    def reference(self) -> str:
        return str(self)


def scenes() -> Iterator[Scene]:
    """Every cell; one or two recoverers in turn, since they are independent of the rest."""
    disturbances = ("kill", "pause", "cut")
    number = 0
    for window, disturbance, provider in product(WINDOWS, disturbances, CLASSES):
        for role in ("worker", "reconciler"):
            if role == "worker" and window is Failpoint.AFTER_LOOKUP:
                continue  # a worker never asks
            if role == "reconciler" and not _reconciler_passes(window, provider):
                continue
            number += 1
            yield Scene(role, window, disturbance, provider, 1 + number % 2)


def _reconciler_passes(window: Failpoint, provider: str) -> bool:
    """A reconciler sends only where keys are honoured, and asks only where it can."""
    if window in (Failpoint.AFTER_CLAIM, Failpoint.BEFORE_RECORD_COMMIT, Failpoint.AFTER_RECORD):
        return True
    if window is Failpoint.AFTER_LOOKUP:
        return provider != "neither"
    return provider == "honours_keys"


@pytest.fixture
def simulator() -> Iterator[SimulatorThread]:
    with SimulatorThread() as running:
        yield running


def test_every_failpoint_is_in_the_matrix() -> None:
    """A new crash window is tested the moment it exists, or this says that it is not."""
    assert {scene.window for scene in scenes()} | set(API_WINDOWS) == set(Failpoint)


@pytest.mark.parametrize("scene", tuple(scenes()), ids=str)
async def test_one_effect_and_a_stated_ending(
    scene: Scene,
    database_url: str,
    simulator: SimulatorThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = environment(database_url, simulator.url, **CLASSES[scene.provider])
    async with core_of(environ) as core:
        view = await _prepare(core, scene, simulator, database_url)
        if scene.disturbance == "kill":
            armed = {**environ, "FENCEPOST_FAILPOINTS": f"{scene.window}=kill"}
            with process(armed, "-m", "workers", scene.role) as victim:
                assert await death_of(victim) == -signal.SIGKILL
            await _recover(core, scene, database_url)
        else:
            await _disturb(core, scene, database_url, tmp_path, monkeypatch)
            await _recover(core, scene, database_url)
        end = await view_of(core, view)
    _judge(scene, end, simulator, database_url)


async def _prepare(
    core: Core, scene: Scene, simulator: SimulatorThread, database_url: str
) -> OperationView:
    """A pending operation for a worker; for a reconciler one whose only send is in doubt."""
    if scene.role == "worker":
        return await admit(core, scene.reference)
    simulator.fault(match={"method": "POST"}, effect="before", drop=True)
    view = await admit(core, scene.reference)
    await _pass(core, Execution)
    assert (await view_of(core, view)).state is State.UNCERTAIN
    elapse(database_url, 30)
    return view


async def _pass(core: Core, role: type[Execution] | type[Reconciliation]) -> int:
    turns = core.turns()
    acting = role(turns)
    claimed = await acting.claim(10)
    for one in claimed:
        await acting.run(one)
    await turns.drain()
    return len(claimed)


async def _disturb(
    core: Core,
    scene: Scene,
    database_url: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hold a victim at the window; meanwhile let its lease end and others finish, or cut its connections."""
    environ = environment(database_url, "http://127.0.0.1:1")
    async with core_of(environ, role="victim") as other:
        armed = Failpoints({scene.window: (f"gate:{folder}", 1)})
        victim_core = replace(other, plugins=core.plugins, failpoints=armed)
        role = Execution if scene.role == "worker" else Reconciliation
        victim = asyncio.create_task(_pass(victim_core, role))
        with anyio.fail_after(60):
            while not (folder / f"{scene.window}.reached").exists():
                await anyio.sleep(0.005)
        if scene.disturbance == "pause":
            await _recover(core, scene, database_url)
            # The victim's own clock has gone on as well while it stood still.
            monkeypatch.setattr(sending, "elapsed", lambda: elapsed() + LONG)
        else:
            with psycopg.connect(database_url, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'fencepost-victim'"
                    " AND datname = current_database()"
                )
        (folder / f"{scene.window}.go").touch()
        await asyncio.wait_for(asyncio.gather(victim, return_exceptions=True), 60)
        monkeypatch.undo()


async def _recover(core: Core, scene: Scene, database_url: str) -> None:
    """One recoverer, or two that race for every claim, until the operation is done or stays where it is."""
    for _ in range(8):
        elapse(database_url, LONG / 2)
        for role in (Execution, Reconciliation):
            await asyncio.gather(*(_pass(core, role) for _ in range(scene.recoverers)))
        if rows(database_url, "SELECT count(*) FROM work") == [(0,)]:
            return


def _judge(scene: Scene, end: OperationView, simulator: SimulatorThread, database_url: str) -> None:
    """Rows, ledger and answer agree."""
    effects = simulator.effects(reference=scene.reference)
    sent = [
        (call["key"], call["body_sha256"])
        for call in simulator.calls(reference=scene.reference)
        if call["method"] == "POST"
    ]
    assert len({body for _, body in sent}) <= 1
    assert len({key for key, _ in sent}) <= 1
    if scene.provider != "neither":
        assert end.state is State.SUCCEEDED
        assert len(effects) == 1
        return
    assert len(effects) <= 1
    assert len(sent) <= 1
    if end.state is State.SUCCEEDED:
        assert len(effects) == 1
    else:
        assert end.state is State.NEEDS_ATTENTION
        assert end.attention == "no-evidence-possible"
        assert rows(
            database_url,
            "SELECT count(*) FROM attempts WHERE outcome IS NULL OR outcome = 'unknown'",
        ) == [(1,)]
