"""How requests to the provider `payments` look; its operation types share this.

Every request carries `metadata.fencepost_key`, the derived key. It says which effect is ours where a look-up
finds several: callers may give two operations the same `reference`. Without a reference of the caller's, the
derived key is the reference too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rfc8785

from app.domain.plan import EffectRequest, StepContext
from app.domain.policy import DAY_SECONDS, TypePolicy

PROVIDER = "payments"

PAYMENT_POLICY = TypePolicy(
    # Sends that reached nobody are repeated for half of the day for which the provider remembers a key. The
    # key's window counts from the first begin (PROTOCOL.md R3), so the very last of them, should it end in
    # doubt, still has the other half in which a re-send under its key settles it without a human.
    retry_horizon_seconds=DAY_SECONDS / 2,
    # Doubt about money is settled within minutes where look-ups work; what is still in doubt after a quarter
    # of an hour is shown to somebody, and looked up further.
    attention_after_seconds=900.0,
)
"""The time policy of money: the rest is the default (result 30 days, key 400 days, no deadline)."""


def payment_request(
    context: StepContext, path: str, members: Mapping[str, object], reference: str | None
) -> EffectRequest:
    """A POST to `path` with `members` (those that are None left out), reference and metadata.

    The body is RFC 8785 canonical JSON: equal values give equal bytes, whatever built them.

    Raises:
        rfc8785.CanonicalizationError: a member JSON cannot carry; a checked input has none.
    """
    key = context.key.value
    shown = key if reference is None else reference
    body: dict[str, Any] = {name: value for name, value in members.items() if value is not None}
    body |= {"reference": shown, "metadata": {"fencepost_key": key}}
    return EffectRequest(method="POST", path=path, body=rfc8785.dumps(body), lookup_reference=shown)
