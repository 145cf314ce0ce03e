"""What can be watched: every metric and every log event, in one table each.

Metrics live in a registry that bootstrap makes; with several API processes on one machine the values are
summed over files in PROMETHEUS_MULTIPROC_DIR, which the command line sets before this module is loaded.
A label or a log field never carries a secret, a raw idempotency key or a payload.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metric(StrEnum):
    """Names as Prometheus shows them; counters end in _total."""

    ADMISSIONS = "fencepost_admissions_total"
    HTTP_REQUESTS = "fencepost_http_requests_total"
    CLAIMS = "fencepost_claims_total"
    TAKEOVERS = "fencepost_takeovers_total"
    LEASE_LOST = "fencepost_lease_lost_total"
    RENEWALS_MISSED = "fencepost_renewals_missed_total"
    ATTEMPTS = "fencepost_attempts_total"
    FINDINGS = "fencepost_findings_total"
    DELAYED = "fencepost_delayed_sends_total"
    UNCERTAIN_ENTERED = "fencepost_uncertain_entered_total"
    UNCERTAIN_SETTLED = "fencepost_uncertain_settled_total"
    ATTENTION_RAISED = "fencepost_attention_raised_total"
    LATE_EVIDENCE = "fencepost_late_evidence_total"
    OPERATOR_ACTIONS = "fencepost_operator_actions_total"
    FINISHED = "fencepost_finished_total"
    STORE_ERRORS = "fencepost_store_errors_total"
    FLUSHES = "fencepost_flushes_total"
    FLUSHED_ITEMS = "fencepost_flushed_items_total"
    PROVIDER_CALL_SECONDS = "fencepost_provider_call_seconds"
    LOOP_LAG_SECONDS = "fencepost_loop_lag_seconds"
    IN_FLIGHT = "fencepost_in_flight"
    LIVE_OPERATIONS = "fencepost_live_operations"
    WORK_DUE = "fencepost_work_due"
    WORK_DUE_AGE_SECONDS = "fencepost_work_due_age_seconds"
    OLDEST_SECONDS = "fencepost_oldest_seconds"
    OLDEST_SNAPSHOT_SECONDS = "fencepost_oldest_snapshot_seconds"
    UNKNOWN_TYPE_OPERATIONS = "fencepost_unknown_type_operations"
    BREAKER_STATE = "fencepost_breaker_state"
    OVERDUE_DOUBT = "fencepost_overdue_doubt"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: what it means and what it is split by. `scraped`: read from the database at scrape."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    scraped: bool = False


METRICS: Mapping[Metric, MetricSpec] = {
    Metric.ADMISSIONS: MetricSpec(
        "counter", "Answers to POSTs: new, replayed, mismatched, gone, refused", ("type", "outcome")
    ),
    Metric.HTTP_REQUESTS: MetricSpec(
        "counter", "HTTP answers by route and status", ("route", "method", "status")
    ),
    Metric.CLAIMS: MetricSpec("counter", "Operations claimed", ("actor",)),
    Metric.TAKEOVERS: MetricSpec("counter", "Claims of a lease that ended by expiry", ("actor",)),
    Metric.LEASE_LOST: MetricSpec("counter", "Writes refused by the fence, by verb", ("verb",)),
    Metric.RENEWALS_MISSED: MetricSpec(
        "counter", "Rounds of renewals the database did not take in time"
    ),
    Metric.ATTEMPTS: MetricSpec(
        "counter", "Sends by provider and outcome", ("provider", "outcome")
    ),
    Metric.FINDINGS: MetricSpec(
        "counter", "Look-ups by provider and finding", ("provider", "finding")
    ),
    Metric.DELAYED: MetricSpec(
        "counter", "Calls put off by an open circuit or a rate limit", ("provider",)
    ),
    Metric.UNCERTAIN_ENTERED: MetricSpec("counter", "Operations that became uncertain", ("type",)),
    Metric.UNCERTAIN_SETTLED: MetricSpec(
        "counter", "Doubts that ended, by the evidence that ended them", ("type", "evidence")
    ),
    Metric.ATTENTION_RAISED: MetricSpec(
        "counter", "Operations that came to need a human, by reason", ("type", "reason")
    ),
    Metric.LATE_EVIDENCE: MetricSpec(
        "counter", "Answers stored as findings because their lease was lost", ("provider",)
    ),
    Metric.OPERATOR_ACTIONS: MetricSpec("counter", "Acts of operators", ("action",)),
    Metric.FINISHED: MetricSpec("counter", "Operations that ended, by state", ("type", "state")),
    Metric.STORE_ERRORS: MetricSpec("counter", "Failed transactions, by where", ("where",)),
    Metric.FLUSHES: MetricSpec("counter", "Group commits, by verb", ("verb",)),
    Metric.FLUSHED_ITEMS: MetricSpec("counter", "Items in group commits, by verb", ("verb",)),
    Metric.PROVIDER_CALL_SECONDS: MetricSpec(
        "histogram", "Duration of provider calls", ("provider", "call")
    ),
    Metric.LOOP_LAG_SECONDS: MetricSpec("histogram", "How late the event loop runs its timers"),
    Metric.IN_FLIGHT: MetricSpec("gauge", "Operations this process carries now", ("actor",)),
    Metric.LIVE_OPERATIONS: MetricSpec("gauge", "Live operations", ("state",), scraped=True),
    Metric.WORK_DUE: MetricSpec("gauge", "Live operations that are due", ("state",), scraped=True),
    Metric.WORK_DUE_AGE_SECONDS: MetricSpec(
        "gauge", "For how long the oldest due operation is due", ("state",), scraped=True
    ),
    Metric.OLDEST_SECONDS: MetricSpec(
        "gauge",
        "Age of the oldest live operation in its state (uncertain: since the doubt began)",
        ("state",),
        scraped=True,
    ),
    Metric.OLDEST_SNAPSHOT_SECONDS: MetricSpec(
        "gauge", "Age of the oldest snapshot another session holds open", scraped=True
    ),
    Metric.UNKNOWN_TYPE_OPERATIONS: MetricSpec(
        "gauge",
        "Live operations of types this code does not know",
        ("type", "version"),
        scraped=True,
    ),
    Metric.BREAKER_STATE: MetricSpec(
        "gauge",
        "A provider's circuit: 0 closed, 1 half open, 2 open",
        ("provider",),
        scraped=True,
    ),
    Metric.OVERDUE_DOUBT: MetricSpec(
        "gauge",
        "Operations uncertain for longer than their type's attention_after",
        ("type",),
        scraped=True,
    ),
}


class Event(StrEnum):
    """Log events; the verbs of the protocol, spelled as everywhere."""

    STARTED = "started"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ADMITTED = "admitted"
    REFUSED = "refused"
    CLAIMED = "claimed"
    BEGUN = "begun"
    RECORDED = "recorded"
    RELEASED = "released"
    PARKED = "parked"
    ATTENTION = "attention"
    OVERDUE = "overdue"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FOUND = "found"
    LATE_EVIDENCE = "late_evidence"
    LEASE_LOST = "lease_lost"
    RENEWAL_MISSED = "renewal_missed"
    STORE_UNAVAILABLE = "store_unavailable"
    UNKNOWN_TYPE = "unknown_type"
    LISTENER_LOST = "listener_lost"
    BREAKER = "breaker"
    OPERATOR_ACTED = "operator_acted"
    UNEXPECTED = "unexpected"
    ANSWERED = "answered"
    NOT_READY = "not_ready"
    UNHANDLED_REQUEST = "unhandled_request"


_BUCKETS_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Telemetry:
    """Counts, observes and logs. One per process, made by bootstrap, carried by argument."""

    def __init__(self, registry: CollectorRegistry, log: Any) -> None:
        self.registry = registry
        self.log = log
        self._metrics: dict[Metric, Counter | Gauge | Histogram] = {}
        for metric, spec in METRICS.items():
            if spec.scraped:
                continue
            name, labels = metric.value, spec.labels
            if spec.kind == "counter":
                self._metrics[metric] = Counter(name, spec.help, labels, registry=registry)
            elif spec.kind == "gauge":
                self._metrics[metric] = Gauge(
                    name, spec.help, labels, registry=registry, multiprocess_mode="livesum"
                )
            else:
                self._metrics[metric] = Histogram(
                    name, spec.help, labels, registry=registry, buckets=_BUCKETS_SECONDS
                )

    def count(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        found = self._metrics[metric]
        assert isinstance(found, Counter)
        (found.labels(**labels) if labels else found).inc(amount)

    def observe(self, metric: Metric, seconds: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        found = self._metrics[metric]
        assert isinstance(found, Histogram)
        (found.labels(**labels) if labels else found).observe(seconds)

    def gauge(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        found = self._metrics[metric]
        assert isinstance(found, Gauge)
        (found.labels(**labels) if labels else found).set(value)

    def event(self, event: Event, level: str = "info", **fields: object) -> None:
        """Write one log line. Fields are ids, counts and codes; never a key, a secret or a payload."""
        getattr(self.log, level)(event.value, **fields)


def make_log(
    role: str, *, log_format: Literal["json", "console"] = "json", level: str = "info"
) -> Any:
    """A structlog logger for one process, writing to stderr; stdout is for what a command prints."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    return structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.UnicodeDecoder(),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
    ).bind(role=role)
