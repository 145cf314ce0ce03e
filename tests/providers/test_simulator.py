"""The simulated provider: routes, keys, tokens and look-ups, as a caller sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.support.simulator import SimulatorThread


@pytest.fixture(scope="module")
def running() -> Iterator[SimulatorThread]:
    with SimulatorThread() as simulator:
        yield simulator


@pytest.fixture
def simulator(running: SimulatorThread) -> SimulatorThread:
    running.reset()
    return running


@pytest.fixture
def http(simulator: SimulatorThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=simulator.url, timeout=10, verify=False) as client:
        yield client


@pytest.fixture
async def aio(simulator: SimulatorThread) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=simulator.url, timeout=10, verify=False) as client:
        yield client


def charge(source: str = "tok_ok", amount: int = 1000, **more: Any) -> dict[str, Any]:
    return {"amount": amount, "currency": "eur", "source": source, "reference": "r-1", **more}


def keyed(key: str = "k-1") -> dict[str, str]:
    return {"Idempotency-Key": key}


# Keys


def test_a_key_gives_one_effect_and_the_same_bytes(http: httpx.Client, simulator: SimulatorThread):
    first = http.post("/v1/charges", json=charge(metadata={"a": "b"}), headers=keyed())
    again = http.post("/v1/charges", json=charge(metadata={"a": "b"}), headers=keyed())
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.content == again.content
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert first.headers["Request-Id"] != again.headers["Request-Id"]
    (effect,) = simulator.effects(reference="r-1")
    made = first.json()
    assert effect == {
        "id": made["id"], "kind": "charge", "key": "k-1", "reference": "r-1", "amount": 1000,
        "currency": "eur", "at": made["created_at"], "calls": 2, "target": None,
    }  # fmt: skip
    assert simulator.ledger()["calls"] == 2


def test_without_a_key_each_call_is_an_effect(http: httpx.Client, simulator: SimulatorThread):
    ids = {http.post("/v1/charges", json=charge()).json()["id"] for _ in range(3)}
    assert len(ids) == 3
    assert [effect["calls"] for effect in simulator.effects()] == [1, 1, 1]


def test_another_body_under_a_key_is_refused(http: httpx.Client, simulator: SimulatorThread):
    http.post("/v1/charges", json=charge(), headers=keyed())
    for path, body in [
        ("/v1/charges", charge(amount=1001)),
        ("/v1/charges?x=1", charge()),
        ("/v1/shipments", {"address": "1 Main St"}),
    ]:
        answer = http.post(path, json=body, headers=keyed())
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "idempotency_error"
    # Bytes are compared, not values.
    spaced = b'{"amount":1000, "currency":"eur","source":"tok_ok","reference":"r-1"}'
    answer = http.post(
        "/v1/charges", content=spaced, headers={**keyed(), "Content-Type": "application/json"}
    )
    assert answer.json()["error"]["type"] == "idempotency_error"
    assert [effect["calls"] for effect in simulator.effects()] == [1]


def test_keys_differ_by_case(http: httpx.Client, simulator: SimulatorThread):
    for key in ("abc", "ABC"):
        assert http.post("/v1/charges", json=charge(), headers=keyed(key)).status_code == 200
    assert len(simulator.effects()) == 2


@pytest.mark.parametrize("key", [b"", b"k" * 256, b"caf\xc3\xa9", b"a\tb"])
def test_malformed_keys_are_refused(key: bytes, http: httpx.Client, simulator: SimulatorThread):
    answer = http.post("/v1/charges", json=charge(), headers={b"Idempotency-Key": key})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "idempotency_key_invalid"
    assert simulator.effects() == []


def test_key_limits(http: httpx.Client, simulator: SimulatorThread):
    assert http.post("/v1/charges", json=charge(), headers=keyed("k" * 255)).status_code == 200
    twice = http.post("/v1/charges", json=charge(), headers=[*keyed().items()] * 2)
    assert twice.status_code == 400
    assert len(simulator.effects()) == 1


def test_a_forgotten_key_is_a_new_effect(http: httpx.Client, simulator: SimulatorThread):
    # B29: memory counts from the first execution; a replay does not prolong it.
    http.post("/v1/charges", json=charge(), headers=keyed())
    simulator.control(key_memory_seconds=0.0)
    http.post("/v1/charges", json=charge(), headers=keyed())
    simulator.control(key_memory_seconds=3600)
    assert http.post("/v1/charges", json=charge(amount=5), headers=keyed()).status_code == 400
    assert simulator.forget_keys() == 1
    http.post("/v1/charges", json=charge(), headers=keyed())
    assert [effect["calls"] for effect in simulator.effects(key="k-1")] == [1, 1, 1]
    found = http.get("/v1/charges", params={"idempotency_key": "k-1"}).json()["data"]
    assert len(found) == 3  # look-ups remember what keys do not


def test_memory_ends_by_itself(http: httpx.Client, simulator: SimulatorThread):
    simulator.control(key_memory_seconds=0.3)
    started = time.time()
    first = http.post("/v1/charges", json=charge(), headers=keyed()).json()["id"]
    while http.post("/v1/charges", json=charge(), headers=keyed()).json()["id"] == first:
        assert time.time() - started < 5
    assert time.time() - started >= 0.3


@pytest.mark.anyio
async def test_in_flight_is_409_for_the_second_call(
    aio: httpx.AsyncClient, simulator: SimulatorThread
):
    simulator.fault(match={}, effect="after", delay_seconds=0.8)
    first = asyncio.create_task(aio.post("/v1/charges", json=charge(), headers=keyed()))
    await asyncio.to_thread(simulator.wait_for_calls, key="k-1")
    second = await aio.post("/v1/charges", json=charge(), headers=keyed())
    assert second.status_code == 409
    assert second.json()["error"]["code"] == "idempotency_key_in_use"
    other = await aio.post("/v1/charges", json=charge(), headers=keyed("k-2"))
    assert other.status_code == 200
    assert (await first).status_code == 200
    third = await aio.post("/v1/charges", json=charge(), headers=keyed())
    assert third.headers["Idempotent-Replayed"] == "true"
    assert simulator.effects(key="k-1")[0]["calls"] == 3


@pytest.mark.anyio
async def test_simultaneous_first_calls_give_one_effect(
    aio: httpx.AsyncClient, simulator: SimulatorThread
):
    for latency in (0.0, 0.05):
        simulator.control(latency_seconds=latency)
        key = f"k-{latency}"
        answers = await asyncio.gather(
            *(aio.post("/v1/charges", json=charge(), headers=keyed(key)) for _ in range(20))
        )
        statuses = {answer.status_code for answer in answers}
        assert 200 in statuses
        assert statuses <= {200, 409}
        assert len({a.content for a in answers if a.status_code == 200}) == 1
        (effect,) = simulator.effects(key=key)
        assert effect["calls"] == 20


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"amount": 0}, "amount"),
        ({"amount": -1}, "amount"),
        ({"amount": 1.5}, "amount"),
        ({"amount": "100"}, "amount"),
        ({"amount": True}, "amount"),
        ({"amount": None}, "amount"),
        ({"currency": "euro"}, "currency"),
        ({"source": "tok_nonsense"}, "source"),
        ({"reference": 7}, "reference"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_validation_is_not_stored(
    change: dict[str, Any], param: str, http: httpx.Client, simulator: SimulatorThread
):
    refused = http.post("/v1/charges", json=charge(**change), headers=keyed())
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert http.post("/v1/charges", json=charge(), headers=keyed()).status_code == 200
    assert len(simulator.effects()) == 1
    assert simulator.ledger()["calls"] == 2


def test_other_bad_requests(http: httpx.Client):
    for content in (b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000):
        headers = {"Content-Type": "application/json", **keyed()}
        assert http.post("/v1/charges", content=content, headers=headers).status_code == 400
    assert http.post("/v1/charges", data={"amount": "1"}).status_code == 415
    assert http.post("/v1/refunds", json={}).json()["error"]["code"] == "parameter_missing"
    for path in ("/v1/charges/a/b", "/v1/", "/v1/nothing", "/v1/charges/", "/", "/v1/messages/m"):
        assert http.get(path).status_code == 404
    for method, path, allow in [
        ("PUT", "/v1/charges", "POST, GET"),
        ("POST", "/v1/charges/ch_1", "GET"),
        ("GET", "/v1/charges/ch_1/cancel", "POST"),
        ("GET", "/v1/messages", "POST"),
    ]:
        answer = http.request(method, path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, allow)


# Resources


def test_refunds(http: httpx.Client, simulator: SimulatorThread):
    made = http.post("/v1/charges", json=charge()).json()
    part = http.post(
        "/v1/refunds", json={"charge": made["id"], "amount": 300, "reference": "f"}, headers=keyed()
    ).json()
    assert (part["object"], part["charge"], part["amount"]) == ("refund", made["id"], 300)
    too_much = {"charge": made["id"], "amount": 701}
    for _ in range(2):  # depends on what happened, so execution began: stored
        refused = http.post("/v1/refunds", json=too_much, headers=keyed("k-2"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "amount_too_large")
    assert refused.headers["Idempotent-Replayed"] == "true"
    rest = http.post("/v1/refunds", json={"charge": made["id"]}).json()
    assert rest["amount"] == 700
    assert http.get(f"/v1/charges/{made['id']}").json()["amount_refunded"] == 1000
    for code, path, body in [
        ("charge_already_refunded", "/v1/refunds", {"charge": made["id"]}),
        ("charge_already_refunded", f"/v1/charges/{made['id']}/cancel", {}),
        ("resource_missing", "/v1/refunds", {"charge": "ch_none"}),
    ]:
        assert http.post(path, json=body).json()["error"]["code"] == code
    assert http.get(f"/v1/refunds/{part['id']}").json()["reference"] == "f"
    for params in ({"reference": "f"}, {"idempotency_key": "k-1"}):
        assert http.get("/v1/refunds", params=params).json()["data"] == [part]
    lines = simulator.effects(kind="refund")
    assert [(line["amount"], line["target"]) for line in lines] == [
        (300, made["id"]),
        (700, made["id"]),
    ]


def test_an_unknown_charge_is_not_stored(http: httpx.Client):
    for _ in range(2):
        answer = http.post("/v1/refunds", json={"charge": "ch_none"}, headers=keyed())
        assert answer.status_code == 404
        assert "Idempotent-Replayed" not in answer.headers


@pytest.mark.parametrize(
    ("resource", "body"), [("charges", charge()), ("shipments", {"address": "1 Main St"})]
)
def test_cancel_is_idempotent(
    resource: str, body: dict[str, Any], http: httpx.Client, simulator: SimulatorThread
):
    made = http.post(f"/v1/{resource}", json=body).json()
    cancel = f"/v1/{resource}/{made['id']}/cancel"
    first = http.post(cancel, json={"reference": "c-1"}, headers=keyed("c"))
    replay = http.post(cancel, json={"reference": "c-1"}, headers=keyed("c"))
    keyless = http.post(cancel)
    assert first.json()["status"] == "cancelled"
    assert first.json()["cancel_reference"] == "c-1"
    assert first.content == replay.content == keyless.content
    assert http.get(f"/v1/{resource}/{made['id']}").json()["status"] == "cancelled"
    kind = f"{resource.removesuffix('s')}_cancel"
    (effect,) = simulator.effects(kind=kind)
    assert (effect["target"], effect["reference"], effect["calls"]) == (made["id"], "c-1", 3)
    assert http.post(f"/v1/{resource}/none/cancel").status_code == 404
    if resource == "charges":
        refused = http.post("/v1/refunds", json={"charge": made["id"]})
        assert refused.json()["error"]["code"] == "charge_cancelled"


def test_messages_have_no_key_and_no_look_up(http: httpx.Client, simulator: SimulatorThread):
    body = {"to": "a@example.com", "subject": "Hello", "body": "x", "reference": "m-1"}
    ids = {http.post("/v1/messages", json=body, headers=keyed()).json()["id"] for _ in range(2)}
    assert len(ids) == 2
    lines = simulator.effects(kind="message")
    assert [(line["key"], line["calls"]) for line in lines] == [(None, 1), (None, 1)]
    assert http.get("/v1/messages?reference=m-1").status_code == 405


def test_hostile_text(http: httpx.Client, simulator: SimulatorThread):
    # B20, B21: bytes are what is compared; nothing is altered.
    references = ["a\0b", "a", "A", "Jos\u00e9", "Jose\u0301", "%_'\"\\", "a b+c&d=e", "\U0001f600"]
    for number, reference in enumerate(references):
        body = charge(reference=reference, description="\0" * 3)
        made = http.post("/v1/charges", json=body, headers=keyed(f"k-{number}")).json()
        assert (made["reference"], made["description"]) == (reference, "\0\0\0")
        found = http.get("/v1/charges", params={"reference": reference}).json()["data"]
        assert found == [made]
    assert len(simulator.effects()) == len(references)
    assert http.get("/v1/charges?reference=%ff%00").json()["data"] == []
    lone = b'{"amount":1,"currency":"eur","source":"tok_ok","reference":"\\ud800"}'
    headers = {"Content-Type": "application/json"}
    assert http.post("/v1/charges", content=lone, headers=headers).status_code == 400


# Look-ups


def test_look_ups_need_a_known_filter(http: httpx.Client):
    for query in ("", "?limit=3", "?reference=a&reference=b"):
        assert http.get(f"/v1/charges{query}").status_code == 400
    assert http.get("/v1/charges?reference=nobody").json() == {
        "object": "list",
        "data": [],
        "has_more": False,
    }
    assert http.get("/v1/charges/ch_none").status_code == 404
    http.post("/v1/charges", json=charge(), headers=keyed())
    both = {"reference": "r-1", "idempotency_key": "k-2"}
    assert http.get("/v1/charges", params=both).json()["data"] == []
    assert http.get("/v1/refunds?reference=r-1").json()["data"] == []


def test_look_ups_can_lag_lie_and_be_down(http: httpx.Client, simulator: SimulatorThread):
    # B27
    made = http.post("/v1/charges", json=charge()).json()
    http.post("/v1/refunds", json={"charge": made["id"], "amount": 1})
    by_id, listed = f"/v1/charges/{made['id']}", "/v1/charges?reference=r-1"
    for settings in ({"lookup_lag_seconds": 3600}, {"lookup": "lying_absent"}):
        simulator.control(**settings)
        assert http.get(by_id).status_code == 404
        assert http.get(listed).json()["data"] == []
        simulator.control(lookup_lag_seconds=0, lookup="ok")
    simulator.control(lookup="down")
    assert http.get(by_id).status_code == http.get(listed).status_code == 503
    simulator.control(lookup="ok")
    assert http.get(by_id).json()["amount_refunded"] == 1
    assert len(http.get(listed).json()["data"]) == 1


def test_lag_ends_by_itself(http: httpx.Client, simulator: SimulatorThread):
    simulator.control(lookup_lag_seconds=0.5)
    started = time.time()
    http.post("/v1/charges", json=charge())
    assert http.get("/v1/charges?reference=r-1").json()["data"] == []
    while not http.get("/v1/charges?reference=r-1").json()["data"]:
        assert time.time() - started < 5
    assert time.time() - started >= 0.5
