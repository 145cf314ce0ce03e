"""Times and limits as validated values. Every one is in seconds unless its name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.domain.errors import ConfigurationError

DAY_SECONDS = 86_400.0
PRIORITIES = (0, 1, 2, 3)
DEFAULT_PRIORITY = 2


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """How long a lease lasts, how often it is renewed, and when its owner stops trusting it.

    Trusted until: the moment the claim or renewal was *started*, on the owner's clock, plus the lease minus
    `margin_seconds`. The process clock may only make its owner give up earlier (DESIGN.md I9).
    """

    lease_seconds: float = 30.0
    renew_interval_seconds: float = 10.0
    margin_seconds: float = 1.0
    claims_limit: int = 5
    """So many claims that ended by expiry, one after the other, make an operation poison (B10)."""

    def __post_init__(self) -> None:
        if not self.lease_seconds > 0:
            raise ConfigurationError("lease_seconds must be above 0.")
        if not 0 < self.renew_interval_seconds <= self.lease_seconds / 2:
            raise ConfigurationError(
                "renew_interval_seconds must be above 0 and at most half of lease_seconds, "
                "so that one missed renewal does not lose a lease."
            )
        if not 0 <= self.margin_seconds < self.lease_seconds - self.renew_interval_seconds:
            raise ConfigurationError(
                "margin_seconds must leave room for a renewal within the lease."
            )
        if self.claims_limit < 1:
            raise ConfigurationError("claims_limit must be at least 1.")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Durable waits between sends: full jitter under an exponential ceiling, after any floor."""

    base_seconds: float = 1.0
    ceiling_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.base_seconds <= self.ceiling_seconds:
            raise ConfigurationError("backoff needs 0 < base_seconds <= ceiling_seconds.")

    def wait_seconds(self, failures: int, draw: float, floor_seconds: float = 0.0) -> float:
        """Seconds to wait after `failures` (1 and up) sends; `draw` is uniform in [0, 1).

        The jitter comes on top of a `Retry-After` floor: nobody returns before it, and not all at once
        (CASES.md B32). A floor of a day and more is cut to a day.
        """
        span = min(self.ceiling_seconds, self.base_seconds * 2.0 ** min(max(failures - 1, 0), 30))
        floor = min(max(floor_seconds, 0.0), DAY_SECONDS)
        return floor + draw * span


class Default(float):
    """A number the author of a type did not give: settings may put another in its place."""

    __slots__ = ()


DEFAULT_RETENTION_SECONDS = Default(30 * DAY_SECONDS)
DEFAULT_TOMBSTONE_SECONDS = Default(400 * DAY_SECONDS)


@dataclass(frozen=True, slots=True)
class TypePolicy:
    """What a type decides about its operations' time.

    `retry_horizon_seconds`: how long sends that were not applied are repeated, from admission or
    `not_before`. `retention_seconds`: how long result and payload stay after completion.
    `tombstone_seconds`: how long after completion the key stays taken (CONTRACT.md 11).
    `attention_after_seconds`: an operation uncertain for longer is raised while look-ups go on.
    """

    retry_horizon_seconds: float = DAY_SECONDS
    retention_seconds: float = DEFAULT_RETENTION_SECONDS
    tombstone_seconds: float = DEFAULT_TOMBSTONE_SECONDS
    attention_after_seconds: float | None = None
    deadline_seconds: float | None = None
    priority: int = DEFAULT_PRIORITY
    backoff: Backoff = Backoff()

    def __post_init__(self) -> None:
        if not self.retry_horizon_seconds >= 0:
            raise ConfigurationError("retry_horizon_seconds must be 0 or more.")
        if not 0 < self.retention_seconds <= self.tombstone_seconds:
            raise ConfigurationError("a type needs 0 < retention_seconds <= tombstone_seconds.")
        if self.priority not in PRIORITIES:
            raise ConfigurationError("priority is 0 (first) to 3.")
        if self.deadline_seconds is not None and not self.deadline_seconds > 0:
            raise ConfigurationError("deadline_seconds must be above 0 where it is given.")

    def where_silent(self, *, retention_seconds: float, tombstone_seconds: float) -> TypePolicy:
        """The same policy with these horizons where the type gives none of its own.

        Raises:
            ConfigurationError: a payload would outlive its tombstone.
        """
        return replace(
            self,
            retention_seconds=retention_seconds
            if isinstance(self.retention_seconds, Default)
            else self.retention_seconds,
            tombstone_seconds=tombstone_seconds
            if isinstance(self.tombstone_seconds, Default)
            else self.tombstone_seconds,
        )
