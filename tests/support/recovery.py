"""Crash tests' tools: a victim process with an armed failpoint, and recovery without waiting.

The victim is a real process and dies for real. Recovery runs in this process, pass by pass, on rows that are
aged by SQL: what would be due after the lease's end or a back-off is due now.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import psycopg

from app.bootstrap import Core, open_core
from app.domain.identity import IdempotencyKey
from app.domain.operation import OperationView
from app.service.admission import Admitted, Draft
from app.service.execution import Execution
from app.service.reconciliation import Reconciliation
from app.settings import Settings
from app.storage import views

CHECKOUT = Path(__file__).resolve().parents[2]
TENANT = "crash"


def environment(database_url: str, simulator_url: str, **settings: str) -> dict[str, str]:
    """The environment of a process under test; settings without their prefix."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")}
    return {
        **kept,
        "DATABASE_URL": database_url,
        "PYTHONPATH": str(CHECKOUT),
        "FENCEPOST_ENVIRONMENT": "test",
        "FENCEPOST_PAYMENTS_URL": simulator_url,
        "FENCEPOST_PAYMENTS_TIMEOUT_SECONDS": "5",
        "FENCEPOST_PAYMENTS_SEND_WINDOW_SECONDS": "1.5",
        **{f"FENCEPOST_{name}": value for name, value in settings.items()},
    }


@contextmanager
def process(
    environ: Mapping[str, str], *arguments: str, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program of the project, killed at the end if it still runs."""
    with (log or Path(os.devnull)).open("ab") as output:
        running = subprocess.Popen(
            [sys.executable, *arguments], env=dict(environ), cwd=CHECKOUT, stderr=output
        )
        try:
            yield running
        finally:
            if running.poll() is None:
                running.kill()
            running.wait()


async def death_of(running: subprocess.Popen[bytes], seconds: float = 60.0) -> int:
    """The exit status (negative: the signal) of a process that is about to end."""
    with anyio.fail_after(seconds):
        return await anyio.to_thread.run_sync(running.wait, abandon_on_cancel=True)


@asynccontextmanager
async def core_of(environ: Mapping[str, str], role: str = "recovery") -> AsyncIterator[Core]:
    """A core in this process, on the same database and provider."""
    settings = Settings(
        database_url=environ["DATABASE_URL"],
        environment="test",
        log_level="error",
        failpoints="",
        lease_seconds=float(environ.get("FENCEPOST_LEASE_SECONDS", "30")),
    )
    core = await open_core(settings, environ, role)
    try:
        yield core
    finally:
        await core.close()


async def admit(core: Core, key: str, **input: Any) -> OperationView:
    """Admit one charge, as the API does."""
    body = {"amount": 100, "currency": "eur", "source": "tok_ok", "reference": key, **input}
    answer = await core.admission().submit(
        Draft(TENANT, IdempotencyKey(key), {"type": "payments.charge", "input": body}, {})
    )
    assert isinstance(answer, Admitted), answer
    return answer.view


def age(database_url: str) -> None:
    """Let every lease be over and everything live be due, as if hours had passed."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "UPDATE work SET due_at = least(due_at, now() - interval '1 second'),"
            " lease_expires_at = lease_expires_at - interval '1 hour'"
            " WHERE state <> 'needs_attention'"
        )


_TIMES = {
    "work": ("due_at", "deadline", "lease_expires_at", "changed_at", "uncertain_since"),
    "operations": ("created_at", "not_before", "deadline"),
    "steps": ("first_began_at", "resend_by"),
    "attempts": ("began_at", "send_by", "arrives_by", "settled_at", "recorded_at"),
    "findings": ("asked_at", "found_at"),
    "providers": ("breaker_open_until", "tokens_at"),
    "provider_shares": ("expires_at",),
}


def elapse(database_url: str, seconds: float) -> None:
    """Let so many seconds have passed: every instant of live operations moves back by as much."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for table, columns in _TIMES.items():
            moved = ", ".join(
                f"{column} = {column} - make_interval(secs => {seconds})" for column in columns
            )
            connection.execute(f"UPDATE {table} SET {moved}")


async def recover(core: Core, database_url: str, *, passes: int = 20) -> None:
    """Let a fresh worker and a fresh reconciler work until nothing is live, or `passes` are over."""
    turns = core.turns()
    for _ in range(passes):
        age(database_url)
        claimed = 0
        for role in (Execution(turns), Reconciliation(turns)):
            for one in await role.claim(50):
                claimed += 1
                await role.run(one)
        if not claimed:
            break
    await turns.drain()


async def view_of(core: Core, view: OperationView) -> OperationView:
    """The operation as a reader sees it now."""
    async with core.database.transaction() as tx:
        return (await views.read(tx, [view.id]))[view.id]


def rows(database_url: str, query: str, *parameters: object) -> list[tuple[Any, ...]]:
    """What a query answers, for assertions on our own rows."""
    with psycopg.connect(database_url) as connection:
        return connection.execute(query, parameters).fetchall()
