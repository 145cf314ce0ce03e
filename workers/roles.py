"""Roles: what one worker or reconciler process is made of, from start to clean stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from prometheus_client import start_http_server

from app.bootstrap import Core, make_renewal, open_core
from app.domain.errors import StoreUnavailable
from app.service.execution import Execution
from app.service.installation import watch_epoch
from app.service.places import SHARE_SECONDS
from app.service.reconciliation import Reconciliation
from app.service.turns import Turns
from app.settings import Settings
from app.telemetry import Event
from workers.lease_keeper import LeaseKeeper
from workers.loop import Loop, Role

EPOCH_INTERVAL_SECONDS = 5.0
ROLES: Mapping[str, Callable[[Turns], Role]] = {
    "worker": Execution,
    "reconciler": Reconciliation,
}


async def run_role(
    name: str,
    settings: Settings,
    environ: Mapping[str, str],
    *,
    once: bool = False,
    concurrency: int | None = None,
) -> int:
    """Run one role until a signal ends it, or one pass with `once`; the operations claimed by that pass.

    Raises:
        ConfigurationError, SchemaMismatch, StampMismatch, StoreUnavailable: see `open_core`.
        EpochChanged: the database was adopted while this ran (R16).
    """
    core = await open_core(settings, environ, name)
    turns = core.turns()
    keeper = LeaseKeeper(
        lambda: make_renewal(settings, name),
        settings.lease_policy,
        core.telemetry,
    )
    loop = Loop(
        ROLES[name](turns),
        keeper,
        core.telemetry,
        concurrency=concurrency or settings.worker_concurrency,
        poll_interval_seconds=settings.poll_interval_seconds
        if name == "worker"
        else settings.reconcile_interval_seconds,
        drain_seconds=settings.drain_seconds,
    )
    keeper.start()
    try:
        if once:
            await turns.places.share_once()
            return await loop.run_once()
        if settings.metrics_port:
            start_http_server(settings.metrics_port, "127.0.0.1", core.telemetry.registry)
        await _run_until_stopped(core, turns, loop)
        return 0
    finally:
        with suppress(TimeoutError):  # a database that stays away does not keep the process
            async with asyncio.timeout(settings.drain_seconds + 5):
                await turns.drain()
        keeper.stop()
        await core.close()
        core.telemetry.event(Event.STOPPED)


async def _run_until_stopped(core: Core, turns: Turns, loop: Loop) -> None:
    _obey_signals(turns, loop)
    core.telemetry.event(Event.STARTED, stamp=core.stamp.stamp, epoch=core.stamp.epoch)
    running = asyncio.create_task(loop.run(), name="loop")
    watching = asyncio.create_task(
        watch_epoch(
            core.database,
            core.stamp.epoch,
            interval_seconds=EPOCH_INTERVAL_SECONDS,
            expected_stamp=core.stamp.stamp,
        )
    )
    listening = asyncio.create_task(_listen(core, loop))
    sharing = asyncio.create_task(_share(turns))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            turns.draining = True
            loop.stop()
        await running
        if watching.done():
            watching.result()  # it only ends by an error, and the process ends with it
    finally:
        others = (watching, listening, sharing)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _obey_signals(turns: Turns, loop: Loop) -> None:
    """The first SIGTERM or SIGINT drains; the second leaves at once, and safely: leases end by themselves."""

    def stop() -> None:
        if turns.draining:
            os._exit(128 + signal.SIGTERM)
        turns.draining = True
        loop.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def _listen(core: Core, loop: Loop) -> None:
    """Wake the loop at each notice, and whenever one may have been missed."""
    async for _ in core.hear_of_work():
        loop.wake()


async def _share(turns: Turns) -> None:
    """Keep this process's part of shared concurrency caps, or lose it with the others' knowledge."""
    while True:
        try:
            await turns.places.share_once()
        except StoreUnavailable as error:
            turns.telemetry.event(Event.STORE_UNAVAILABLE, "warning", detail=str(error))
        await asyncio.sleep(SHARE_SECONDS / 5)
