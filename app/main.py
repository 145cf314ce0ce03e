"""ASGI entry: `uvicorn --factory app.main:app`, or `create_app` with settings of one's own.

One process: it opens the core (schema and stamp compared), serves, and on SIGTERM or SIGINT ends its long
polls at once, lets requests under way finish, and then closes. It leaves when the database is adopted (R16).
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

from fastapi import FastAPI

from app.api.application import build
from app.api.services import Services
from app.bootstrap import Core, open_core
from app.service.cancellation import cancel
from app.service.credentials import Verifier
from app.service.installation import EpochChanged, watch_epoch
from app.service.readiness import Readiness
from app.service.reading import Reading
from app.service.standings import StandingsReader
from app.service.watching import Hub
from app.settings import Settings, load_settings
from app.telemetry import Event

EPOCH_INTERVAL_SECONDS = 5.0


def app() -> FastAPI:
    """The application of this process's environment.

    Raises:
        ConfigurationError: settings that do not hold.
    """
    return create_app(load_settings(), os.environ)


def create_app(settings: Settings, environ: Mapping[str, str]) -> FastAPI:
    """The application. Its lifespan opens and closes the core; `environ` holds the providers' options.

    Raises, from the lifespan:
        ConfigurationError, SchemaMismatch, StampMismatch, StoreUnavailable: see `bootstrap.open_core`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        core = await open_core(settings, environ, "api")
        try:
            services = _services(core)
            app.state.services = services
            async with _beside(core, services):
                yield
        finally:
            await core.close()

    return build(settings, lifespan)


def server_options(settings: Settings) -> dict[str, Any]:
    """How uvicorn is to run it, besides address and processes (keyword arguments of `uvicorn.run`)."""
    return {
        "factory": True,
        "loop": "uvloop",
        "http": "httptools",
        "ws": "none",
        "lifespan": "on",
        # Anybody can send forwarding headers; links do not depend on them (CONTRACT.md 14).
        "proxy_headers": False,
        "server_header": False,
        # The access log of ours has no raw paths, which may hold anything.
        "access_log": False,
        "log_config": None,
        "timeout_graceful_shutdown": math.ceil(settings.drain_seconds),
    }


def _services(core: Core) -> Services:
    settings, database, registry = core.settings, core.database, core.plugins.registry
    return Services(
        settings=settings,
        registry=registry,
        telemetry=core.telemetry,
        admission=core.admission(),
        reading=Reading(database, core.telemetry),
        cancel=partial(cancel, database, core.notifier, telemetry=core.telemetry),
        operators=core.operators(),
        verifier=Verifier(database, settings.environment),
        hub=Hub(
            database,
            core.telemetry,
            poll_interval_seconds=settings.poll_interval_seconds,
        ),
        readiness=Readiness(database, settings.installation),
        standings=StandingsReader(database, registry),
    )


@asynccontextmanager
async def _beside(core: Core, services: Services) -> AsyncIterator[None]:
    """What runs beside the requests, from before the first to after the last."""
    running = [
        asyncio.create_task(_watch(core, services), name="watching"),
        asyncio.create_task(_leave_when_adopted(core), name="epoch"),
    ]
    core.telemetry.event(Event.STARTED, stamp=core.stamp.stamp, epoch=core.stamp.epoch)
    try:
        with _on_stop(services.hub.close):
            yield
    finally:
        services.hub.close()
        await services.admission.drain()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        core.telemetry.event(Event.STOPPED)


async def _watch(core: Core, services: Services) -> None:
    """The hub of long polls, again after an error nobody expected: without it every wait lasts to its end."""
    while True:
        try:
            await services.hub.run()
        except Exception as error:
            core.telemetry.event(
                Event.UNEXPECTED, "error", error=type(error).__name__, verb="watching"
            )
            await asyncio.sleep(1.0)


async def _leave_when_adopted(core: Core) -> None:
    try:
        await watch_epoch(
            core.database,
            core.stamp.epoch,
            interval_seconds=EPOCH_INTERVAL_SECONDS,
            expected_stamp=core.stamp.stamp,
        )
    except EpochChanged as error:
        core.telemetry.event(Event.STOPPING, "error", detail=str(error))
        signal.raise_signal(signal.SIGTERM)


@contextmanager
def _on_stop(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` in the loop at SIGTERM or SIGINT, beside what the server does then.

    The server waits for requests under way before it ends the lifespan: by then every long poll would have
    held it up. Only handlers that are there already are extended, so without a server nothing changes.
    """
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler

    def stopping(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)
        before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, stopping)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stopping:
                signal.signal(number, handler)
