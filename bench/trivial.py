"""A provider that answers at once, and a core on a database: what measurements are built from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from app.bootstrap import Core, open_core
from app.domain.identity import DownstreamKey, IdempotencyKey
from app.domain.outcome import Finding, Outcome, Succeeded, Unavailable
from app.domain.plan import EffectRequest
from app.domain.profile import ProviderProfile
from app.domain.provider import LastCheck
from app.service.admission import AdmissionService, Draft
from app.settings import Settings


class TrivialAdapter:
    """Succeeds at once, with the last check made, under the profile of `payments`."""

    def __init__(self, profile: ProviderProfile) -> None:
        self._profile = profile

    @property
    def profile(self) -> ProviderProfile:
        """The profile it stands in for."""
        return self._profile

    async def perform(
        self, request: EffectRequest, key: DownstreamKey, last_check: LastCheck
    ) -> Outcome:
        """Done at once."""
        last_check()
        return Succeeded(f"ch_{key.value}", {"charge": key.value})

    async def look_up(self, request: EffectRequest, key: DownstreamKey) -> Finding:
        """Never asked."""
        return Unavailable("none")

    async def probe(self) -> str | None:
        """Always there."""
        return None

    async def close(self) -> None:
        """Nothing to close."""


@asynccontextmanager
async def core_on(database_url: str) -> AsyncIterator[Core]:
    """A core whose provider is trivial."""
    settings = Settings(database_url=database_url, environment="test", log_level="error")
    core = await open_core(settings, {}, "bench")
    trivial = TrivialAdapter(core.plugins.adapters["payments"].profile)
    plugins = replace(core.plugins, adapters={"payments": trivial})
    core = replace(core, plugins=plugins)
    try:
        yield core
    finally:
        await core.close()


async def admit(service: AdmissionService, number: int) -> None:
    """One new charge."""
    body = {"amount": 100, "currency": "eur", "source": "tok_ok", "reference": f"r{number}"}
    members = {"type": "payments.charge", "input": body}
    await service.submit(Draft("bench", IdempotencyKey(f"k{number}"), members, {}))
