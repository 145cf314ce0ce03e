"""What a provider adapter is: the seam between a decided send and the wire.

One file per provider in `app/providers/`; the module holds one constant, `provider`, a `ProviderPlugin`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from app.domain.identity import DownstreamKey
from app.domain.outcome import Finding, Outcome
from app.domain.plan import EffectRequest
from app.domain.profile import ProviderProfile

LastCheck = Callable[[], None]
"""Called immediately before the first byte leaves, on the open connection; raises `SendWindowClosed` when
the send comes too late (R1). A transport that cannot call it there may not be used for effects."""


class ProviderAdapter(Protocol):
    """One configured provider. Every method is safe to call concurrently."""

    @property
    def profile(self) -> ProviderProfile:
        """What the provider can do, and what its answers mean."""

    async def perform(
        self, request: EffectRequest, key: DownstreamKey, last_check: LastCheck
    ) -> Outcome:
        """Send `request` under `key` and say what the answer means.

        Expected failures are outcomes; an exception that leaks is taken as `Unknown` by the one caller.
        """

    async def look_up(self, request: EffectRequest, key: DownstreamKey) -> Finding:
        """Ask what became of the effect of `request`. Never sends an effect.

        Only called where the profile has look-up rules; expected failures are findings.
        """

    async def probe(self) -> str | None:
        """None where the provider answers, else one sentence that says why not. Has no effect."""

    async def close(self) -> None:
        """Close every connection. Calls under way end with an error."""


@dataclass(frozen=True, slots=True)
class ProviderPlugin:
    """How a provider is loaded. `options` is validated from the settings `FENCEPOST_<NAME>_*`.

    `open` builds the adapter from the validated options; it does no I/O.
    """

    name: str
    title: str
    options: type[BaseModel]
    open: Callable[[Any], ProviderAdapter]
