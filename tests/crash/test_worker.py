"""Worker and reconciler killed at each crash window, then recovered: one effect, a stated ending.

DESIGN.md I2, I4, I7; CASES.md B06, B23 (the key and the request survive), B35's last sentence.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from app.bootstrap import Core
from app.domain.lifecycle import State
from app.domain.operation import OperationView
from app.failpoints import Failpoint
from app.service.reconciliation import Reconciliation
from tests.support.recovery import (
    admit,
    age,
    core_of,
    death_of,
    elapse,
    environment,
    process,
    recover,
    rows,
    view_of,
)
from tests.support.simulator import SimulatorThread

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WORKER_WINDOWS = (
    Failpoint.AFTER_CLAIM,
    Failpoint.BEFORE_BEGIN_COMMIT,
    Failpoint.AFTER_BEGIN,
    Failpoint.AFTER_EFFECT,
    Failpoint.BEFORE_RECORD_COMMIT,
    Failpoint.AFTER_RECORD,
)
RECONCILER_WINDOWS = (*WORKER_WINDOWS, Failpoint.AFTER_LOOKUP)


@pytest.fixture
def simulator() -> Iterator[SimulatorThread]:
    with SimulatorThread() as running:
        running.control(slow_seconds=1)
        yield running


@pytest.mark.parametrize("window", WORKER_WINDOWS)
async def test_worker_killed(
    window: Failpoint, database_url: str, simulator: SimulatorThread
) -> None:
    """kill -9 of the worker in each of its windows: one effect, `succeeded`, nobody asked."""
    environ = environment(database_url, simulator.url)
    async with core_of(environ) as core:
        view = await admit(core, f"worker-{window}")
        armed = {**environ, "FENCEPOST_FAILPOINTS": f"{window}=kill"}
        with process(armed, "-m", "workers", "worker") as victim:
            assert await death_of(victim) == -signal.SIGKILL
        await recover(core, database_url)
        end = await view_of(core, view)
    assert end.state is State.SUCCEEDED
    assert len(simulator.effects(reference=f"worker-{window}")) == 1
    assert rows(database_url, "SELECT count(*) FROM work") == [(0,)]
    assert _one_key(simulator, f"worker-{window}")


@pytest.mark.parametrize("window", RECONCILER_WINDOWS)
async def test_reconciler_killed(
    window: Failpoint, database_url: str, simulator: SimulatorThread
) -> None:
    """kill -9 of the reconciler in each of its windows, on doubt whose effect does not exist yet."""
    environ = environment(database_url, simulator.url)
    source = "tok_drop_after" if window is Failpoint.AFTER_LOOKUP else "tok_drop_before"
    async with core_of(environ) as core:
        view = await admit(core, f"reconciler-{window}", source=source)
        await recover(core, database_url, passes=1)  # the worker's turn ends in doubt
        age(database_url)
        armed = {**environ, "FENCEPOST_FAILPOINTS": f"{window}=kill"}
        if (await view_of(core, view)).state is State.UNCERTAIN:
            with process(armed, "-m", "workers", "reconciler") as victim:
                assert await death_of(victim) == -signal.SIGKILL
        await recover(core, database_url)
        end = await view_of(core, view)
    assert end.state is State.SUCCEEDED
    assert len(simulator.effects(reference=f"reconciler-{window}")) == 1
    assert _one_key(simulator, f"reconciler-{window}")


async def test_doubt_is_settled_with_no_worker_alive(
    database_url: str, simulator: SimulatorThread
) -> None:
    """I7, K3: a reconciler alone takes what a dead worker left open, and nothing that was not begun."""
    environ = environment(database_url, simulator.url)
    async with core_of(environ) as core:
        open_one = await admit(core, "left-open")
        armed = {**environ, "FENCEPOST_FAILPOINTS": "after_effect=kill"}
        with process(armed, "-m", "workers", "worker") as victim:
            await death_of(victim)
        pending = await admit(core, "not-begun")
        reconciliation = Reconciliation(core.turns())
        assert await reconciliation.claim(10) == []  # its lease is not over
        elapse(database_url, 3600)
        for one in await reconciliation.claim(10):
            await reconciliation.run(one)
        assert (await view_of(core, open_one)).state is State.SUCCEEDED
        assert (await view_of(core, pending)).state is State.PENDING
    assert len(simulator.effects(reference="left-open")) == 1


async def test_worker_comes_back_under_its_old_name(
    database_url: str, simulator: SimulatorThread
) -> None:
    """CASES.md B06: the same host, the same role: the dead one's lease is still taken over."""
    environ = environment(database_url, simulator.url, LEASE_SECONDS="2")
    async with core_of(environ) as core:
        view = await admit(core, "old-name")
        armed = {**environ, "FENCEPOST_FAILPOINTS": "after_claim=kill"}
        with process(armed, "-m", "workers", "worker") as victim:
            await death_of(victim)
        before = rows(database_url, "SELECT lease_owner_token, lease_generation FROM work")
        with process(
            environ, "-m", "workers", "worker"
        ):  # nothing is aged: the lease ends by itself
            await _until_done(core, view)
    assert len(simulator.effects(reference="old-name")) == 1
    [(token, generation)] = rows(
        database_url, "SELECT finished_by_token, finished_by_generation FROM operations"
    )
    assert token != before[0][0]
    assert generation == before[0][1] + 1


