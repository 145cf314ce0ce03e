"""The fault table of `payments`: whatever happens, the outcome is what the profile says, else unknown."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator

import httpx
import pytest
import respx

from app.domain.errors import SendWindowClosed
from app.domain.outcome import NotApplied, Outcome, Rejected, Succeeded, Unknown
from app.domain.text import DETAIL_LIMIT, is_storable
from app.providers.http import MAX_ANSWER_BYTES
from tests.support.payments_wire import (
    CHARGE,
    KEPT,
    KEY,
    OTHER_KEY,
    REQUEST,
    adapter,
    error,
    perform,
    sent,
    unsent,
)

pytestmark = pytest.mark.anyio

LINES = ("Request-Id", "req_1")

NOT_SENT = {
    "refused": (httpx.ConnectError("refused"), "not-connected"),
    "no such name": (httpx.ConnectError("Name or service not known"), "not-connected"),
    "tls": (httpx.ConnectError("CERTIFICATE_VERIFY_FAILED"), "not-connected"),
    "raw tls error": (ssl.SSLError("handshake"), "not-connected"),
    "raw os error": (OSError("unreachable"), "not-connected"),
    "connect timeout": (httpx.ConnectTimeout("slow"), "connect-timeout"),
    "pool timeout": (httpx.PoolTimeout("busy"), "connect-timeout"),
    "no protocol": (httpx.UnsupportedProtocol("gopher"), "not-connected"),
}

SENT = {
    "read timeout": (httpx.ReadTimeout("slow"), "timeout"),
    "write timeout": (httpx.WriteTimeout("slow"), "timeout"),
    "builtin timeout": (TimeoutError(), "timeout"),
    "reset while reading": (httpx.ReadError("reset"), "connection-lost"),
    "reset while writing": (httpx.WriteError("reset"), "connection-lost"),
    "closing": (httpx.CloseError("closed"), "connection-lost"),
    "cut": (httpx.RemoteProtocolError("Server disconnected"), "connection-lost"),
    "garbled": (httpx.RemoteProtocolError("illegal status line"), "protocol-error"),
    "our own fault": (httpx.LocalProtocolError("too much data"), "protocol-error"),
    "raw os error": (OSError("reset"), "connection-lost"),
    "raw tls error": (ssl.SSLError("bad record"), "connection-lost"),
    "decoding": (httpx.DecodingError("gzip"), "connection-lost"),
    "even a late connect error": (httpx.ConnectError("late"), "connection-lost"),
}

ANSWERS: dict[str, tuple[httpx.Response, Outcome]] = {
    "success": (
        httpx.Response(200, json=CHARGE, headers=[LINES]),
        Succeeded("ch_1", KEPT, "req_1"),
    ),
    "replayed success": (
        httpx.Response(200, json=CHARGE, headers={"Idempotent-Replayed": "true"}),
        Succeeded("ch_1", KEPT),
    ),
    "success for somebody else": (
        httpx.Response(200, json=CHARGE | OTHER_KEY),
        Unknown("unreadable-answer", "The answer does not show the effect that was asked for."),
    ),
    "success without an id": (
        httpx.Response(200, json=CHARGE | {"id": None}),
        Unknown("unreadable-answer", "The answer does not show the effect that was asked for."),
    ),
    "declined": (error(402, "card_declined"), Rejected("card_declined", "No.")),
    "no funds": (error(402, "insufficient_funds"), Rejected("insufficient_funds", "No.")),
    "another 402": (error(402, "pay_your_hosting"), Unknown("pay_your_hosting", "No.")),
    "refunded": (
        error(400, "charge_already_refunded"),
        Rejected("charge_already_refunded", "No."),
    ),
    "too much": (error(400, "amount_too_large"), Rejected("amount_too_large", "No.")),
    "invalid": (
        error(400, "parameter_invalid"),
        NotApplied("parameter_invalid", "No.", final=True),
    ),
    "unknown charge": (
        error(404, "resource_missing"),
        NotApplied("resource_missing", "No.", final=True),
    ),
    "wrong address": (error(404, "route_unknown"), NotApplied("route_unknown", "No.")),
    "somebody's 404": (httpx.Response(404, text="<html>"), Unknown("http-404")),
    "key reused": (
        error(400, "idempotency_key_reused"),
        Unknown("idempotency_key_reused", "No."),
    ),
    "in flight": (error(409, "idempotency_key_in_use"), Unknown("idempotency_key_in_use", "No.")),
    "credentials": (error(401, "no_such_key"), NotApplied("no_such_key", "No.")),
    "forbidden": (error(403, "not_yours"), NotApplied("not_yours", "No.")),
    "rate limit": (
        error(429, "rate_limit", **{"Retry-After": "3"}),
        NotApplied("rate_limit", "No.", 3.0),
    ),
    "a gateway's rate limit": (
        httpx.Response(429, headers={"Retry-After": "3"}),
        Unknown("http-429", None, 3.0),
    ),
    "over capacity": (
        error(503, "unavailable", **{"Retry-After": "1"}),
        NotApplied("unavailable", "No.", 1.0),
    ),
    "a gateway's 503": (httpx.Response(503, text="<html>"), Unknown("http-503")),
    "a stored 503": (
        error(503, "unavailable", **{"Idempotent-Replayed": "true"}),
        Unknown("unavailable", "No.", burned=True),
    ),
    "500": (error(500, "server_error"), Unknown("server_error", "No.")),
    "a stored 500": (
        error(500, "server_error", **{"Idempotent-Replayed": "true"}),
        Unknown("server_error", "No.", burned=True),
    ),
    "a stored 500 without a body": (
        httpx.Response(500, headers={"Idempotent-Replayed": "TRUE"}),
        Unknown("http-500", burned=True),
    ),
    "504 from a gateway": (httpx.Response(504), Unknown("http-504")),
    "redirect": (
        httpx.Response(307, headers={"Location": "http://elsewhere.test/"}),
        Unknown("http-307"),
    ),
    "not modified": (httpx.Response(304), Unknown("http-304")),
    "teapot": (error(418, "teapot"), Unknown("teapot", "No.")),
}

UNREADABLE = {
    "not JSON": b'\x00\xff\xfe{"id": "ch_',
    "truncated JSON": json.dumps(CHARGE).encode()[:-5],
    "a list": json.dumps([CHARGE]).encode(),
    "a number": b"1",
    "NaN": b'{"id": NaN}',
    "not UTF-8": b'{"id": "\xff"}',
    "deep": b"[" * 500_000,
    "nothing": b"",
    "huge": b" " * (MAX_ANSWER_BYTES + 1) + json.dumps(CHARGE).encode(),
}


@pytest.mark.parametrize("name", NOT_SENT)
async def test_what_happens_before_sending_is_not_applied(
    router: respx.MockRouter, name: str
) -> None:
    fault, code = NOT_SENT[name]
    outcome = await perform(router, unsent(fault))
    assert isinstance(outcome, NotApplied)
    assert (outcome.code, outcome.final) == (code, False)


@pytest.mark.parametrize("name", SENT)
async def test_what_happens_after_sending_is_unknown_and_not_repeated(
    router: respx.MockRouter, name: str
) -> None:
    fault, code = SENT[name]
    outcome = await perform(router, sent(fault))
    assert isinstance(outcome, Unknown)
    assert (outcome.code, outcome.burned) == (code, False)
    assert len(router.calls) == 1


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_means_what_the_profile_says(router: respx.MockRouter, name: str) -> None:
    answer, outcome = ANSWERS[name]
    assert await perform(router, sent(answer)) == outcome
    assert len(router.calls) == 1


@pytest.mark.parametrize("status", [200, 201, 400, 402, 404, 409, 500, 503])
@pytest.mark.parametrize("name", UNREADABLE)
async def test_an_unreadable_body_is_unknown(
    router: respx.MockRouter, name: str, status: int
) -> None:
    answer = httpx.Response(status, content=UNREADABLE[name])
    assert isinstance(await perform(router, sent(answer)), Unknown)


async def test_a_body_that_breaks_off_is_unknown(router: respx.MockRouter) -> None:
    async def handle(request: httpx.Request) -> httpx.Response:
        await request.extensions["trace"]("http11.send_request_headers.started", {})
        return httpx.Response(200, stream=Breaking())

    class Breaking(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield json.dumps(CHARGE).encode()
            raise httpx.ReadError("reset")

    assert isinstance(await perform(router, handle), Unknown)


async def test_no_status_alone_decides_anything_that_no_rule_covers(
    router: respx.MockRouter,
) -> None:
    for status in range(100, 600):
        outcome = await perform(router, sent(httpx.Response(status, json={})))
        if status in (401, 403):
            assert isinstance(outcome, NotApplied), status
            assert not outcome.final
        else:
            assert isinstance(outcome, Unknown), status
            assert not outcome.burned


@pytest.mark.parametrize("code", ["something_new", "card_declined", "parameter_invalid"])
@pytest.mark.parametrize("status", [*range(300, 400, 7), 405, 408, 418, 422, 451, 500, 502, 504])
async def test_a_known_code_under_another_status_decides_nothing(
    router: respx.MockRouter, status: int, code: str
) -> None:
    assert isinstance(await perform(router, sent(error(status, code))), Unknown)


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["2"], 2.0),
        ([" 2 "], 2.0),
        (["2", "9"], 9.0),
        (["Tue, 01 Dec 2026 12:00:30 GMT"], 30.0),
        (["Tuesday, 01-Dec-26 12:00:30 GMT"], 30.0),
        (["Tue Dec  1 12:00:30 2026"], 30.0),
        (["garbage"], None),
        (["-1"], None),
        (["99999999999999999999"], 86_400.0),
        ([], None),
    ],
)
async def test_retry_after_reaches_the_outcome(
    router: respx.MockRouter, lines: list[str], seconds: float | None
) -> None:
    headers = [("Date", "Tue, 01 Dec 2026 12:00:00 GMT"), *(("Retry-After", x) for x in lines)]
    body = {"error": {"code": "rate_limit"}}
    outcome = await perform(router, sent(httpx.Response(429, headers=headers, json=body)))
    assert outcome == NotApplied("rate_limit", retry_after_seconds=seconds)


async def test_text_of_the_provider_is_made_safe_and_bounded(router: respx.MockRouter) -> None:
    body = {"error": {"code": "card_declined", "message": "a\x00" + "\u00e9" * 100_000}}
    answer = httpx.Response(402, json=body, headers=[("Request-Id", "r" * 5000)])
    outcome = await perform(router, sent(answer))
    assert isinstance(outcome, Rejected)
    assert outcome.detail is not None
    assert outcome.provider_request_id is not None
    assert len(outcome.detail) == DETAIL_LIMIT
    assert is_storable(outcome.detail)
    assert len(outcome.provider_request_id) < 300


async def test_results_are_bounded_whatever_is_sent(router: respx.MockRouter) -> None:
    much = CHARGE | {
        "reference": "x" * 100_000 + "\x00",
        "amount": 2**60,
        "currency": {"nested": 1},
        "status": True,
        "junk": "y" * 100_000,
    }
    outcome = await perform(router, sent(httpx.Response(200, json=much)))
    assert isinstance(outcome, Succeeded)
    assert outcome.result is not None
    assert set(outcome.result) == {"id", "object", "reference", "created_at"}
    assert len(json.dumps(outcome.result)) < 1000


async def test_a_closed_window_is_not_applied(router: respx.MockRouter) -> None:
    def too_late() -> None:
        raise SendWindowClosed("too late")

    router.route().mock(side_effect=sent(httpx.Response(200, json=CHARGE)))
    opened = adapter()
    assert await opened.perform(REQUEST, KEY, too_late) == NotApplied(
        "send-window-closed", "too late"
    )
    await opened.close()


async def test_what_is_sent(router: respx.MockRouter) -> None:
    await perform(router, sent(httpx.Response(200, json=CHARGE)))
    request = router.calls.last.request
    assert request.content == REQUEST.body
    assert request.headers["Idempotency-Key"] == KEY.value
    assert request.headers["Authorization"] == "Bearer s3cret"


async def test_with_keys_off_no_key_is_sent(router: respx.MockRouter) -> None:
    outcome = await perform(router, sent(httpx.Response(200, json=CHARGE)), honour_keys=False)
    assert isinstance(outcome, Succeeded)
    assert "Idempotency-Key" not in router.calls.last.request.headers
