"""One send: the last check, the call without a transaction, and whatever leaks turned into `Unknown`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from app.domain.errors import SendWindowClosed
from app.domain.identity import DownstreamKey
from app.domain.operation import Lease
from app.domain.outcome import (
    Applied,
    Finding,
    JsonObject,
    NotApplied,
    Outcome,
    Refused,
    Rejected,
    Succeeded,
    Unavailable,
    Unknown,
    finding_kind_of,
    kind_of,
)
from app.domain.plan import EffectRequest
from app.domain.provider import ProviderAdapter
from app.domain.request import MAX_SAFE_INTEGER
from app.domain.text import bounded_text
from app.service.clock import elapsed
from app.telemetry import Event, Metric, Telemetry

MAX_CODE = 200
MAX_DETAIL = 2000
MAX_REFERENCE = 500
NOT_SENT = NotApplied("not-sent", "The process stopped before anything was sent.")
"""The outcome of an attempt whose row stands and for which no byte left."""


def last_check(lease: Lease, send_until: float) -> Callable[[], None]:
    """The check before the first byte (PROTOCOL.md R1): neither the window nor the trust has ended.

    `send_until` is on this process's clock and was started before the begin was even queued, so it can
    only be earlier than the database's `send_by`.
    """

    def check() -> None:
        if elapsed() >= min(send_until, lease.trust.until):
            raise SendWindowClosed("The send window or the lease ended before the first byte.")

    return check


async def perform(
    adapter: ProviderAdapter,
    request: EffectRequest,
    key: DownstreamKey,
    check: Callable[[], None],
    telemetry: Telemetry,
) -> Outcome:
    """Send once and return a storable outcome. This is the one place where a leak becomes `Unknown`.

    A cancelled call is a leak too: its bytes may have left. The outcome is kept, the cancellation is not
    passed on, since recording what is known matters more than stopping a moment earlier.
    """
    started = elapsed()
    provider = adapter.profile.name
    passed = False

    def gate() -> None:
        nonlocal passed
        check()
        passed = True

    try:
        outcome = storable(await adapter.perform(request, key, gate))
    except SendWindowClosed as error:
        outcome = NotApplied("send-window-closed", str(error))
    except asyncio.CancelledError:
        # Before the check no byte can have left: that is what an adapter promises (R1).
        cut = Unknown("cancelled", "The call was cut short by its own process.")
        outcome = cut if passed else NOT_SENT
    except Exception as error:
        telemetry.event(Event.UNEXPECTED, "error", provider=provider, exc_info=error)
        outcome = storable(Unknown("adapter-error", f"{type(error).__name__}: {error}"))
    telemetry.observe(
        Metric.PROVIDER_CALL_SECONDS, elapsed() - started, provider=provider, call="perform"
    )
    telemetry.count(Metric.ATTEMPTS, provider=provider, outcome=kind_of(outcome).value)
    return outcome


async def look_up(
    adapter: ProviderAdapter, request: EffectRequest, key: DownstreamKey, telemetry: Telemetry
) -> Finding:
    """Ask once and return a storable finding; whatever leaks is `Unavailable`: no evidence."""
    started = elapsed()
    provider = adapter.profile.name
    try:
        finding = await adapter.look_up(request, key)
    except asyncio.CancelledError:
        finding = Unavailable("cancelled", "The look-up was cut short by its own process.")
    except Exception as error:
        telemetry.event(Event.UNEXPECTED, "error", provider=provider, exc_info=error)
        finding = Unavailable("adapter-error", f"{type(error).__name__}: {error}")
    telemetry.observe(
        Metric.PROVIDER_CALL_SECONDS, elapsed() - started, provider=provider, call="look_up"
    )
    telemetry.count(Metric.FINDINGS, provider=provider, finding=finding_kind_of(finding).value)
    match finding:
        case Applied():
            result = _clean_object(finding.result)
            return Applied(_short(finding.reference), result, finding.created_at)
        case Refused():
            return Refused(
                bounded_text(finding.code, limit=MAX_CODE),
                _text(finding.detail),
            )
        case Unavailable():
            return replace(
                finding,
                code=bounded_text(finding.code, limit=MAX_CODE),
                detail=_text(finding.detail),
            )
        case _:
            return finding


def storable(outcome: Outcome) -> Outcome:
    """The same outcome with every text bounded and made storable (CASES.md B21)."""
    request_id = _short(outcome.provider_request_id)
    if isinstance(outcome, Succeeded):
        return Succeeded(_short(outcome.reference), _clean_object(outcome.result), request_id)
    code = bounded_text(outcome.code, limit=MAX_CODE)
    detail = _text(outcome.detail)
    match outcome:
        case Rejected():
            return replace(outcome, code=code, detail=detail, provider_request_id=request_id)
        case NotApplied():
            return replace(outcome, code=code, detail=detail, provider_request_id=request_id)
        case Unknown():
            return replace(outcome, code=code, detail=detail, provider_request_id=request_id)


def _text(text: str | None) -> str | None:
    return None if text is None else bounded_text(text, limit=MAX_DETAIL)


def _short(text: str | None) -> str | None:
    return None if text is None else bounded_text(text, limit=MAX_REFERENCE)


def _clean_object(value: JsonObject | None) -> JsonObject | None:
    return None if value is None else {_name(k): _clean(v) for k, v in value.items()}


def _name(name: object) -> str:
    return bounded_text(str(name), limit=MAX_CODE)


def _clean(value: object) -> object:
    if isinstance(value, str):
        return bounded_text(value, limit=MAX_DETAIL)
    if isinstance(value, Mapping):
        return {_name(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(member) for member in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_SAFE_INTEGER else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return bounded_text(str(value), limit=MAX_DETAIL)