async def test_sigterm_drains_and_gives_leases_back(
    database_url: str, simulator: SimulatorThread, tmp_path: Path
) -> None:
    """The first SIGTERM lets the call under way end and record; nothing stays leased."""
    environ = environment(database_url, simulator.url)
    async with core_of(environ) as core:
        view = await admit(core, "drained", source="tok_slow")
        with process(environ, "-m", "workers", "worker", log=tmp_path / "log") as worker:
            await anyio.to_thread.run_sync(lambda: simulator.wait_for_calls(1))
            worker.send_signal(signal.SIGTERM)
            assert await death_of(worker) == 0, (tmp_path / "log").read_text()
        end = await view_of(core, view)
    assert end.state is State.SUCCEEDED
    assert rows(database_url, "SELECT count(*) FROM work") == [(0,)]
    assert len(simulator.effects(reference="drained")) == 1


async def test_second_sigterm_leaves_at_once_and_safely(
    database_url: str, simulator: SimulatorThread
) -> None:
    """The second SIGTERM does not wait for the call; the attempt it leaves open is settled later."""
    environ = environment(database_url, simulator.url, PAYMENTS_TIMEOUT_SECONDS="25")
    simulator.control(slow_seconds=20)
    async with core_of(environment(database_url, simulator.url)) as core:
        view = await admit(core, "left", source="tok_slow")
        with process(environ, "-m", "workers", "worker") as worker:
            await anyio.to_thread.run_sync(lambda: simulator.wait_for_calls(1))
            worker.send_signal(signal.SIGTERM)
            with anyio.move_on_after(0.3):
                await death_of(worker)
            assert worker.poll() is None
            worker.send_signal(signal.SIGTERM)
            assert await death_of(worker, 5) == 128 + signal.SIGTERM
        await recover(core, database_url)
        end = await view_of(core, view)
    assert end.state is State.SUCCEEDED
    assert len(simulator.effects(reference="left")) == 1


async def test_stopped_past_its_lease_sends_no_byte(
    database_url: str, simulator: SimulatorThread, tmp_path: Path
) -> None:
    """Counterexamples 1 and 2 (R1): stopped before the check, resumed after its lease: zero bytes."""
    environ = environment(database_url, simulator.url, LEASE_SECONDS="2")
    armed = {**environ, "FENCEPOST_FAILPOINTS": f"after_begin=gate:{tmp_path}"}
    async with core_of(environ) as core:
        view = await admit(core, "stopped")
        with process(armed, "-m", "workers", "worker", log=tmp_path / "log") as victim:
            await _until(lambda: (tmp_path / "after_begin.reached").exists())
            victim.send_signal(signal.SIGSTOP)
            await recover(core, database_url)
            assert (await view_of(core, view)).state is State.SUCCEEDED
            calls = len(simulator.calls(key=_key(database_url)))
            (tmp_path / "after_begin.go").touch()
            await anyio.sleep(
                2.5
            )  # the victim's own clock must pass its lease; it is stopped meanwhile
            victim.send_signal(signal.SIGCONT)
            victim.send_signal(signal.SIGTERM)
            assert await death_of(victim) == 0
        assert len(simulator.calls(key=_key(database_url))) == calls
        assert (await view_of(core, view)).state is State.SUCCEEDED
    assert len(simulator.effects(reference="stopped")) == 1
    assert "late_evidence" in (tmp_path / "log").read_text()


def _key(database_url: str) -> str:
    [(key,)] = rows(database_url, "SELECT downstream_key FROM steps")
    return str(key)


def _one_key(simulator: SimulatorThread, reference: str) -> bool:
    """All sends about one operation carried one key and one body (CASES.md B23)."""
    sent = [
        (call["key"], call["body_sha256"])
        for call in simulator.calls(reference=reference)
        if call["method"] == "POST"
    ]
    return len(sent) >= 1 and len(set(sent)) == 1


async def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.02)


async def _until_done(core: Core, view: OperationView, seconds: float = 60.0) -> None:
    with anyio.fail_after(seconds):
        while not (await view_of(core, view)).done:
            await anyio.sleep(0.05)
