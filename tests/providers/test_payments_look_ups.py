"""What the look-ups of `payments` are evidence of: only what is clean and about this very effect."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import respx

from app.domain.identity import DownstreamKey
from app.domain.outcome import Absent, Applied, Finding, Refused, Succeeded, Unavailable
from app.domain.plan import EffectRequest
from tests.support.payments_wire import (
    CHARGE,
    KEPT,
    KEY,
    OTHER_KEY,
    REQUEST,
    URL,
    Handler,
    adapter,
    error,
    in_time,
    look_up,
    sent,
    unsent,
)

pytestmark = pytest.mark.anyio


# Look-ups


def listed(*things: object, **members: Any) -> Handler:
    body = {"object": "list", "data": list(things), "has_more": False} | members
    return sent(httpx.Response(200, json=body))


async def test_by_key_the_effect_is_found(router: respx.MockRouter) -> None:
    assert await look_up(router, listed(CHARGE)) == Applied("ch_1", KEPT)
    assert str(router.calls.last.request.url) == f"{URL}/v1/charges?idempotency_key={KEY.value}"
    assert router.calls.last.request.method == "GET"


async def test_by_reference_only_our_own_effect_counts(router: respx.MockRouter) -> None:
    other = CHARGE | OTHER_KEY | {"id": "ch_0"}
    found = await look_up(router, listed(other, CHARGE), honour_keys=False)
    assert found == Applied("ch_1", KEPT)
    assert router.calls.last.request.url.params["reference"] == "r 1"
    assert await look_up(router, listed(other), honour_keys=False) == Absent()


async def test_an_empty_list_is_absent(router: respx.MockRouter) -> None:
    assert await look_up(router, listed()) == Absent()


@pytest.mark.parametrize(
    ("handler", "finding", "code"),
    [
        (listed(CHARGE | OTHER_KEY), Refused, "filter-ignored"),
        (listed(has_more=True), Unavailable, "incomplete-list"),
        (listed(has_more=None), Unavailable, "incomplete-list"),
        (listed("text"), Unavailable, "unreadable-answer"),
        (listed(data=None), Unavailable, "unreadable-answer"),
        (sent(httpx.Response(200, json=[])), Unavailable, "unreadable-answer"),
        (sent(httpx.Response(200, text="<html>")), Unavailable, "unreadable-answer"),
        (sent(httpx.Response(204)), Unavailable, "unreadable-answer"),
        (sent(error(400, "parameter_unknown")), Refused, "parameter_unknown"),
        (sent(httpx.Response(404)), Refused, "http-404"),
        (sent(httpx.Response(302)), Refused, "http-302"),
        (sent(httpx.Response(401)), Unavailable, "http-401"),
        (sent(httpx.Response(403)), Unavailable, "http-403"),
        (sent(error(503, "lookup_unavailable")), Unavailable, "lookup_unavailable"),
        (sent(httpx.Response(500)), Unavailable, "http-500"),
        (sent(httpx.ReadTimeout("slow")), Unavailable, "timeout"),
        (unsent(httpx.ConnectError("refused")), Unavailable, "not-connected"),
    ],
)
async def test_everything_else_is_no_evidence(
    router: respx.MockRouter, handler: Handler, finding: type[Finding], code: str
) -> None:
    found = await look_up(router, handler)
    assert isinstance(found, finding)
    assert isinstance(found, Refused | Unavailable)
    assert found.code == code


async def test_only_a_clean_list_is_evidence(router: respx.MockRouter) -> None:
    for status in range(100, 600):
        found = await look_up(router, sent(httpx.Response(status, json={"data": []})))
        assert isinstance(found, Refused | Unavailable), status


async def test_a_busy_look_up_says_when_to_come_back(router: respx.MockRouter) -> None:
    found = await look_up(router, sent(httpx.Response(429, headers={"Retry-After": "4"})))
    assert found == Unavailable("http-429", None, 4.0)


CANCEL = EffectRequest("POST", "/v1/charges/ch_1/cancel", b"{}", lookup_reference="r")


@pytest.mark.parametrize(
    ("thing", "finding"),
    [
        (CHARGE | {"status": "cancelled"}, Applied("ch_1", KEPT | {"status": "cancelled"})),
        (CHARGE, Absent()),
    ],
)
async def test_a_cancellation_is_seen_on_what_was_cancelled(
    router: respx.MockRouter, thing: dict[str, Any], finding: Finding
) -> None:
    assert await look_up(router, sent(httpx.Response(200, json=thing)), CANCEL) == finding
    assert str(router.calls.last.request.url) == f"{URL}/v1/charges/ch_1"


async def test_a_cancellation_is_not_seen_on_anything_else(router: respx.MockRouter) -> None:
    other = httpx.Response(200, json=CHARGE | {"id": "ch_2", "status": "cancelled"})
    found = await look_up(router, sent(other), CANCEL)
    assert isinstance(found, Unavailable)


async def test_what_cannot_be_looked_up_is_refused_without_a_call(
    router: respx.MockRouter,
) -> None:
    foreign = EffectRequest("POST", "/v2/things?x", b"{}")
    for opened, request in ((adapter(look_up=False), REQUEST), (adapter(), foreign)):
        found = await opened.look_up(request, KEY)
        assert isinstance(found, Refused)
        assert found.code == "no-look-up"
        await opened.close()
    assert not router.calls


async def test_the_tag_is_the_stored_request_s_also_under_a_fresh_key(
    router: respx.MockRouter,
) -> None:
    """R18: a fresh key goes with the stored body, which carries the first one."""
    router.route().mock(side_effect=sent(httpx.Response(200, json=CHARGE)))
    opened = adapter()
    fresh = DownstreamKey("00000000-0000-4000-8000-000000000000")
    assert isinstance(await opened.perform(REQUEST, fresh, in_time), Succeeded)
    await opened.close()


# Probe


@pytest.mark.parametrize(
    ("handler", "word"),
    [
        (listed(), None),
        (sent(httpx.Response(401)), "401"),
        (sent(error(404, "route_unknown")), "route_unknown"),
        (sent(httpx.Response(503)), "503"),
        (unsent(httpx.ConnectError("refused")), "not-connected"),
    ],
)
async def test_a_probe_says_why_the_provider_does_not_answer(
    router: respx.MockRouter, handler: Handler, word: str | None
) -> None:
    router.route().mock(side_effect=handler)
    opened = adapter()
    said = await opened.probe()
    await opened.close()
    assert (said is None) if word is None else (said is not None and word in said)
    assert "s3cret" not in (said or "")
