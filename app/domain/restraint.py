"""Restraint towards a provider, decided for all workers together: circuit breaker and rate (CASES.md B32).

Pure: the shared row and the question go in, the answer and the row's next form come out. An open circuit
delays, it fails nothing. Times are the database's, durations seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from app.domain.errors import ConfigurationError


class BreakerState(StrEnum):
    """Closed lets everything through, open nothing, half open a probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class RestraintRules:
    """What a profile asks of all workers together.

    `failure_threshold` failures in a row open the circuit for `cooldown_seconds`, twice as long each time a
    probe fails, up to `max_cooldown_seconds`. `rate_per_second` None: no rate limit; `burst` sends may go at
    once. `shared_concurrency` None: only each process's own bound.
    """

    failure_threshold: int = 10
    cooldown_seconds: float = 1.0
    max_cooldown_seconds: float = 30.0
    rate_per_second: float | None = None
    burst: int = 1
    shared_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.failure_threshold < 1 or self.burst < 1:
            raise ConfigurationError("failure_threshold and burst must be at least 1.")
        if not 0 < self.cooldown_seconds <= self.max_cooldown_seconds:
            raise ConfigurationError(
                "a breaker needs 0 < cooldown_seconds <= max_cooldown_seconds."
            )
        if self.rate_per_second is not None and not self.rate_per_second > 0:
            raise ConfigurationError("rate_per_second must be above 0 where it is given.")
        if self.shared_concurrency is not None and self.shared_concurrency < 1:
            raise ConfigurationError("shared_concurrency must be at least 1 where it is given.")


@dataclass(frozen=True, slots=True)
class Standing:
    """A provider's shared row. `openings`: how often in a row the circuit opened; `tokens`: sends left."""

    breaker: BreakerState = BreakerState.CLOSED
    failures: int = 0
    openings: int = 0
    open_until: datetime | None = None
    tokens: float | None = None
    tokens_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """How many of the wanted sends may go now; the others wait so long. `standing`: the row's next form."""

    granted: int
    wait_seconds: float
    standing: Standing


def grant(standing: Standing, rules: RestraintRules, wanted: int, now: datetime) -> Grant:
    """How many of `wanted` sends may go now."""
    if standing.breaker is not BreakerState.CLOSED:
        return _through_the_breaker(standing, rules, now)
    if rules.rate_per_second is None:
        return Grant(wanted, 0.0, standing)
    tokens = _tokens(standing, rules, now)
    granted = min(wanted, int(tokens))
    left = tokens - granted
    wait = max(wanted - granted - left, 0.0) / rules.rate_per_second
    return Grant(granted, wait, replace(standing, tokens=left, tokens_at=now))


def _through_the_breaker(standing: Standing, rules: RestraintRules, now: datetime) -> Grant:
    until = standing.open_until or now
    if now < until:
        return Grant(0, (until - now).total_seconds(), standing)
    # One probe; should its worker die, the next one goes when this wait is over.
    wait = _cooldown(rules, standing.openings)
    probing = replace(
        standing,
        breaker=BreakerState.HALF_OPEN,
        open_until=now + timedelta(seconds=wait),
    )
    return Grant(1, wait, probing)


def _tokens(standing: Standing, rules: RestraintRules, now: datetime) -> float:
    assert rules.rate_per_second is not None
    if standing.tokens is None or standing.tokens_at is None:
        return float(rules.burst)
    passed = max((now - standing.tokens_at).total_seconds(), 0.0)
    return min(float(rules.burst), standing.tokens + passed * rules.rate_per_second)


def after(
    standing: Standing, rules: RestraintRules, *, successes: int, failures: int, now: datetime
) -> Standing:
    """The row after so many answers. One success closes the circuit and forgets the failures."""
    if successes:
        return replace(
            standing, breaker=BreakerState.CLOSED, failures=0, openings=0, open_until=None
        )
    if not failures:
        return standing
    total = standing.failures + failures
    late = standing.breaker is BreakerState.OPEN
    if late or (standing.breaker is BreakerState.CLOSED and total < rules.failure_threshold):
        return replace(standing, failures=total)  # a call that began before the circuit opened
    openings = standing.openings + 1
    return replace(
        standing,
        breaker=BreakerState.OPEN,
        failures=total,
        openings=openings,
        open_until=now + timedelta(seconds=_cooldown(rules, openings)),
    )


def _cooldown(rules: RestraintRules, openings: int) -> float:
    doublings = min(max(openings - 1, 0), 20)
    return float(min(rules.max_cooldown_seconds, rules.cooldown_seconds * 2.0**doublings))
