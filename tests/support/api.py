"""The API for tests: in this process over ASGI, or as real uvicorn processes on free ports.

    async with api(database_url) as running:          # in this process
        answer = await running.post({"type": ..., "input": ...}, key="k")

    with served(database_url) as first, served(database_url) as second: ...

Both speak through `Client`, an httpx client with a tenant's key and the words of the contract.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import httpx
import psycopg
from fastapi import FastAPI

from app.api.services import Services
from app.main import create_app
from app.service import credentials
from app.settings import Settings
from app.storage.database import Database
from tests.support.processes import CHECKOUT

SCOPES = ("operations:read", "operations:write")
TENANT = "acme"


def charge(amount: int = 100, **input: Any) -> dict[str, Any]:
    """The body of a POST that is valid."""
    return {
        "type": "payments.charge",
        "input": {"amount": amount, "currency": "eur", "source": "tok_ok", **input},
    }


def fresh_key() -> str:
    """An Idempotency-Key nobody used."""
    return str(uuid4())


class Client:
    """The words of the contract, over an httpx client that carries a key."""

    def __init__(self, http: httpx.AsyncClient, secret: str) -> None:
        self.http = http
        self.secret = secret

    async def post(
        self, body: object, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """POST /v1/operations under `key`, a fresh one where it is left out."""
        return await self.http.post(
            "/v1/operations",
            content=json.dumps(body),
            headers={
                "Content-Type": "application/json",
                "Idempotency-Key": key or fresh_key(),
                **(headers or {}),
            },
        )

    async def get(self, id: str, **headers: str) -> httpx.Response:
        """GET /v1/operations/{id}; header names with _ for -."""
        return await self.http.get(
            f"/v1/operations/{id}",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    async def cancel(self, id: str, body: object = None) -> httpx.Response:
        """POST .../cancel."""
        path = f"/v1/operations/{id}/cancel"
        return await (self.http.post(path) if body is None else self.http.post(path, json=body))

    def of(self, secret: str) -> Client:
        """The same service, asked with another key."""
        http = httpx.AsyncClient(
            transport=self.http._transport,
            base_url=self.http.base_url,
            headers=bearer(secret),
        )
        return Client(http, secret)


def bearer(secret: str) -> dict[str, str]:
    """The Authorization header of a key."""
    return {"Authorization": f"Bearer {secret}"}


class Api(Client):
    """An API in this process. `services` may be looked into."""

    def __init__(
        self, app: FastAPI, http: httpx.AsyncClient, secret: str, database_url: str
    ) -> None:
        super().__init__(http, secret)
        self.app = app
        self.database_url = database_url

    @property
    def services(self) -> Services:
        """What the routes work with."""
        services = self.app.state.services
        assert isinstance(services, Services)
        return services


def settings_of(database_url: str, **settings: Any) -> Settings:
    """Settings for tests: quiet, and as little else changed as can be."""
    given = {"environment": "test", "log_level": "error", "failpoints": "", **settings}
    return Settings(database_url=database_url, **given)


@asynccontextmanager
async def api(
    database_url: str,
    *,
    environ: Mapping[str, str] | None = None,
    root_path: str = "",
    scopes: tuple[str, ...] = SCOPES,
    **settings: Any,
) -> AsyncIterator[Api]:
    """The application in this process, with a fresh key of tenant `TENANT`."""
    secret = await make_key(database_url, scopes=scopes)
    app = create_app(settings_of(database_url, **settings), environ or {})
    transport = httpx.ASGITransport(app, root_path=root_path, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport, base_url="http://fencepost.test", headers=bearer(secret)
        ) as http,
    ):
        yield Api(app, http, secret, database_url)


async def make_key(
    database_url: str,
    *,
    tenant: str = TENANT,
    scopes: Sequence[str] = SCOPES,
    expires_in_seconds: float | None = None,
) -> str:
    """The text of a fresh API key."""
    database = Database(database_url, application="test-keys", pool_size=2)
    await database.open()
    try:
        issued = await credentials.issue(
            database,
            environment="test",
            tenant=tenant,
            scopes=scopes,
            name="test",
            expires_in_seconds=expires_in_seconds,
        )
    finally:
        await database.close()
    return issued.secret


class ApiProcess:
    """A uvicorn process of its own; `log` holds what it wrote to stderr and stdout."""

    def __init__(self, running: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.running = running
        self.port = port
        self.log = log

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def client(self, secret: str, **options: Any) -> AsyncIterator[Client]:
        """A client over real connections."""
        async with httpx.AsyncClient(
            base_url=self.url, headers=bearer(secret), timeout=30.0, **options
        ) as http:
            yield Client(http, secret)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, and wait for its exit status."""
        self.running.send_signal(number)
        return self.running.wait(timeout=30)


