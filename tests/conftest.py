"""Fixtures for every test: the async backend, and databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.embedded import erase
from tests.support import postgres


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Async tests (marked `anyio`) run on asyncio's own loop: its debug mode sees more."""
    return "asyncio", {"use_uvloop": False}


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """One PostgreSQL for the session: DATABASE_URL's, else an embedded one."""
    with postgres.server() as server:
        yield server


@pytest.fixture(scope="session")
def template_database(postgres_server: postgres.Server) -> Iterator[str]:
    """The name of a migrated database that nobody is connected to."""
    from app.storage.migrations import upgrade  # here: most tests need no database

    with postgres_server.database("template") as name:
        upgrade(postgres_server.url_of(name))
        postgres_server.seal(name)
        yield name


@pytest.fixture
def database_url(postgres_server: postgres.Server, template_database: str) -> Iterator[str]:
    """The address of a fresh migrated database, dropped after the test."""
    with postgres_server.database("test", template=template_database) as name:
        yield postgres_server.url_of(name)


@pytest.fixture
def empty_database_url(postgres_server: postgres.Server) -> Iterator[str]:
    """The address of a fresh database without any table, dropped after the test."""
    with postgres_server.database("empty") as name:
        yield postgres_server.url_of(name)


@pytest.fixture
def server_folder() -> Iterator[Path]:
    """A temporary folder for embedded servers; one that a failed test left there is stopped."""
    with postgres.temporary_folder() as folder:
        yield folder
        for pgdata in (*folder.glob("*/pgdata"), *folder.glob("*/*/pgdata")):
            erase(pgdata.parent)
