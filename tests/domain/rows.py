"""Attempts and findings at instants counted in seconds, for tests of what follows from rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from app.domain.outcome import AttemptRecord, FindingKind, FindingRecord, OutcomeKind

START = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW, TRANSIT, LAG = 5.0, 10.0, 3.0


def at(seconds: float) -> datetime:
    """So many seconds after the start."""
    return START + timedelta(seconds=seconds)


def attempt(
    number: int, began: float, outcome: OutcomeKind | None = None, **changes: Any
) -> AttemptRecord:
    """An attempt begun then: sent by +5, arrived by +15, settled at +18."""
    given: dict[str, Any] = {
        "id": UUID(int=number),
        "step": "send",
        "item": 0,
        "generation": number,
        "began_at": at(began),
        "send_by": at(began + WINDOW),
        "arrives_by": at(began + WINDOW + TRANSIT),
        "settled_at": at(began + WINDOW + TRANSIT + LAG),
        "outcome": outcome,
    }
    return AttemptRecord(**{**given, **changes})


def finding(
    kind: FindingKind,
    asked: float,
    found: float | None = None,
    source: Literal["lookup", "late_answer", "operator"] = "lookup",
    **changes: Any,
) -> FindingRecord:
    """A finding asked for then and told half a second later."""
    given: dict[str, Any] = {
        "id": UUID(int=int(asked * 1000) + 10**6),
        "step": "send",
        "item": 0,
        "source": source,
        "kind": kind,
        "asked_at": at(asked),
        "found_at": at(asked + 0.5 if found is None else found),
    }
    return FindingRecord(**{**given, **changes})


def late(number: int, outcome: OutcomeKind, asked: float = 1.0, **changes: Any) -> FindingRecord:
    """The late answer of attempt `number` (R7)."""
    kind = {
        OutcomeKind.SUCCEEDED: FindingKind.APPLIED,
        OutcomeKind.UNKNOWN: FindingKind.UNAVAILABLE,
    }.get(outcome, FindingKind.REFUSED)
    return finding(
        kind,
        asked,
        source="late_answer",
        attempt_id=UUID(int=number),
        attempt_outcome=outcome,
        **changes,
    )