@asynccontextmanager
async def two(
    database_url: str, folder: Path, **settings: Any
) -> AsyncIterator[tuple[Client, Client]]:
    """A client of each of two processes, both with the same key."""
    secret = await make_key(database_url)
    with (
        served(database_url, folder / "first.log", **settings) as first,
        served(database_url, folder / "second.log", **settings) as second,
    ):
        async with first.client(secret) as one, second.client(secret) as other:
            yield one, other


_SERVE = """
import socket, sys, uvicorn
from app.main import server_options
from app.settings import load_settings
config = uvicorn.Config("app.main:app", **server_options(load_settings()))
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
"""


@contextmanager
def served(database_url: str, log: Path, **settings: Any) -> Iterator[ApiProcess]:
    """An API process on a free port, ready when the block begins, gone when it ends.

    Settings are named without their prefix; an upper-case name with one goes into the environment as it is.
    """
    environ = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    environ |= {
        "DATABASE_URL": database_url,
        "PYTHONPATH": str(CHECKOUT),
        "FENCEPOST_ENVIRONMENT": "test",
    }
    for name, value in settings.items():
        environ[name if name.isupper() else f"FENCEPOST_{name.upper()}"] = str(value)
    with socket.socket() as listening, log.open("ab") as output:
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)
        listening.set_inheritable(True)
        port = listening.getsockname()[1]
        running = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(listening.fileno())],
            cwd=CHECKOUT,
            env=environ,
            pass_fds=[listening.fileno()],
            stdout=output,
            stderr=output,
        )
    try:
        process = ApiProcess(running, port, log)
        # The socket listens already, so the request waits for the process to come up.
        with httpx.Client(timeout=30.0) as http:
            try:
                http.get(f"{process.url}/livez").raise_for_status()
            except httpx.HTTPError as error:
                raise AssertionError(log.read_text()) from error
        yield process
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()


def _is_setting(name: str) -> bool:
    return name.startswith("FENCEPOST_") or name == "PROMETHEUS_MULTIPROC_DIR"


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Return once `condition()` (plain or async) is true, looking again and again."""
    with anyio.fail_after(seconds):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await anyio.sleep(0.01)


_CHANGES = {
    "pending": "",
    "running": "state = 'running'",
    "waiting": "state = 'waiting'",
    "uncertain": "state = 'uncertain', actor = 'reconciler', uncertain_since = now()",
    "needs_attention": "state = 'needs_attention', actor = 'reconciler', attention = 'key_burned'",
    "compensating": "state = 'compensating', ending = 'failed'",
}
_ENDINGS = {
    "succeeded": ("result", '{"charge":"ch_1"}'),
    "failed": (
        "error",
        '{"code":"provider-rejected","detail":"No.","retryable":false,"provider_code":"card_declined"}',
    ),
    "cancelled": ("error", '{"code":"cancelled","detail":"Cancelled.","retryable":false}'),
}
STATES = (*_CHANGES, *_ENDINGS, "tombstone")
"""Everything an operation can be, as `put_into` makes it."""


def put_into(database_url: str, id: str, state: str) -> None:
    """Put the pending operation `id` into `state`, its version raised, by direct SQL."""
    uuid = id.removeprefix("op_")
    with psycopg.connect(database_url, autocommit=True) as connection:
        if state in _CHANGES:
            changes = _CHANGES[state] or "state = 'pending'"
            connection.execute(
                f"UPDATE work SET {changes}, version = version + 1, changed_at = now()"
                " WHERE operation_id = %s",
                [uuid],
            )
            return
        ending = "succeeded" if state == "tombstone" else state
        column, value = _ENDINGS[ending]
        connection.execute(
            f"UPDATE operations o SET state = %s, {column} = %s, version = w.version + 1,"
            " completed_at = now(), cancel_requested = (w.stop_cause IS NOT NULL),"
            " idempotency_expires_at = now() + o.retention_seconds * interval '1 second'"
            " FROM work w WHERE w.operation_id = o.id AND o.id = %s",
            [ending, value.encode(), uuid],
        )
        connection.execute("DELETE FROM work WHERE operation_id = %s", [uuid])
        if state == "tombstone":
            connection.execute(
                "UPDATE operations SET purged_at = now(), input = NULL, result = NULL, error = NULL,"
                " answer = NULL, idempotency_key = NULL, metadata = NULL WHERE id = %s",
                [uuid],
            )


def rows_of(database_url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that admission may write, to compare before and after."""
    with psycopg.connect(database_url) as connection:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in ("operations", "work", "operator_actions")
        }


def count(database_url: str, query: str = "SELECT count(*) FROM operations") -> int:
    """One number."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])
