"""One run of `up`, from the ports to the last process's end."""

from __future__ import annotations

import http.client
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

import app
from app.cli.failing import Refused
from app.cli.output import note
from app.cli.processes import check_port
from app.cli.up.banner import Banner
from app.cli.up.credentials import development_key
from app.cli.up.folder import DataFolder
from app.cli.up.processes import Child, Program, Stage
from app.cli.up.signals import Signals
from app.cli.up.store import Store
from app.cli.up.supervisor import Supervisor
from app.service import schema
from app.settings import Settings, load_settings

HOST = "127.0.0.1"
_SIMULATOR_PORT = 8100
_DEFAULTS = {
    # Short, so that what tok_slow and doubt look like is seen in seconds.
    "FENCEPOST_PAYMENTS_TIMEOUT_SECONDS": "2",
    "FENCEPOST_RECONCILE_INTERVAL_SECONDS": "0.5",
}
_PROBE_SECONDS = 2.0


def run(folder: DataFolder, port: int, workers: int) -> None:
    """Start everything on `folder`, tell it, and return when asked to stop and all has ended.

    Raises:
        Refused: a port is taken, a setting does not hold, or a process does not come up.
        EmbeddedPostgresError, StoreUnavailable, StampMismatch: the database cannot be had or used.
        KeyboardInterrupt: asked to stop before everything was ready.
    """
    load_settings()  # nonsense is refused before anything starts
    port = _free_port() if port == 0 else port
    check_port(HOST, port)
    provider = os.environ.get("FENCEPOST_PAYMENTS_URL", "")
    simulator_port = None if provider else _simulator_port(port)
    with _database(folder) as store:
        environ = _environment(os.environ, store, provider or f"http://{HOST}:{simulator_port}")
        settings = _settings(environ)
        schema.migrate(store.url, "head", stamp=settings.installation, say=note)
        secret = development_key(settings, folder)
        _write_environment(folder, environ)
        banner = Banner(
            api=f"http://{HOST}:{port}",
            provider=environ["FENCEPOST_PAYMENTS_URL"].rstrip("/"),
            database=store.where,
            data=folder.path,
            secret=secret,
            idempotency_key=str(uuid.uuid4()),
            simulated=not provider,
        )
        programs = list(_programs(folder, port, simulator_port, workers))
        with Signals() as signals, _lifeline() as lifeline:
            children = [Child(program, environ, folder, lifeline) for program in programs]
            supervisor = Supervisor(children, store, signals)
            try:
                supervisor.start(_ready(port, simulator_port))
                sys.stdout.write(banner.text())
                sys.stdout.flush()
                supervisor.watch()
                note("Stopping.")
            finally:
                supervisor.stop()
            note("Stopped.")


@contextmanager
def _database(folder: DataFolder) -> Iterator[Store]:
    """The database, stopped again should anything go wrong before the supervisor has it."""
    store = Store.open(folder, os.environ)
    try:
        yield store
    finally:
        store.stop()  # a second time it does nothing


@contextmanager
def _lifeline() -> Iterator[int]:
    """The end of a pipe that children watch; the other end closes when this process ends, however."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(writer)
        os.close(reader)


def _environment(environ: Mapping[str, str], store: Store, provider: str) -> dict[str, str]:
    """What the children see: the caller's environment, the database, the provider, short times."""
    root = str(Path(app.__file__).resolve().parents[1])
    paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
    given = {name: value for name, value in environ.items() if value or name not in _DEFAULTS}
    return {
        **_DEFAULTS,
        **given,
        "FENCEPOST_DATABASE_URL": store.url,
        "FENCEPOST_PAYMENTS_URL": provider,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }


def _settings(environ: Mapping[str, str]) -> Settings:
    return load_settings().model_copy(
        update={"database_url": SecretStr(environ["FENCEPOST_DATABASE_URL"])}
    )


def _write_environment(folder: DataFolder, environ: Mapping[str, str]) -> None:
    """What another terminal needs to talk to this run, the command itself included."""
    names = ("FENCEPOST_DATABASE_URL", "FENCEPOST_PAYMENTS_URL")
    lines = [f"export {name}={shlex.quote(environ[name])}\n" for name in names]
    python, paths = shlex.quote(sys.executable), shlex.quote(environ["PYTHONPATH"])
    lines.append(f'fencepost() {{ PYTHONPATH={paths} {python} -m app.cli "$@"; }}\n')
    folder.write_private(folder.environment, "".join(lines))


def _programs(
    folder: DataFolder, port: int, simulator_port: int | None, workers: int
) -> Iterator[Program]:
    """What runs, in the order it is started."""
    if simulator_port is not None:
        address = ("--host", HOST, "--port", str(simulator_port), "--data", str(folder.ledger))
        yield Program("simulator", ("simulator", *address), Stage.PROVIDING)
    yield Program("api", ("api", "--host", HOST, "--port", str(port)), Stage.SERVING)
    for number in range(1, workers + 1):
        yield Program(f"worker-{number}", ("worker",), Stage.WORKING)
    yield Program("reconciler", ("reconciler",), Stage.WORKING)


def _ready(port: int, simulator_port: int | None) -> list[Callable[[], bool]]:
    checks = [lambda: _answers(port, "/readyz")]
    if simulator_port is not None:
        checks.append(lambda: _answers(simulator_port, "/_control"))
    return checks


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=_PROBE_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _simulator_port(api_port: int) -> int:
    if api_port != _SIMULATOR_PORT:
        try:
            check_port(HOST, _SIMULATOR_PORT)
        except Refused:
            return _free_port()
        return _SIMULATOR_PORT
    return _free_port()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
