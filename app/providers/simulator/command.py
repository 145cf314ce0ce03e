"""The command line: `python -m app.providers.simulator --host H --port P --data FILE`.

Prints `simulator listening on http://HOST:PORT` once it accepts connections. Exit status 0 after
SIGTERM or SIGINT, 2 for wrong usage, 3 when it cannot start (one sentence on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from .server import StartupError, serve


def ready_line(host: str, port: int) -> str:
    """What is printed when the simulator accepts connections."""
    shown = f"[{host}]" if ":" in host else host
    return f"simulator listening on http://{shown}:{port}"


def run(host: str, port: int, data: Path | None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Call in the main thread."""
    logging.basicConfig(level=logging.WARNING)
    try:
        asyncio.run(_until_signalled(host, port, data))
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 3
    return 0


async def _until_signalled(host: str, port: int, data: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(host, port, data, ready=_announce, stop=stop)


def _announce(host: str, port: int) -> None:
    sys.stdout.write(ready_line(host, port) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="simulator", description="A payment provider that fails on request."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8100, help="port; 0 takes a free one")
    parser.add_argument("--data", type=Path, help="the ledger's file; without it, in memory")
    given = parser.parse_args(arguments)
    return run(given.host, given.port, given.data)
