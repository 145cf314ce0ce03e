"""`fencepost api`, `worker`, `reconciler` and `simulator`: one process each."""

from __future__ import annotations

import errno
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from app.cli.failing import Refused

Host = Annotated[str, typer.Option("--host", metavar="H", help="Address to listen on.")]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        metavar="N",
        min=1,
        max=2000,
        help="Operations carried at once; default FENCEPOST_WORKER_CONCURRENCY.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Make one pass over what is due, and exit.")]


def api(
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=1, max=65535, help="Port to listen on.")
    ] = 8000,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=1, max=256, help="So many, on one port.")
    ] = 1,
) -> None:
    """Serve the HTTP API.

    SIGTERM lets requests under way end. /readyz says whether database and schema are fine, /metrics is for
    Prometheus (summed over all processes).
    """
    from app.cli.serving import serve

    serve(host, port, processes)


def worker(concurrency: Concurrency = None, once: Once = False) -> None:
    """Run operations: claim what is due, send, record.

    As many processes as wanted, on as many machines as wanted. SIGTERM drains, a second one leaves at once;
    both are safe, and so is kill -9.
    """
    _role("worker", concurrency, once)


def reconciler(concurrency: Concurrency = None, once: Once = False) -> None:
    """Settle doubt: look up at the provider what became of effects whose answer was lost."""
    _role("reconciler", concurrency, once)


def _role(name: str, concurrency: int | None, once: bool) -> None:
    import asyncio

    from app.cli.stopping import stop_is_no_failure

    stop_is_no_failure()
    import uvloop

    from app.cli.session import require_database
    from app.domain.errors import StoreUnavailable
    from app.settings import load_settings
    from workers.roles import run_role

    settings = load_settings()
    if once:
        # A pass that cannot be made should say so, not wait for the database as a service does.
        require_database()

    async def run() -> None:
        # The role drains at a signal once it has begun; until then being cancelled is all there is to do.
        running = asyncio.create_task(
            run_role(name, settings, os.environ, once=once, concurrency=concurrency)
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        with suppress(asyncio.CancelledError):
            await running

    try:
        uvloop.run(run())
    except StoreUnavailable:
        require_database()  # it says why, where the pool only says how long it waited
        raise


def simulator(
    host: Host = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", metavar="P", min=0, max=65535, help="Port; 0 takes a free one."),
    ] = 8100,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            envvar="FENCEPOST_SIMULATOR_DATA",
            help="The ledger's file; without it, in memory.",
        ),
    ] = None,
) -> None:
    """Run the flaky payment provider: a real HTTP server with a durable ledger, which fails on request.

    The token in a charge's `source` chooses how the call ends: tok_ok, tok_declined, tok_slow,
    tok_drop_after, tok_500_before and so on; /_control/ledger shows every effect that happened.
    """
    from app.providers.simulator.command import run

    status = run(host, port, data)
    if status:
        raise typer.Exit(status)  # the sentence is on stderr already


def check_port(host: str, port: int) -> None:
    """Return where `port` can be listened on.

    Raises:
        Refused: it is taken, or the address is none of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        why = (
            "is taken by another program"
            if error.errno == errno.EADDRINUSE
            else f"cannot be used: {error}"
        )
        raise Refused(f"Port {port} on {host} {why}.") from None
