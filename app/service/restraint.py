"""Restraint in turns: may this send go now, and what its answer says about the provider.

Runs inside the transactions of `begin` and `record`, after their rows are locked; while a provider is well
and has no rate limit it costs one unlocked read per flush, and nothing is written.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.domain.outcome import (
    Absent,
    Applied,
    Finding,
    NotApplied,
    Outcome,
    Refused,
    Unavailable,
    Unknown,
)
from app.domain.profile import ProviderProfile
from app.domain.restraint import BreakerState, after, grant
from app.storage import restraint
from app.storage.database import Transaction
from app.telemetry import Event, Metric, Telemetry

SPREAD_SECONDS = 2.0
"""Those who wait for a provider come back over at least this long, not all at once (CASES.md B32)."""


@dataclass(frozen=True, slots=True)
class Delayed:
    """The send may not go now; nothing was begun."""

    seconds: float


class Restraint:
    """Knows the profiles' rules; the state is in the database."""

    def __init__(self, profiles: Mapping[str, ProviderProfile], telemetry: Telemetry) -> None:
        self._profiles = profiles
        self._telemetry = telemetry

    async def permits(self, tx: Transaction, wanted: Sequence[str]) -> list[Delayed | None]:
        """For each wanted send, by its provider's name: None where it may go, else for how long not."""
        counts = Counter(wanted)
        read = await restraint.read(tx, list(counts))
        limited = [
            name
            for name in counts
            if name not in read
            or read[name].breaker is not BreakerState.CLOSED
            or self._profiles[name].restraint.rate_per_second is not None
        ]
        if not limited:
            return [None] * len(wanted)
        if any(name not in read for name in limited):
            await restraint.register(tx, limited)
        standings, now = await restraint.lock(tx, limited)
        assert now is not None
        grants = {
            name: grant(standings[name], self._profiles[name].restraint, counts[name], now)
            for name in limited
        }
        await restraint.write(
            tx,
            {
                name: given.standing
                for name, given in grants.items()
                if given.standing != standings[name]
            },
        )
        left = {name: given.granted for name, given in grants.items()}
        return [self._permit(name, grants[name].wait_seconds, left) if name in left else None
                for name in wanted]  # fmt: skip

    def _permit(self, name: str, wait_seconds: float, left: dict[str, int]) -> Delayed | None:
        if left[name] > 0:
            left[name] -= 1
            return None
        self._telemetry.count(Metric.DELAYED, provider=name)
        spread = max(wait_seconds, SPREAD_SECONDS)
        return Delayed(wait_seconds + random.uniform(0.0, spread))  # noqa: S311 - jitter

    async def note(self, tx: Transaction, told: Sequence[tuple[str, Outcome | Finding]]) -> None:
        """What answers say about their providers: a run of failures opens a circuit, a success closes it."""
        read = await restraint.read(tx, list({name for name, _ in told}))
        failed = Counter(name for name, answer in told if is_failure(answer))
        # While only sends fail, look-ups that work must not keep the circuit closed; as probes they count.
        worked = Counter(
            name
            for name, answer in told
            if not is_failure(answer)
            and (
                not isinstance(answer, (Applied, Absent, Refused))
                or (name in read and read[name].breaker is not BreakerState.CLOSED)
            )
        )
        concerned = [
            name
            for name, standing in read.items()
            if failed[name] or standing.failures or standing.breaker is not BreakerState.CLOSED
        ]
        if not concerned:
            return
        standings, now = await restraint.lock(tx, concerned)
        assert now is not None
        changed = {}
        for name, standing in standings.items():
            rules = self._profiles[name].restraint
            next_standing = after(
                standing, rules, successes=worked[name], failures=failed[name], now=now
            )
            if next_standing != standing:
                changed[name] = next_standing
            if next_standing.breaker is not standing.breaker:
                self._telemetry.event(
                    Event.BREAKER, "warning", provider=name, state=next_standing.breaker.value
                )
        await restraint.write(tx, changed)


def is_failure(answer: Outcome | Finding) -> bool:
    """Whether an answer speaks of a provider in trouble, rather than of one request."""
    match answer:
        case Unknown() | Unavailable():
            return True
        case NotApplied():
            return not answer.final and answer.code != "send-window-closed"
        case _:
            return False
