"""respx in the place of the wire, for tests of the payments adapter.

Like httpcore it reports the moment before the first byte, so that "before" and "after sending" mean here what
they mean on a socket (test_http.py proves that part on real ones).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import respx

from app.domain.identity import DownstreamKey
from app.domain.outcome import Finding, Outcome
from app.domain.plan import EffectRequest
from app.providers.payments import PaymentsAdapter, PaymentsOptions, payments_profile

KEY = DownstreamKey("1b4e28ba-2fa1-41d2-883f-0016d3cca427")
METADATA = {"fencepost_key": KEY.value}
REQUEST = EffectRequest(
    "POST",
    "/v1/charges",
    json.dumps({"amount": 5, "reference": "r 1", "metadata": METADATA}).encode(),
    lookup_reference="r 1",
)
CHARGE: dict[str, Any] = {
    "id": "ch_1",
    "object": "charge",
    "amount": 5,
    "currency": "eur",
    "status": "succeeded",
    "reference": "r 1",
    "idempotency_key": KEY.value,
    "metadata": METADATA,
    "created_at": "2026-12-01T12:00:00Z",
}
KEPT = {name: CHARGE[name] for name in CHARGE if name not in ("idempotency_key", "metadata")}
URL = "http://payments.test"

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


def adapter(**options: Any) -> PaymentsAdapter:
    read = PaymentsOptions.model_validate({"url": URL, "api_key": "s3cret"} | options)
    return PaymentsAdapter(read, payments_profile(read))


def sent(fault: Exception | httpx.Response) -> Handler:
    """The request's bytes leave, then `fault` happens or answers."""

    async def handle(request: httpx.Request) -> httpx.Response:
        await request.extensions["trace"]("http11.send_request_headers.started", {})
        if isinstance(fault, Exception):
            raise fault
        return fault

    return handle


def unsent(fault: Exception) -> Handler:
    """Something happens while connecting."""

    async def handle(request: httpx.Request) -> httpx.Response:
        await request.extensions["trace"]("connection.connect_tcp.started", {})
        raise fault

    return handle


def in_time() -> None:
    """The last check of a send that is in time."""


async def perform(router: respx.MockRouter, handler: Handler, **options: Any) -> Outcome:
    router.route().mock(side_effect=handler)
    opened = adapter(**options)
    try:
        return await opened.perform(REQUEST, KEY, in_time)
    finally:
        await opened.close()


async def look_up(
    router: respx.MockRouter, handler: Handler, request: EffectRequest = REQUEST, **options: Any
) -> Finding:
    router.route().mock(side_effect=handler)
    opened = adapter(**options)
    try:
        return await opened.look_up(request, KEY)
    finally:
        await opened.close()


def error(status: int, code: str, message: str = "No.", **headers: str) -> httpx.Response:
    body = {"error": {"type": "some_error", "code": code, "message": message}}
    return httpx.Response(status, json=body, headers=headers)


OTHER_KEY = {"metadata": {"fencepost_key": "other"}}
