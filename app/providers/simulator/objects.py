"""The objects the provider answers with, built from the ledger's effects.

| object | members |
|---|---|
| charge | `status` (`succeeded`, `cancelled`), `amount`, `amount_refunded`, `currency`, `source` |
| refund | `status` (`succeeded`), `charge`, `amount`, `currency`, `reason` |
| shipment | `status` (`created`, `cancelled`), `address` |
| message | `status` (`sent`), `to`, `subject` |

All of them: `id`, `object`, `reference`, `idempotency_key`, `metadata`, `description`, `created`
(whole seconds since the epoch, like Stripe), `created_at` (RFC 3339). A cancelled one adds
`cancelled_at`, `cancel_reference`, `cancel_idempotency_key`. Nothing of this is stored: a
charge's state follows from the effects that act on it.
"""

from __future__ import annotations

from typing import Any

import orjson

from .ledger import Effect, Ledger
from .wire import rfc3339

_PREFIX = {
    "charge": "ch",
    "charge_cancel": "cc",
    "refund": "re",
    "shipment": "sh",
    "shipment_cancel": "sc",
    "message": "ms",
}
_FIRST_STATUS = {
    "charge": "succeeded",
    "refund": "succeeded",
    "shipment": "created",
    "message": "sent",
}


def id_prefix(kind: str) -> str:
    """What ids of this kind of effect begin with."""
    return _PREFIX[kind]


def text(value: bytes | None) -> str | None:
    """A key or reference for JSON."""
    return None if value is None else value.decode("utf-8", "replace")


def fresh(effect: Effect) -> dict[str, Any]:
    """The object of an effect on which nothing has acted yet."""
    made: dict[str, Any] = {
        "id": effect.id,
        "object": effect.kind,
        "status": _FIRST_STATUS[effect.kind],
        "reference": text(effect.reference),
        "idempotency_key": text(effect.key),
    }
    if effect.amount is not None:
        made |= {"amount": effect.amount, "currency": effect.currency}
    if effect.kind == "charge":
        made["amount_refunded"] = 0
    elif effect.kind == "refund":
        made["charge"] = effect.target
    made |= orjson.loads(effect.details)
    made |= {"created": int(effect.at), "created_at": rfc3339(effect.at)}
    return made


def current(ledger: Ledger, effect: Effect, *, until: float) -> dict[str, Any]:
    """The object after all that happened until then (seconds since the epoch)."""
    made = fresh(effect)
    for later in ledger.effects(target=effect.id, until=until):
        if later.kind == "refund":
            made["amount_refunded"] += later.amount or 0
        else:
            made |= {
                "status": "cancelled",
                "cancelled_at": rfc3339(later.at),
                "cancel_reference": text(later.reference),
                "cancel_idempotency_key": text(later.key),
            }
    return made


def ledger_line(effect: Effect) -> dict[str, Any]:
    """An effect as `GET /_control/ledger` shows it."""
    return {
        "id": effect.id,
        "kind": effect.kind,
        "key": text(effect.key),
        "reference": text(effect.reference),
        "amount": effect.amount,
        "currency": effect.currency,
        "at": rfc3339(effect.at),
        "calls": effect.calls,
        "target": effect.target,
    }
