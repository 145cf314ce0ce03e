"""Databases for tests: one server per session, one migrated template, one clone of it per test.

DATABASE_URL, when set, names the server to use (its user must be allowed to create databases);
nothing is started then. Otherwise an embedded server runs in a temporary folder. Names are random,
so that several runs may share one server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from app.embedded import EmbeddedPostgres


@dataclass(frozen=True)
class Server:
    """A PostgreSQL to make databases on; `admin_url` names a database that exists."""

    admin_url: str

    def url_of(self, database: str) -> str:
        """The address of another database on the same server."""
        parts = urlsplit(self.admin_url)  # urlunsplit would spoil an address without a host
        query = f"?{parts.query}" if parts.query else ""
        return f"{parts.scheme}://{parts.netloc}/{database}{query}"

    @contextmanager
    def database(self, purpose: str, template: str | None = None) -> Iterator[str]:
        """The name of a new database, dropped at the end, connections or not."""
        name = f"fencepost_{purpose}_{secrets.token_hex(6)}"
        # A bare one is made as the embedded server makes its own, whatever the server's defaults.
        options = "TEMPLATE {}" if template else "TEMPLATE {} ENCODING 'UTF8' LOCALE 'C'"
        create = sql.SQL(f"CREATE DATABASE {{}} {options}").format(
            sql.Identifier(name), sql.Identifier(template or "template0")
        )
        drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        with psycopg.connect(self.admin_url, autocommit=True) as admin:
            admin.execute(create)
        try:
            yield name
        finally:
            with psycopg.connect(self.admin_url, autocommit=True) as admin:
                admin.execute(drop)

    def seal(self, database: str) -> None:
        """Keep everyone out of a template: one open connection would stop it from being cloned."""
        with psycopg.connect(self.admin_url, autocommit=True) as admin:
            statement = sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false")
            admin.execute(statement.format(sql.Identifier(database)))
            admin.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s",
                [database],
            )


@contextmanager
def server() -> Iterator[Server]:
    """The server of DATABASE_URL, else an embedded one for as long as the context lasts."""
    given = os.environ.get("DATABASE_URL")
    if given:
        yield Server(plain_url(given))
        return
    with (
        temporary_folder() as folder,
        EmbeddedPostgres.start(folder / "data", durable=False) as running,
    ):
        yield Server(running.url)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder with a short path that a server can reach whatever user it runs as."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_url(url: str) -> str:
    """A database address without the name of a Python driver in its scheme."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme.partition('+')[0]}{separator}{rest}"


def ask(url: str, query: str) -> Any:
    """The first value of a query's answer, None without one; what it changes is committed."""
    with psycopg.connect(url) as connection:
        cursor = connection.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None
