"""The adapter against the simulated provider itself, with requests as the operation types build them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest

from app.domain.errors import SendWindowClosed
from app.domain.identity import DownstreamKey
from app.domain.outcome import (
    Absent,
    Applied,
    NotApplied,
    Outcome,
    Refused,
    Rejected,
    Succeeded,
    Unavailable,
    Unknown,
)
from app.domain.plan import EffectRequest, OperationType, StepContext
from app.operations import payments_charge, payments_refund
from app.operations.payments_api import payment_request
from app.providers.payments import PaymentsAdapter, PaymentsOptions, provider
from tests.support.simulator import SimulatorThread

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def running() -> Iterator[SimulatorThread]:
    with SimulatorThread() as simulator:
        yield simulator


@pytest.fixture
def simulator(running: SimulatorThread) -> SimulatorThread:
    running.reset()
    return running


@pytest.fixture
async def payments(simulator: SimulatorThread) -> AsyncIterator[PaymentsAdapter]:
    adapter = opened(simulator)
    yield adapter
    await adapter.close()


def opened(simulator: SimulatorThread, **options: Any) -> PaymentsAdapter:
    given = {"url": simulator.url, "timeout_seconds": 2.0, "api_key": "s3cret"} | options
    adapter: PaymentsAdapter = provider.open(PaymentsOptions.model_validate(given))
    return adapter


class Effect:
    """One effect of an operation: its fixed request under its derived key."""

    def __init__(self, type_: OperationType = payments_charge.operation_type, **given: Any) -> None:
        if type_ is payments_charge.operation_type:
            given = {"amount": 1250, "currency": "eur", "source": "tok_ok"} | given
        self.key = DownstreamKey(str(uuid4()))
        context = StepContext(type_.input.model_validate(given), {}, self.key)
        self.request = type_.steps[0].build(context)

    async def send(self, adapter: PaymentsAdapter) -> Outcome:
        return await adapter.perform(self.request, self.key, lambda: None)

    async def look_up(self, adapter: PaymentsAdapter) -> object:
        return await adapter.look_up(self.request, self.key)


async def test_a_charge_and_its_refund(
    simulator: SimulatorThread, payments: PaymentsAdapter
) -> None:
    charge = Effect(reference="invoice 1/\u00e9", description="d")
    made = await charge.send(payments)
    assert isinstance(made, Succeeded)
    assert made.provider_request_id is not None
    assert made.result is not None
    assert (made.result["amount"], made.result["currency"]) == (1250, "eur")
    assert made.result["id"] == made.reference
    assert await charge.send(payments) == Succeeded(
        made.reference, made.result, _request_id(simulator)
    )

    refund = Effect(payments_refund.operation_type, charge=made.reference, amount=250)
    returned = await refund.send(payments)
    assert isinstance(returned, Succeeded)
    assert await refund.look_up(payments) == Applied(returned.reference, returned.result)
    assert [effect["kind"] for effect in simulator.effects()] == ["charge", "refund"]
    assert [effect["key"] for effect in simulator.effects()] == [charge.key.value, refund.key.value]


def _request_id(simulator: SimulatorThread) -> str:
    return str(simulator.calls()[-1]["request_id"])


FIRST_AND_SECOND: dict[str, tuple[type[Outcome], str | None, type[Outcome], int]] = {
    "tok_ok": (Succeeded, None, Succeeded, 1),
    "tok_declined": (Rejected, "card_declined", Rejected, 0),
    "tok_insufficient_funds": (Rejected, "insufficient_funds", Rejected, 0),
    "tok_drop_before": (Unknown, "connection-lost", Succeeded, 1),
    "tok_drop_after": (Unknown, "connection-lost", Succeeded, 1),
    "tok_500_before": (Unknown, "server_error", Succeeded, 1),
    "tok_500_after": (Unknown, "server_error", Unknown, 1),
    "tok_503_retry_after": (NotApplied, "unavailable", Succeeded, 1),
    "tok_429": (NotApplied, "rate_limit", Succeeded, 1),
    "tok_garbage": (Unknown, "unreadable-answer", Succeeded, 1),
    "tok_500_burn": (Unknown, "server_error", Unknown, 0),
}


@pytest.mark.parametrize("token", FIRST_AND_SECOND)
async def test_every_token_is_understood_and_makes_one_effect_at_most(
    simulator: SimulatorThread, payments: PaymentsAdapter, token: str
) -> None:
    first, code, second, effects = FIRST_AND_SECOND[token]
    charge = Effect(source=token)
    outcome = await charge.send(payments)
    assert type(outcome) is first
    assert getattr(outcome, "code", None) == code
    assert not getattr(outcome, "burned", False)
    again = await charge.send(payments)
    assert type(again) is second
    assert len(simulator.effects()) == effects
    found = await charge.look_up(payments)
    assert isinstance(found, Applied if effects else Absent)


async def test_only_a_stored_500_burns_and_look_ups_tell_the_rest(
    simulator: SimulatorThread, payments: PaymentsAdapter
) -> None:
    for token, finding in (("tok_500_after", Applied), ("tok_500_burn", Absent)):
        charge = Effect(source=token)
        assert await charge.send(payments) == Unknown(
            "server_error", "Something went wrong.", provider_request_id=_request_id(simulator)
        )
        again = await charge.send(payments)
        assert isinstance(again, Unknown)
        assert again.burned
        assert isinstance(await charge.look_up(payments), finding)


async def test_a_slow_answer_is_unknown_and_then_in_flight(simulator: SimulatorThread) -> None:
    simulator.control(slow_seconds=1.0)
    adapter = opened(simulator, timeout_seconds=0.3)
    charge = Effect(source="tok_slow")
    outcome = await charge.send(adapter)
    assert isinstance(outcome, Unknown)
    assert outcome.code == "timeout"
    outcome = await charge.send(adapter)
    assert isinstance(outcome, Unknown)
    assert outcome.code == "idempotency_key_in_use"
    simulator.wait_until(lambda: simulator.calls()[0]["status"] is not None)
    assert isinstance(await charge.send(adapter), Succeeded)
    assert len(simulator.effects()) == 1
    await adapter.close()


async def test_another_body_under_the_same_key_is_unknown(payments: PaymentsAdapter) -> None:
    first, second = Effect(), Effect(amount=7)
    second.key = first.key
    await first.send(payments)
    outcome = await second.send(payments)
    assert isinstance(outcome, Unknown)
    assert outcome.code == "idempotency_key_reused"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"source": "tok_unknown"}, "parameter_invalid"),
        ({"amount": 2**53 - 1}, "parameter_invalid"),
    ],
)
async def test_a_request_the_provider_can_never_take_is_final(
    simulator: SimulatorThread, payments: PaymentsAdapter, given: dict[str, Any], code: str
) -> None:
    outcome = await Effect(**given).send(payments)
    assert isinstance(outcome, NotApplied)
    assert (outcome.code, outcome.final) == (code, True)
    assert not simulator.effects()


async def test_refunds_that_cannot_be(
    simulator: SimulatorThread, payments: PaymentsAdapter
) -> None:
    outcome = await Effect(payments_refund.operation_type, charge="ch_none").send(payments)
    assert isinstance(outcome, NotApplied)
    assert (outcome.code, outcome.final) == ("resource_missing", True)
    charge = await Effect().send(payments)
    assert isinstance(charge, Succeeded)
    much = Effect(payments_refund.operation_type, charge=charge.reference, amount=1251)
    outcome = await much.send(payments)
    assert isinstance(outcome, Rejected)
    assert outcome.code == "amount_too_large"
    assert await much.send(payments) == Rejected(
        outcome.code, outcome.detail, _request_id(simulator)
    )


async def test_two_operations_with_one_reference_are_told_apart(
    simulator: SimulatorThread,
) -> None:
    adapter = opened(simulator, honour_keys=False)
    mine, other = Effect(reference="shared"), Effect(reference="shared")
    made = await other.send(adapter)
    assert isinstance(made, Succeeded)
    assert await mine.look_up(adapter) == Absent()
    assert await other.look_up(adapter) == Applied(made.reference, made.result)
    assert [effect["key"] for effect in simulator.effects()] == [None]
    await adapter.close()


async def test_without_a_reference_the_derived_key_is_looked_up(
    simulator: SimulatorThread,
) -> None:
    adapter = opened(simulator, honour_keys=False)
    charge = Effect(source="tok_drop_after")
    assert isinstance(await charge.send(adapter), Unknown)
    found = await charge.look_up(adapter)
    assert isinstance(found, Applied)
    assert simulator.effects(reference=charge.key.value)[0]["id"] == found.reference
    await adapter.close()


async def test_look_ups_lag_are_down_or_lie(
    simulator: SimulatorThread, payments: PaymentsAdapter
) -> None:
    charge = Effect()
    await charge.send(payments)
    simulator.control(lookup_lag_seconds=60)
    assert await charge.look_up(payments) == Absent()
    simulator.control(lookup_lag_seconds=0, lookup="down")
    assert await charge.look_up(payments) == Unavailable("lookup_unavailable", "Look-ups are down.")
    simulator.control(lookup="lying_absent")
    assert await charge.look_up(payments) == Absent()


async def test_shipments_are_made_cancelled_and_found(
    simulator: SimulatorThread, payments: PaymentsAdapter
) -> None:
    key, cancel_key = DownstreamKey(str(uuid4())), DownstreamKey(str(uuid4()))
    ship = payment_request(StepContext(None, {}, key), "/v1/shipments", {"address": "Here"}, None)
    made = await payments.perform(ship, key, lambda: None)
    assert isinstance(made, Succeeded)
    assert isinstance(await payments.look_up(ship, key), Applied)
    cancel = payment_request(
        StepContext(None, {}, cancel_key), f"/v1/shipments/{made.reference}/cancel", {}, None
    )
    assert await payments.look_up(cancel, cancel_key) == Absent()
    cancelled = await payments.perform(cancel, cancel_key, lambda: None)
    assert isinstance(cancelled, Succeeded)
    assert cancelled.reference == made.reference
    found = await payments.look_up(cancel, cancel_key)
    assert isinstance(found, Applied)
    assert found.reference == made.reference
    assert [effect["kind"] for effect in simulator.effects()] == ["shipment", "shipment_cancel"]
    nowhere = EffectRequest("POST", "/v1/shipments/sh_none/cancel", b"{}")
    assert isinstance(await payments.look_up(nowhere, cancel_key), Refused)


async def test_a_closed_window_leaves_no_byte_at_the_provider(
    simulator: SimulatorThread, payments: PaymentsAdapter
) -> None:
    def too_late() -> None:
        raise SendWindowClosed("too late")

    charge = Effect()
    outcome = await payments.perform(charge.request, charge.key, too_late)
    assert isinstance(outcome, NotApplied)
    simulator.wait_until(lambda: simulator.ledger()["connections_without_bytes"] == 1)
    assert simulator.calls() == []


async def test_a_wrong_address_waits_for_the_operator(simulator: SimulatorThread) -> None:
    adapter = opened(simulator, url=simulator.url + "/v1")
    outcome = await Effect().send(adapter)
    assert isinstance(outcome, NotApplied)
    assert (outcome.code, outcome.final) == ("route_unknown", False)
    assert await adapter.probe() is not None
    await adapter.close()


async def test_a_probe_has_no_effect(simulator: SimulatorThread, payments: PaymentsAdapter) -> None:
    assert await payments.probe() is None
    assert simulator.effects() == []


async def test_the_credential_is_neither_stored_nor_in_the_request(
    simulator: SimulatorThread, payments: PaymentsAdapter
) -> None:
    charge = Effect()
    await charge.send(payments)
    assert b"s3cret" not in charge.request.body
    assert "s3cret" not in repr(charge.request)
