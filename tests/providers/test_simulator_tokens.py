"""The simulated provider's test tokens: each ending, what it leaves, what the next call gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from app.providers.simulator.tokens import TOKENS, flaky_sequence
from tests.support.simulator import SimulatorThread

CUT = (httpx.RemoteProtocolError, httpx.ReadError)
KEY = {"Idempotency-Key": "k-1"}


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


def charge(source: str, amount: int = 1000) -> dict[str, Any]:
    return {"amount": amount, "currency": "eur", "source": source, "reference": "r-1"}


def send(http: httpx.Client, source: str, headers: dict[str, str] = KEY, **more: Any) -> Any:
    """The answer, or "cut"."""
    try:
        return http.post("/v1/charges", json=charge(source, **more), headers=headers)
    except CUT:
        return "cut"


def ending(answer: Any) -> object:
    return answer if answer == "cut" else answer.status_code


# first ending, effects after it, second ending, replayed?, effects after that
_TABLE = {
    "tok_ok": (200, 1, 200, True, 1),
    "tok_declined": (402, 0, 402, True, 0),
    "tok_insufficient_funds": (402, 0, 402, True, 0),
    "tok_drop_before": ("cut", 0, 200, False, 1),
    "tok_drop_after": ("cut", 1, 200, True, 1),
    "tok_500_before": (500, 0, 200, False, 1),
    "tok_500_after": (500, 1, 500, True, 1),
    "tok_503_retry_after": (503, 0, 200, False, 1),
    "tok_429": (429, 0, 200, False, 1),
    "tok_garbage": (200, 1, 200, True, 1),
    "tok_500_burn": (500, 0, 500, True, 0),
    "tok_slow": (200, 1, 200, True, 1),
}


@pytest.mark.parametrize("token", sorted(_TABLE))
def test_token(token: str, http: httpx.Client, simulator: SimulatorThread):
    first_ending, first_effects, second_ending, replayed, second_effects = _TABLE[token]
    simulator.control(slow_seconds=0.05)
    first = send(http, token)
    assert ending(first) == first_ending
    assert len(simulator.effects()) == first_effects
    second = send(http, token)
    assert ending(second) == second_ending
    assert ("Idempotent-Replayed" in second.headers) == replayed
    effects = simulator.effects()
    assert len(effects) == second_effects
    assert [effect["calls"] for effect in effects] == [2] * len(effects)
    found = http.get("/v1/charges?reference=r-1").json()["data"]
    assert len(found) == second_effects
    if second_ending == 200:
        assert second.json() == found[0]
    third = send(http, token)
    assert third.content == second.content


def test_the_table_has_every_token():
    assert {*_TABLE, "tok_flaky"} == TOKENS


@pytest.mark.parametrize("token", sorted({*_TABLE} - {"tok_slow"}))
def test_without_a_key_it_strikes_each_time(
    token: str, http: httpx.Client, simulator: SimulatorThread
):
    first_ending, first_effects, *_ = _TABLE[token]
    assert [ending(send(http, token, {})) for _ in range(2)] == [first_ending] * 2
    assert len(simulator.effects()) == 2 * first_effects


@pytest.mark.parametrize("token", sorted({*_TABLE} - {"tok_slow"}))
def test_no_fault_strikes_twice_though_the_key_was_forgotten(
    token: str, http: httpx.Client, simulator: SimulatorThread
):
    send(http, token)
    simulator.forget_keys()
    assert ending(send(http, token)) == (402 if _TABLE[token][0] == 402 else 200)


def test_answers(http: httpx.Client):
    for token, code in [
        ("tok_declined", "card_declined"),
        ("tok_insufficient_funds", "insufficient_funds"),
    ]:
        error = send(http, token, {}).json()["error"]
        assert (error["type"], error["code"]) == ("card_error", code)
    assert send(http, "tok_503_retry_after", {}).headers["Retry-After"] == "1"
    assert send(http, "tok_429", {}).headers["Retry-After"] == "1"
    garbage = send(http, "tok_garbage", {})
    assert garbage.headers["Content-Type"] == "application/json"
    with pytest.raises(UnicodeDecodeError):
        garbage.json()


def test_a_burned_key_outlives_the_memory(http: httpx.Client, simulator: SimulatorThread):
    # R18: no effect, and the key is of no use any more; a fresh key executes (and here burns anew).
    send(http, "tok_500_burn")
    simulator.control(key_memory_seconds=0)
    assert send(http, "tok_500_burn").headers["Idempotent-Replayed"] == "true"
    assert simulator.effects() == []


@pytest.mark.anyio
async def test_slow_answers_after_the_callers_timeout(
    aio: httpx.AsyncClient, simulator: SimulatorThread
):
    simulator.control(slow_seconds=1.0)
    body = charge("tok_slow")
    with pytest.raises(httpx.ReadTimeout):
        await aio.post("/v1/charges", json=body, headers=KEY, timeout=httpx.Timeout(5, read=0.2))
    assert len(simulator.effects()) == 1  # at the start, not at the end
    during = await aio.post("/v1/charges", json=body, headers=KEY)
    assert during.status_code == 409
    while during.status_code == 409:
        during = await aio.post("/v1/charges", json=body, headers=KEY)
        await asyncio.sleep(0.02)
    assert during.headers["Idempotent-Replayed"] == "true"
    assert len(simulator.effects()) == 1


def test_flaky_fails_in_a_fixed_sequence_and_then_works(
    http: httpx.Client, simulator: SimulatorThread
):
    for seed in range(3):
        simulator.reset()
        simulator.control(seed=seed)
        expected = flaky_sequence(seed, "charge", 1000)
        assert 2 <= len(expected) <= 4
        for fault in expected:
            wanted = "cut" if fault.answer is None else fault.answer.status
            assert ending(send(http, "tok_flaky")) == wanted
        assert send(http, "tok_flaky").status_code == 200
        (effect,) = simulator.effects()
        assert effect["calls"] == len(expected) + 1
        # Without a key the calls are counted per equal request.
        for _ in expected:
            send(http, "tok_flaky", {})
        assert send(http, "tok_flaky", {}).status_code == 200


def test_flaky_sequences_differ_by_amount_and_seed():
    assert len({flaky_sequence(0, "charge", amount) for amount in range(50)}) > 20
    assert len({flaky_sequence(seed, "charge", 1000) for seed in range(50)}) > 20
    faults = {fault for amount in range(50) for fault in flaky_sequence(0, "charge", amount)}
    assert len(faults) == 6


def test_tokens_elsewhere(http: httpx.Client, simulator: SimulatorThread):
    made = send(http, "tok_ok", {}).json()
    refund = {"charge": made["id"], "amount": 1, "token": "tok_declined"}
    assert http.post("/v1/refunds", json=refund).status_code == 402
    shipment = {"address": "tok_500_after 1 Main St"}
    assert http.post("/v1/shipments", json=shipment, headers=KEY).status_code == 500
    assert len(simulator.effects(kind="shipment")) == 1
    for to, expected in [
        ("tok_drop_after@example.com", "cut"),
        ("tok_drop_before+7@example.com", "cut"),
        ("tok_declined@example.com", 402),
        ("tok_nonsense@example.com", 200),
    ]:
        message = {"to": to, "subject": "s", "body": "b"}
        try:
            assert http.post("/v1/messages", json=message).status_code == expected
        except CUT:
            assert expected == "cut"
    assert len(simulator.effects(kind="message")) == 2
    cancel = f"/v1/charges/{made['id']}/cancel"
    assert http.post(cancel, json={"token": "tok_500_before"}).status_code == 500
    assert simulator.effects(kind="charge_cancel") == []
    plain = {"address": "tok_nonsense 1 Main St"}
    assert http.post("/v1/shipments", json=plain).status_code == 200
