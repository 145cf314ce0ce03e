"""What an executed call does: the effect, or a refusal that depends on what happened before.

Refusals from here speak for the key (execution began) and are stored under it, except for an
unknown id, which is a fault of the request: 402 declines, 400 `charge_already_refunded`,
`charge_cancelled`, `amount_too_large`. Cancelling is idempotent by nature: what is cancelled
already is answered as it is, without a second effect.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import orjson

from . import objects, tokens
from .bodies import Body, ChargeBody, MessageBody, RefundBody, ShipmentBody
from .ledger import Effect, Ledger
from .routes import Call
from .wire import Answer, Refusal, error_answer, invalid, json_answer


@dataclass(frozen=True, slots=True)
class Executed:
    """The true answer, and the `Effect.seq` it stands for (None: there was no effect)."""

    answer: Answer
    effect: int | None


def execute(ledger: Ledger, call: Call, *, at: float) -> Executed:
    """Perform `call` at this instant (seconds since the epoch).

    Raises `Refusal` for an unknown charge or shipment; nothing is to be stored then.
    """
    declined = tokens.decline(call.body.chosen_token())
    if declined is not None:
        return Executed(declined, None)
    if isinstance(call.body, RefundBody):
        return _refund(ledger, call, call.body, at=at)
    if call.kind in ("charge_cancel", "shipment_cancel"):
        return _cancel(ledger, call, at=at)
    effect = _record(ledger, call, at=at)
    return Executed(json_answer(200, objects.fresh(effect)), effect.seq)


def _details(body: Body) -> dict[str, object]:
    details: dict[str, object] = {"metadata": body.metadata or {}, "description": body.description}
    if isinstance(body, ChargeBody):
        details["source"] = body.source
    elif isinstance(body, RefundBody):
        details["reason"] = body.reason
    elif isinstance(body, ShipmentBody):
        details["address"] = body.address
    elif isinstance(body, MessageBody):
        details |= {"to": body.to, "subject": body.subject}
    return details


def _record(
    ledger: Ledger,
    call: Call,
    *,
    at: float,
    amount: int | None = None,
    currency: str | None = None,
    target: str | None = None,
) -> Effect:
    if isinstance(call.body, ChargeBody):
        amount, currency = call.body.amount, call.body.currency.lower()
    return ledger.add_effect(
        Effect(
            seq=0,
            id=_new_id(call.kind, at),
            kind=call.kind,
            key=call.key,
            reference=call.reference,
            amount=amount,
            currency=currency,
            at=at,
            calls=1,
            target=target,
            details=orjson.dumps(_details(call.body)),
        )
    )


def _new_id(kind: str, at: float) -> str:
    # The time in front keeps new ids together in their index.
    return f"{objects.id_prefix(kind)}_{int(at * 1e6):014x}{secrets.token_hex(5)}"


def _missing(kind: str, param: str) -> Refusal:
    return invalid("resource_missing", f"No such {kind}.", param=param, status=404)


def _refused(code: str, message: str) -> Executed:
    return Executed(error_answer(400, "invalid_request_error", code, message), None)


def _refund(ledger: Ledger, call: Call, body: RefundBody, *, at: float) -> Executed:
    charge = ledger.effect("charge", body.charge)
    if charge is None or charge.amount is None:
        raise _missing("charge", "charge")
    acted = ledger.effects(target=charge.id)
    if any(effect.kind == "charge_cancel" for effect in acted):
        return _refused("charge_cancelled", "The charge was cancelled.")
    left = charge.amount - sum(effect.amount or 0 for effect in acted)
    if left <= 0:
        return _refused("charge_already_refunded", "Nothing is left of the charge.")
    amount = left if body.amount is None else body.amount
    if amount > left:
        return _refused("amount_too_large", f"Only {left} is left of the charge.")
    refund = _record(ledger, call, at=at, amount=amount, currency=charge.currency, target=charge.id)
    return Executed(json_answer(200, objects.fresh(refund)), refund.seq)


def _cancel(ledger: Ledger, call: Call, *, at: float) -> Executed:
    kind = call.kind.removesuffix("_cancel")
    effect = ledger.effect(kind, call.target or "")
    if effect is None:
        raise _missing(kind, "id")
    acted = ledger.effects(target=effect.id)
    done = next((other for other in acted if other.kind == call.kind), None)
    if done is not None:
        ledger.add_call(done.seq)
    elif acted:
        return _refused("charge_already_refunded", "A refunded charge cannot be cancelled.")
    else:
        done = _record(
            ledger,
            call,
            at=at,
            amount=effect.amount,
            currency=effect.currency,
            target=effect.id,
        )
    return Executed(json_answer(200, objects.current(ledger, effect, until=at)), done.seq)
