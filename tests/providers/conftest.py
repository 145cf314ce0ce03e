"""Fixtures for tests of providers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import respx

from tests.support.wire import Wire, serving


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A scripted server on loopback."""
    async with serving() as wire:
        yield wire


@pytest.fixture
def router() -> Iterator[respx.MockRouter]:
    """Every request of httpx, answered by what the test says."""
    with respx.mock(assert_all_called=False) as router:
        yield router
