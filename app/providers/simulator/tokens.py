"""Test tokens: one value in the request chooses how the call ends.

| token | on the first call with a key | later calls with that key |
|---|---|---|
| `tok_ok` | works | the stored answer |
| `tok_declined`, `tok_insufficient_funds` | 402, no effect, stored | the stored 402 |
| `tok_slow` | effect at once, answer after `slow_seconds` | 409, then the stored answer |
| `tok_drop_before` | connection closed (FIN), no effect | executed |
| `tok_drop_after` | effect, connection reset (RST) | the stored answer |
| `tok_500_before` | 500, no effect, not stored | executed |
| `tok_500_after` | effect, 500, the 500 stored | the stored 500; look-ups show the effect |
| `tok_503_retry_after` | 503 with `Retry-After: 1`, no effect, not stored | executed |
| `tok_429` | 429 with `Retry-After: 1`, no effect, not stored | executed |
| `tok_garbage` | effect, 200 with a body that is not JSON | the stored true answer |
| `tok_500_burn` | 500, no effect, the 500 stored for ever | the stored 500 |
| `tok_flaky` | fails 2 to 4 times, then works | |

Where it is read: a charge's `source`; the member `token` of refunds and cancellations; the first
word of a shipment's `address`; the local part of a message's `to` (up to a `+`). A charge's
source that is none of these is refused with 400; anywhere else a text that is no token means
nothing special.

A call without a key is struck every time. That a key was seen is remembered for good (until a
reset), also after its stored answer was forgotten: no fault strikes twice. `tok_500_burn` strikes
once per request (method, path and body), so that it burns one key, and the same request under a
fresh one works (PROTOCOL.md R18).

`tok_flaky` fails in a sequence of drops, 500, 503 and 429, before or after the effect, that is a
function of the `seed` setting, the kind of effect and its amount: repeatable whatever the keys
are. What it answers is never stored (a gateway failed, not the provider), so it always works in
the end. Without a key its calls are counted per equal request.
"""

from __future__ import annotations

import hashlib
import re

from .faults import Fault
from .wire import Answer, error_answer

_RETRY_AFTER = ("Retry-After", "1")
_SERVER_ERROR = error_answer(500, "api_error", "server_error", "Something went wrong.")
_UNAVAILABLE = error_answer(
    503, "api_error", "unavailable", "The provider is over capacity.", _RETRY_AFTER
)
RATE_LIMITED = error_answer(
    429, "rate_limit_error", "rate_limit", "Too many requests.", _RETRY_AFTER
)
"""What `tok_429` and the rate limit answer."""
_GARBAGE = Answer(200, b'{"id":"ch_\xff\xfe\x00', (("Content-Type", "application/json"),))

_DECLINES = {
    "tok_declined": error_answer(
        402, "card_error", "card_declined", "The card was declined.", decline_code="generic_decline"
    ),
    "tok_insufficient_funds": error_answer(
        402, "card_error", "insufficient_funds", "The card has insufficient funds.",
        decline_code="insufficient_funds",
    ),
}  # fmt: skip

_FIRST_CALL = {
    "tok_drop_before": Fault("before", drop="fin"),
    "tok_drop_after": Fault("after", drop="rst"),
    "tok_500_before": Fault("before", answer=_SERVER_ERROR),
    "tok_500_after": Fault("after", answer=_SERVER_ERROR, store=True),
    "tok_503_retry_after": Fault("before", answer=_UNAVAILABLE),
    "tok_429": Fault("before", answer=RATE_LIMITED),
    "tok_garbage": Fault("after", answer=_GARBAGE),
    "tok_500_burn": Fault("none", answer=_SERVER_ERROR, store=True, forever=True),
}

_FLAKY = (
    Fault("before", drop="fin"),
    Fault("after", drop="rst"),
    Fault("before", answer=_SERVER_ERROR),
    Fault("after", answer=_SERVER_ERROR),
    Fault("before", answer=_UNAVAILABLE),
    Fault("before", answer=RATE_LIMITED),
)

TOKENS = frozenset({"tok_ok", "tok_slow", "tok_flaky", *_DECLINES, *_FIRST_CALL})
"""Every token there is."""


def leading_token(text: str) -> str | None:
    """The token a text begins with, as a whole word."""
    word = re.match(r"tok_[a-z0-9_]+", text)
    return word[0] if word is not None and word[0] in TOKENS else None


def decline(token: str | None) -> Answer | None:
    """The refusal that this token means whenever the call is executed."""
    return None if token is None else _DECLINES.get(token)


def strikes_per_request(token: str) -> bool:
    """Whether calls are counted per equal request rather than per key."""
    return token == "tok_500_burn"  # noqa: S105 - a test token


def can_fail(token: str | None) -> bool:
    """Whether `fault` may return one, so that the call's number must be known."""
    return token in _FIRST_CALL or token in ("tok_slow", "tok_flaky")


def fault(
    token: str, number: int, *, keyed: bool, flaky: tuple[Fault, ...], slow_seconds: float
) -> Fault | None:
    """The fault that strikes call `number` (from 1) under a key; `flaky`: `flaky_sequence`."""
    if token == "tok_flaky":  # noqa: S105 - a test token
        return flaky[number - 1] if number <= len(flaky) else None
    if keyed and number > 1:
        return None
    if token == "tok_slow":  # noqa: S105 - a test token
        return Fault("after", delay_seconds=slow_seconds)
    return _FIRST_CALL.get(token)


def flaky_sequence(seed: int, kind: str, amount: int | None) -> tuple[Fault, ...]:
    """How `tok_flaky` fails, call by call: 2 to 4 faults, the same for the same arguments."""
    digest = hashlib.sha256(f"{seed}:{kind}:{amount}".encode()).digest()
    return tuple(_FLAKY[byte % len(_FLAKY)] for byte in digest[1 : 3 + digest[0] % 3])
