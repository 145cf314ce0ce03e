"""The simulated provider's control interface: fault rules, settings, ledger, reset."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.support.simulator import ControlFailed, SimulatorThread

CUT = (httpx.RemoteProtocolError, httpx.ReadError)
KEY = {"Idempotency-Key": "k-1"}
CHARGE = {"amount": 1000, "currency": "eur", "source": "tok_ok", "reference": "r-1"}


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


def send(http: httpx.Client, **more: Any) -> int | str:
    """The status of one charge, or "cut"."""
    try:
        return http.post("/v1/charges", json={**CHARGE, **more}, headers=KEY).status_code
    except CUT:
        return "cut"


# When a rule strikes


@pytest.mark.parametrize("style", [True, "fin", "rst"])
@pytest.mark.parametrize("effect", ["before", "after", "none"])
def test_drop(effect: str, style: object, http: httpx.Client, simulator: SimulatorThread):
    simulator.fault(match={"method": "POST"}, effect=effect, drop=style)
    assert send(http) == "cut"
    assert len(simulator.effects()) == (1 if effect == "after" else 0)
    assert send(http) == 200
    (line,) = simulator.effects()
    assert line["calls"] == 2
    (cut,) = (line for line in simulator.connections() if line["ended"] == "cut")
    assert cut["requests"] == 1


@pytest.mark.parametrize("effect", ["before", "after", "none"])
def test_answer_is_not_stored(effect: str, http: httpx.Client, simulator: SimulatorThread):
    # B26: a gateway's 504 after the effect; the provider's own answer is what the key remembers.
    answer = {"status": 504, "headers": {"Retry-After": "7", "X-Via": "gate"}, "body": "<html>"}
    simulator.fault(effect=effect, answer=answer)
    struck = http.post("/v1/charges", json=CHARGE, headers=KEY)
    assert (struck.status_code, struck.text) == (504, "<html>")
    assert (struck.headers["Retry-After"], struck.headers["X-Via"]) == ("7", "gate")
    again = http.post("/v1/charges", json=CHARGE, headers=KEY)
    assert again.status_code == 200
    assert ("Idempotent-Replayed" in again.headers) == (effect == "after")
    assert len(simulator.effects()) == 1


def test_a_rule_can_burn_one_key(http: httpx.Client, simulator: SimulatorThread):
    # R18: the stored 500 says nothing; look-ups show whether there is an effect.
    for effect, effects in (("none", 0), ("after", 1)):
        simulator.reset()
        simulator.fault(effect=effect, answer={"status": 500, "body": {"x": 1}}, store=True)
        assert [send(http), send(http)] == [500, 500]
        assert len(simulator.effects()) == effects
        found = http.get("/v1/charges?idempotency_key=k-1").json()["data"]
        assert len(found) == effects
        simulator.forget_keys()
        assert send(http) == 200


@pytest.mark.anyio
async def test_delays(aio: httpx.AsyncClient, simulator: SimulatorThread):
    # Late delivery: the key is not under way yet; the second call executes, the first replays.
    simulator.fault(effect="before", delay_seconds=0.8)
    late = asyncio.create_task(aio.post("/v1/charges", json=CHARGE, headers=KEY))
    await asyncio.to_thread(simulator.wait_for_calls)
    assert simulator.effects() == []
    assert (await aio.post("/v1/charges", json=CHARGE, headers=KEY)).status_code == 200
    assert (await late).headers["Idempotent-Replayed"] == "true"
    # A late answer: the effect is there at once and the key is under way.
    simulator.reset()
    simulator.fault(effect="after", delay_seconds=0.8)
    slow = asyncio.create_task(aio.post("/v1/charges", json=CHARGE, headers=KEY))
    await asyncio.to_thread(simulator.wait_until, simulator.effects)
    assert (await aio.post("/v1/charges", json=CHARGE, headers=KEY)).status_code == 409
    assert (await slow).status_code == 200
    # Swallowed: no effect, no answer.
    simulator.fault(effect="none", delay_seconds=0.05)
    with pytest.raises(httpx.RemoteProtocolError):
        await aio.post("/v1/charges", json=CHARGE, headers={"Idempotency-Key": "k-2"})
    assert simulator.effects(key="k-2") == []


def test_a_callers_end_changes_nothing(http: httpx.Client, simulator: SimulatorThread):
    simulator.fault(effect="before", delay_seconds=0.2)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/charges", json=CHARGE, headers=KEY, timeout=httpx.Timeout(5, read=0.05))
    simulator.wait_until(simulator.effects)
    simulator.wait_until(lambda: simulator.calls()[0]["ended"] == "answered")


def test_an_answer_cut_in_the_middle(http: httpx.Client, simulator: SimulatorThread):
    for style in ("fin", "rst"):
        simulator.fault(effect="after", answer={"status": 200, "body": "x" * 1000}, drop=style)
        with http.stream("POST", "/v1/charges", json=CHARGE, headers=KEY) as answer:
            assert answer.headers["Content-Length"] == "1000"
            with pytest.raises(CUT):
                answer.read()
    assert len(simulator.effects()) == 1


def test_any_bytes_and_large_bodies(http: httpx.Client, simulator: SimulatorThread):
    # B21: text from outside that no store takes as it is.
    raw = b"\xff\xfe\0" * 10
    simulator.fault(
        effect="before",
        answer={"status": 400, "body_base64": base64.b64encode(raw).decode()},
        times=2,
    )
    assert http.post("/v1/charges", json=CHARGE).content == raw
    assert http.get("/v1/charges?reference=r-1").content == raw
    simulator.fault(effect="before", answer={"status": 400, "body": "y" * 5_000_000})
    assert len(http.post("/v1/charges", json=CHARGE).content) == 5_000_000
    simulator.fault(effect="before", answer={"status": 204})
    assert http.post("/v1/charges", json=CHARGE).status_code == 204
    moved = {"status": 307, "headers": {"Location": "/v1/elsewhere"}}
    simulator.fault(effect="before", answer=moved)
    assert http.post("/v1/charges", json=CHARGE).headers["Location"] == "/v1/elsewhere"
    assert http.post("/v1/charges", json=CHARGE).status_code == 200  # the connection is in order


# Which calls


def test_match(http: httpx.Client, simulator: SimulatorThread):
    teapot = {"status": 418}
    for match, hits in [
        ({"path": "/v1/charges"}, True),
        ({"path": "/v1/*"}, True),
        ({"path": "/v1/refunds"}, False),
        ({"path": "/v1/charge[s]"}, False),
        ({"method": "post"}, True),
        ({"method": "GET"}, False),
        ({"reference": "r-1"}, True),
        ({"reference": "r-2"}, False),
        ({"source": "tok_ok"}, True),
        ({"source": "tok_slow"}, False),
        ({"source": "tok_ok", "reference": "r-2"}, False),
        ({}, True),
    ]:
        simulator.reset()
        simulator.fault(match=match, effect="before", answer=teapot)
        assert send(http) == (418 if hits else 200), match


def test_nth_and_times(http: httpx.Client, simulator: SimulatorThread):
    answer = {"status": 503}
    simulator.fault(match={"nth": 2}, times=2, effect="before", answer=answer)
    assert [send(http) for _ in range(5)] == [200, 503, 503, 200, 200]
    (armed,) = simulator.faults()
    assert armed == {
        "match": {"nth": 2}, "times": 2, "effect": "before", "answer": answer,
        "seen": 5, "struck": 2,
    }  # fmt: skip
    simulator.fault(times=None, effect="before", answer={"status": 502})
    assert [send(http) for _ in range(5)] == [502] * 5
    assert simulator.request_control("DELETE", "/faults") == {"armed": []}
    assert send(http) == 200


def test_the_first_rule_due_strikes(http: httpx.Client, simulator: SimulatorThread):
    rules = [{"effect": "before", "answer": {"status": status}} for status in (500, 502)]
    assert len(simulator.request_control("POST", "/faults", rules)["armed"]) == 2
    assert [send(http) for _ in range(3)] == [500, 502, 200]


def test_look_ups_are_struck_too(http: httpx.Client, simulator: SimulatorThread):
    send(http)
    match = {"method": "GET", "reference": "r-1"}
    simulator.fault(match=match, effect="before", drop=True)
    simulator.fault(match=match, effect="after", answer={"status": 200, "body": {"data": []}})
    simulator.fault(match=match, effect="after", delay_seconds=0.01)
    with pytest.raises(httpx.RemoteProtocolError):
        http.get("/v1/charges?reference=r-1")
    assert http.get("/v1/charges?reference=r-1").json() == {"data": []}
    assert len(http.get("/v1/charges?reference=r-1").json()["data"]) == 1


def test_a_rule_after_the_effect_stands_in_for_the_token(
    http: httpx.Client, simulator: SimulatorThread
):
    simulator.fault(effect="after", answer={"status": 502})
    assert send(http, source="tok_500_before") == 502
    assert send(http, source="tok_500_before") == 200
    assert len(simulator.effects()) == 1


# What is refused


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"effect": "before", "drop": True, "tims": 1}, "Unknown member: tims"),
        ({"match": {"paht": "/"}, "effect": "before", "drop": True}, "Unknown member: match.paht"),
        ({"effect": "before", "answer": {"status": 200, "code": 1}}, "Unknown member: answer.code"),
        ({"drop": True}, "effect"),
        ({"effect": "later", "drop": True}, "effect"),
        ({"effect": "before"}, "needs an answer"),
        ({"effect": "none", "store": True}, "store needs an answer"),
        ({"effect": "before", "drop": True, "times": 0}, "times"),
        ({"effect": "before", "answer": {"status": 99}}, "status"),
        ({"effect": "before", "answer": {"status": 200, "headers": {"A": "b\r\nC: d"}}}, "A"),
        ({"effect": "before", "answer": {"status": 200, "headers": {"A b": "c"}}}, "A b"),
        (
            {"effect": "before", "answer": {"status": 200, "headers": {"Content-Length": "1"}}},
            "Content-Length",
        ),
        ({"effect": "before", "answer": {"status": 200, "body_base64": "?"}}, "base64"),
        ({"effect": "before", "delay_seconds": -1}, "delay_seconds"),
        (7, "Input should be"),
    ],
)
def test_a_bad_rule_arms_nothing(rule: object, says: str, simulator: SimulatorThread):
    good = {"effect": "before", "drop": True}
    for body in (rule, [good, rule]):
        with pytest.raises(ControlFailed, match="400 ") as refused:
            simulator.request_control("POST", "/faults", body)
        assert says in str(refused.value)
    assert simulator.faults() == []


def test_settings(http: httpx.Client, simulator: SimulatorThread):
    defaults = {
        "key_memory_seconds": 86400.0, "lookup_lag_seconds": 0.0, "lookup": "ok",
        "latency_seconds": 0.0, "slow_seconds": 8.0, "rate_limit_per_second": 0, "seed": 0,
    }  # fmt: skip
    assert simulator.control() == defaults
    assert simulator.control(seed=7, slow_seconds=1) == {**defaults, "seed": 7, "slow_seconds": 1.0}
    for change in (
        {"lookup": "maybe"}, {"latency": 1}, {"latency_seconds": -1}, {"seed": "1"}, {"seed": None},
    ):  # fmt: skip
        with pytest.raises(ControlFailed, match="400 "):
            simulator.control(**{"seed": 8, **change})
    assert simulator.control()["seed"] == 7
    for body in (b"[]", b"{", b"7"):
        assert http.patch("/_control", content=body).status_code == 400
    assert http.get("/_control/ledger?referense=1").status_code == 400
    assert http.get("/_control/nothing").status_code == 404
    assert http.get("/_controls").status_code == 404
    assert http.put("/_control/faults").headers["Allow"] == "GET, POST, DELETE"


def test_latency(http: httpx.Client, simulator: SimulatorThread):
    send(http)
    simulator.control(latency_seconds=0.1)
    assert http.post("/v1/charges", json=CHARGE).elapsed.total_seconds() >= 0.1
    assert http.get("/v1/charges?reference=r-1").elapsed.total_seconds() >= 0.1
    simulator.control(latency_seconds=60)
    assert simulator.ledger()["calls"] == 3  # tests themselves are not slowed


def test_rate_limit(http: httpx.Client, simulator: SimulatorThread):
    # B32: healthy again, but not for everyone at once.
    simulator.control(rate_limit_per_second=5)
    answers = [http.post("/v1/charges", json=CHARGE, headers=KEY) for _ in range(7)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
    assert answers[-1].headers["Retry-After"] == "1"
    assert http.get("/v1/charges?reference=r-1").status_code == 429
    assert [line["calls"] for line in simulator.effects()] == [7]
    simulator.wait_until(lambda: send(http) == 200)


def test_ledger_and_calls(http: httpx.Client, simulator: SimulatorThread):
    send(http)
    send(http)
    http.post("/v1/shipments", json={"address": "1 Main St", "reference": "r-2"})
    http.get("/v1/charges?reference=r-1")
    http.get("/v1/nothing")
    http.get("/livez")
    ledger = simulator.ledger()
    assert [(line["kind"], line["reference"]) for line in ledger["effects"]] == [
        ("charge", "r-1"),
        ("shipment", "r-2"),
    ]
    assert (ledger["calls"], ledger["connections_without_bytes"]) == (5, 0)
    assert len(simulator.effects(key="k-1")) == len(simulator.effects(kind="shipment")) == 1
    assert simulator.effects(reference="r") == []
    calls = simulator.calls()
    assert [(line["method"], line["path"], line["status"]) for line in calls] == [
        ("POST", "/v1/charges", 200),
        ("POST", "/v1/charges", 200),
        ("POST", "/v1/shipments", 200),
        ("GET", "/v1/charges", 200),
        ("GET", "/v1/nothing", 404),
    ]
    assert calls[0]["body_sha256"] == calls[1]["body_sha256"] != calls[2]["body_sha256"]
    assert len(simulator.calls(reference="r-1")) == 3
    assert len(simulator.calls(key="k-1")) == 2


def test_reset(http: httpx.Client, simulator: SimulatorThread):
    send(http, source="tok_500_before")
    simulator.control(seed=3)
    simulator.fault(effect="before", drop=True)
    simulator.reset()
    assert simulator.ledger() == {"effects": [], "calls": 0, "connections_without_bytes": 0}
    assert (simulator.faults(), simulator.calls(), simulator.control()["seed"]) == ([], [], 0)
    assert send(http, source="tok_500_before") == 500  # strikes anew
