"""Sockets: one listening address, many connections, a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

from .application import Application
from .connection import Connection, ConnectionLog, Host, Limits
from .ledger import Ledger, LedgerError
from .state import State

_LISTEN_QUEUE = 1024
_GRACE_SECONDS = 1.0
_SWEEP_SECONDS = 5.0


class StartupError(Exception):
    """The simulator cannot start; the message is one sentence for the person who tried."""


async def serve(
    host: str,
    port: int,
    data: Path | None,
    *,
    ready: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
    limits: Limits | None = None,
) -> None:
    """Run the simulated provider until `stop` is set or the caller is cancelled.

    `port` 0 takes a free one; `ready` is called with the host and the port once connections are
    accepted. `data` is the ledger's file (None: in memory). At the end calls under way get one
    second, then they are cut; what they did is committed. Raises `StartupError`.
    """
    try:
        ledger = Ledger(data)
    except LedgerError as error:
        raise StartupError(str(error)) from error
    try:
        listening = _listen(host, port)
        state = State(ledger)
        log = ConnectionLog()
        shared = Host(
            Application(state, log).handle,
            log,
            limits or Limits(),
            ledger.count_connection_without_bytes,
        )
        await _accept(shared, listening, host, ready, stop or asyncio.Event())
    finally:
        ledger.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        # The first address only: with port 0 each further address would get another port.
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartupError(f"The simulator cannot use the address {host}: {error}.") from error
    try:
        # So that a restart need not wait for the last run's connections to leave TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_LISTEN_QUEUE)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(
            f"The simulator cannot listen on {host} port {port}: {reason}."
        ) from error
    listening.setblocking(False)
    return listening


async def _accept(
    shared: Host,
    listening: socket.socket,
    host: str,
    ready: Callable[[str, int], None] | None,
    stop: asyncio.Event,
) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(shared), sock=listening, backlog=_LISTEN_QUEUE
    )
    sweep = loop.create_task(_sweep(shared))
    try:
        if ready is not None:
            ready(host, int(listening.getsockname()[1]))
        await stop.wait()
    finally:
        sweep.cancel()
        server.close()
        await _finish(shared)
        with contextlib.suppress(asyncio.CancelledError):
            await sweep


async def _sweep(shared: Host) -> None:
    """Close connections on which nothing happens."""
    pause = min(_SWEEP_SECONDS, max(shared.limits.idle_seconds / 4, 0.01))
    while True:
        await asyncio.sleep(pause)
        for connection in list(shared.connections):
            connection.close_if_idle(time.monotonic() - shared.limits.idle_seconds)


async def _finish(shared: Host) -> None:
    """Idle connections close now; calls under way get their grace, then everything is cut."""
    shared.stopping = True
    for connection in list(shared.connections):
        connection.close_if_idle(time.monotonic())
    running = [call for connection in shared.connections if (call := connection.running())]
    if running:
        _, late = await asyncio.wait(running, timeout=_GRACE_SECONDS)
        for call in late:
            call.cancel()
        if late:
            await asyncio.wait(late)
    for connection in list(shared.connections):
        connection.abort()
    # Transports close their sockets in a later turn of the loop.
    for _ in range(3):
        await asyncio.sleep(0)
