"""One open database per storage test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from app.storage.database import Database
from tests.support.races import session


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A pool on the test's own database."""
    async with session(database_url) as opened:
        yield opened
