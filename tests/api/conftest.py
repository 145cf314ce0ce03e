"""The API on a fresh database, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.api import Api, api
from tests.support.postgres import Server


@pytest.fixture
async def running(database_url: str) -> AsyncIterator[Api]:
    """The application in this process, asked by a key of tenant `acme` that may read and write."""
    async with api(database_url) as started:
        yield started


@pytest.fixture(scope="module")
async def shared(postgres_server: Server, template_database: str) -> AsyncIterator[Api]:
    """The same, once for a module: for tables of refusals, which leave nothing behind."""
    with postgres_server.database("shared", template=template_database) as name:
        async with api(postgres_server.url_of(name)) as started:
            yield started
