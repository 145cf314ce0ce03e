"""What is watched at scrape: counts and ages over live operations, read from the database when asked for.

Every API process would show the same numbers, so they are no metrics of a process: one read, at most a second
old, is turned into samples for the scrape at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.domain.lifecycle import LIVE
from app.domain.registry import Registry
from app.domain.restraint import BreakerState
from app.service.fresh import Fresh
from app.storage import reports, restraint
from app.storage.database import Database
from app.storage.reports import Standing
from app.telemetry import METRICS, Metric

MAX_AGE_SECONDS = 1.0
_BREAKERS = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)
"""In the order of the numbers they are shown as."""


@dataclass(frozen=True, slots=True)
class Standings:
    """One reading: live operations by state, of unknown types, and in doubt for too long by type; the oldest
    snapshot's age in seconds; each provider's circuit."""

    by_state: tuple[Standing, ...]
    unknown: tuple[tuple[str, int, int], ...]
    oldest_snapshot_seconds: float
    overdue: Mapping[str, int]
    breakers: Mapping[str, BreakerState]


class StandingsReader:
    """Reads the standings; callers within a second share one reading."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        self._fresh = Fresh(self._read, MAX_AGE_SECONDS)

    async def read(self) -> Standings:
        """The standings now.

        Raises:
            StoreUnavailable: the database is away.
        """
        return await self._fresh.get()

    async def _read(self) -> Standings:
        patience = {
            identity: type.policy.attention_after_seconds
            for identity, type in self._registry.types.items()
            if type.policy.attention_after_seconds is not None
        }
        names = tuple(self._registry.profiles)
        async with self._database.transaction() as tx:
            shared = await restraint.read(tx, names)
            return Standings(
                tuple(await reports.standings(tx)),
                tuple(await reports.unknown_types(tx, self._registry.type_versions())),
                await reports.oldest_snapshot_seconds(tx),
                dict.fromkeys((name for name, _ in patience), 0)
                | await reports.overdue_doubt(tx, patience),
                {
                    name: shared[name].breaker if name in shared else BreakerState.CLOSED
                    for name in names
                },
            )


class StandingsCollector(Collector):
    """One reading as Prometheus samples; every live state appears, also with 0."""

    def __init__(self, standings: Standings) -> None:
        self._standings = standings

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges that `telemetry.METRICS` marks as scraped."""
        by_state = {standing.state: standing for standing in self._standings.by_state}
        rows = [(state.value, by_state.get(state)) for state in LIVE]
        yield _family(
            Metric.LIVE_OPERATIONS, (([s], 0 if r is None else r.operations) for s, r in rows)
        )
        yield _family(Metric.WORK_DUE, (([s], 0 if r is None else r.due) for s, r in rows))
        yield _family(
            Metric.WORK_DUE_AGE_SECONDS,
            (([s], 0 if r is None else r.oldest_due_seconds) for s, r in rows),
        )
        yield _family(
            Metric.OLDEST_SECONDS, (([s], 0 if r is None else r.oldest_seconds) for s, r in rows)
        )
        yield _family(
            Metric.OLDEST_SNAPSHOT_SECONDS, [([], self._standings.oldest_snapshot_seconds)]
        )
        yield _family(
            Metric.UNKNOWN_TYPE_OPERATIONS,
            (([type, str(version)], count) for type, version, count in self._standings.unknown),
        )
        yield _family(
            Metric.OVERDUE_DOUBT,
            (([type], count) for type, count in self._standings.overdue.items()),
        )
        yield _family(
            Metric.BREAKER_STATE,
            (([name], _BREAKERS.index(state)) for name, state in self._standings.breakers.items()),
        )


def _family(metric: Metric, samples: Iterable[tuple[list[str], float]]) -> GaugeMetricFamily:
    spec = METRICS[metric]
    family = GaugeMetricFamily(metric.value, spec.help, labels=spec.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
