"""The API as a process: what is checked before it listens, and how uvicorn is run."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from app.bootstrap import load_plugins, open_database
from app.cli.failing import without_secrets
from app.cli.processes import check_port
from app.cli.stopping import stop_is_no_failure
from app.domain.errors import StoreUnavailable
from app.service import schema
from app.service.installation import verify
from app.settings import Settings, load_settings

if TYPE_CHECKING:
    from fastapi import FastAPI

_LOG_CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"one_line": {"()": "app.cli.serving.OneLine"}},
    "filters": {"telling": {"()": "app.cli.serving.Telling"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "one_line",
            "filters": ["telling"],
        }
    },
    "loggers": {"uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False}},
}

_CLASS_PATH = re.compile(r"^(?:\w+\.)+(?=\w+: )")


class OneLine(logging.Formatter):
    """What uvicorn says, on one line: the end of a traceback is what a person needs of it."""

    def format(self, record: logging.LogRecord) -> str:
        """The last line that says something, without secrets."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f"\n{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        if os.environ.get("FENCEPOST_LOG_LEVEL", "").lower() == "debug":
            return without_secrets(text, os.environ)
        lines = [line for line in text.splitlines() if line.strip()]
        told = _CLASS_PATH.sub("", lines[-1]) if lines else ""
        return without_secrets(told, os.environ)


class Telling(logging.Filter):
    """Leaves out the line that only says that the line before was the end."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record tells anything."""
        return record.getMessage() != "Application startup failed. Exiting."


def serve(host: str, port: int, processes: int) -> None:
    """Serve until SIGTERM or SIGINT; access is logged by the application itself.

    Raises:
        Refused: the port cannot be had.
        ConfigurationError, SchemaMismatch, StampMismatch: this program may not serve this database.
    """
    import uvicorn

    settings = load_settings()
    check_port(host, port)
    load_plugins(os.environ, settings)
    asyncio.run(_check(settings))
    stop_is_no_failure()  # uvicorn raises the signal that stopped it once more when it is done
    with _metrics_folder(processes):
        uvicorn.run(
            "app.main:app" if processes == 1 else "app.cli.serving:one_of_several",
            factory=True,
            host=host,
            port=port,
            workers=processes,
            loop="uvloop",
            http="httptools",
            ws="none",
            log_config=_LOG_CONFIG,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )


def one_of_several() -> FastAPI:
    """`app.main:app` in a process that ends when the one that started it has, however that ended.

    Otherwise the others would go on serving on the port, and nobody would be left to stop them.
    """
    from app.main import app

    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True)
        watch.start()
    return app()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


async def _check(settings: Settings) -> None:
    """Refuse a database that must not be served; one that is away may still come."""
    database = open_database(settings, "api-check", pool_size=1)
    with suppress(StoreUnavailable):
        await schema.reach(database)
        await database.open()
        try:
            await verify(database, settings.installation)
        finally:
            await database.close()


@contextmanager
def _metrics_folder(processes: int) -> Iterator[None]:
    """Where several processes add up their metrics: fresh, since files of an earlier run would count too."""
    if processes == 1 or os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        yield
        return
    folder = tempfile.mkdtemp(prefix="fencepost-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read when prometheus_client is imported
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
