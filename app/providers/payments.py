"""The provider `payments`: the simulated payment provider of CONTRACT.md, part two, with Stripe v1's rules.

Pinned from CONTRACT.md and PROVIDERS.md (row Stripe v1). Which answers mean what:

| answer | meaning | because |
|---|---|---|
| 2xx that shows our object | success | |
| 402, 400 about the charge's state | rejection | execution began, so the answer is stored under the key |
| 400 validation, 415, 404 `resource_missing` | request invalid | given before the key is read, never stored |
| 400 `idempotency_key_reused`, 409 | key mismatch, in flight | |
| 401, 403 | credentials | |
| 429, 503, the router's 404 and 405, **with the provider's code** | before the key | never stored |
| a stored 5xx (`Idempotent-Replayed: true`) | burned | see below |
| everything else: 500, 502, 504, redirects, a gateway's 429 or 503 | unknown | the effect may exist |

**500, and which answer burns the key** (PROTOCOL.md R18). A first 500 says nothing: the effect may exist
(`tok_500_after`), or not and the answer be stored (`tok_500_burn`), or not and nothing be stored
(`tok_500_before`). So it is plainly unknown, and a re-send under the same key, always safe here, tells the
cases apart: where nothing was stored it executes. Where the *stored* 500 comes back, marked as replayed, no
further send under this key can ever say more: that answer is declared as burning the key. It is still no
evidence against the effect: look-ups find it (`tok_500_after` ends succeeded), or are counted until a fresh
key is allowed (`tok_500_burn`). The same holds of any stored 5xx, so the rule comes first.

With `honour_keys` off the same provider is used as one that can only be looked up: no key header is sent, and
look-ups go by reference, filtered by `metadata.fencepost_key`. With `look_up` off as well it is neither.
`/v1/messages` (neither key nor look-up) belongs to a plug-in of its own with another profile: it opens
`PaymentsAdapter` with that profile, since a profile without keys sends none.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from app.domain.identity import DownstreamKey
from app.domain.outcome import Finding, Outcome, Refused, Unavailable
from app.domain.plan import EffectRequest
from app.domain.policy import DAY_SECONDS
from app.domain.profile import KeyRules, LookupRules, Meaning, ProviderProfile, answers
from app.domain.provider import LastCheck, ProviderPlugin
from app.domain.restraint import RestraintRules
from app.providers.http import HttpSender, NoAnswer
from app.providers.payments_answers import (
    WantedEffect,
    look_up_trouble,
    read_answer,
    read_list,
    read_target,
)

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Span = Annotated[float, Field(ge=0, allow_inf_nan=False)]

ANSWERS = (
    answers(500, 599, mean=Meaning.BURNED, replayed=True),
    answers(200, 299, mean=Meaning.SUCCESS),
    answers(402, mean=Meaning.REJECTION, codes=("card_declined", "insufficient_funds")),
    answers(
        400,
        mean=Meaning.REJECTION,
        codes=("charge_already_refunded", "charge_cancelled", "amount_too_large"),
    ),
    answers(
        400,
        mean=Meaning.REQUEST_INVALID,
        codes=(
            "parameter_invalid",
            "parameter_missing",
            "parameter_unknown",
            "json_invalid",
            "idempotency_key_invalid",
        ),
    ),
    answers(415, mean=Meaning.REQUEST_INVALID, codes=("content_type_unsupported",)),
    answers(404, mean=Meaning.REQUEST_INVALID, codes=("resource_missing",)),
    answers(400, mean=Meaning.KEY_MISMATCH, codes=("idempotency_key_reused",)),
    answers(409, mean=Meaning.IN_FLIGHT, codes=("idempotency_key_in_use",)),
    answers(401, mean=Meaning.CREDENTIALS),
    answers(403, mean=Meaning.CREDENTIALS),
    answers(429, mean=Meaning.BEFORE_KEY, codes=("rate_limit",)),
    answers(503, mean=Meaning.BEFORE_KEY, codes=("unavailable", "too_many_connections")),
    # A wrong FENCEPOST_PAYMENTS_URL: the operator's to mend, so the effect waits for it.
    answers(404, 405, mean=Meaning.BEFORE_KEY, codes=("route_unknown", "method_not_allowed")),
)
"""Read in order; see the module for the reasons."""


class PaymentsOptions(BaseModel):
    """`FENCEPOST_PAYMENTS_*`, in upper case. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        "http://127.0.0.1:8100", description="The provider's address, with any path prefix"
    )
    api_key: SecretStr | None = Field(
        None, description="Sent as a Bearer credential; never stored or logged"
    )
    timeout_seconds: _Seconds = Field(
        5.0, description="Longest call, from connecting to the last byte of the answer"
    )
    concurrency: int = Field(64, ge=1, le=2000, description="Calls under way per process")
    shared_concurrency: int | None = Field(
        None, ge=1, le=100_000, description="Calls under way over all processes; empty: no cap"
    )
    rate_per_second: _Seconds | None = Field(
        None, description="Calls begun per second over all processes; empty: no limit"
    )
    burst: int = Field(
        10, ge=1, le=10_000, description="Calls that may begin at once under the rate"
    )
    honour_keys: bool = Field(
        True, description="Off: no Idempotency-Key is sent; a charge can only be looked up"
    )
    look_up: bool = Field(True, description="Off: effects are never looked up")
    key_memory_seconds: _Seconds = Field(
        DAY_SECONDS, description="How long the provider remembers a key"
    )
    lookup_lag_seconds: _Span = Field(
        2.0, description="How far look-ups may run behind the effects"
    )
    send_window_seconds: _Seconds = Field(
        10.0, description="Longest from the attempt's record to its first byte"
    )
    stall_seconds: _Span = Field(
        60.0, description="Longest stop between the last check and the bytes leaving"
    )
    delivery_seconds: _Span | None = Field(
        None,
        description="Longest from the bytes leaving to the effect; empty: the timeout plus 60",
    )

    @field_validator("url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:
            raise ValueError("must be an http:// or https:// address") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http:// or https:// address")
        if parts.username is not None or parts.query or parts.fragment or not url.isascii():
            raise ValueError("must have neither credentials, nor a query, nor a fragment")
        return url.rstrip("/")

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, api_key: SecretStr | None) -> SecretStr | None:
        text = "" if api_key is None else api_key.get_secret_value()
        if not all("!" <= character <= "~" for character in text):
            raise ValueError("must be printable ASCII without spaces")
        return api_key if text else None


def payments_profile(options: PaymentsOptions, name: str = "payments") -> ProviderProfile:
    """The profile that these options make.

    Raises:
        ConfigurationError: the times do not fit together (memory against stall and delivery).
    """
    keys = lookup = None
    if options.honour_keys:
        keys = KeyRules(
            name="Idempotency-Key",
            max_length=255,
            memory_seconds=options.key_memory_seconds,
            compares_bodies=True,
            stores_rejections=True,
            replays_success=True,
        )
    if options.look_up:
        lookup = LookupRules(
            by="key" if options.honour_keys else "reference",
            lag_seconds=options.lookup_lag_seconds,
        )
    return ProviderProfile(
        name=name,
        pinned_on="2026-12-01",
        answers=ANSWERS,
        timeout_seconds=options.timeout_seconds,
        keys=keys,
        lookup=lookup,
        send_window_seconds=options.send_window_seconds,
        stall_seconds=options.stall_seconds,
        delivery_seconds=options.delivery_seconds,
        concurrency=options.concurrency,
        restraint=RestraintRules(
            rate_per_second=options.rate_per_second,
            burst=options.burst,
            shared_concurrency=options.shared_concurrency,
        ),
        sources={
            "answers": "CONTRACT.md, The simulated provider; PROVIDERS.md, Stripe v1",
            "memory": "CONTRACT.md: a setting of the simulator; Stripe v1: at least 24 h",
        },
    )


class PaymentsAdapter:
    """One configured provider of this kind; what it may do follows from the profile alone."""

    def __init__(self, options: PaymentsOptions, profile: ProviderProfile) -> None:
        self._profile = profile
        self._sender = HttpSender(profile, options.url)
        self._api_key = options.api_key

    @property
    def profile(self) -> ProviderProfile:
        """What the provider can do, and what its answers mean."""
        return self._profile

    async def perform(
        self, request: EffectRequest, key: DownstreamKey, last_check: LastCheck
    ) -> Outcome:
        """Send `request` under `key` and say what the answer means (`ProviderAdapter`)."""
        headers = self._credentials()
        if self._profile.keys is not None:
            headers.append((self._profile.keys.name, key.value))
        wanted = WantedEffect.of(request, key)
        return await self._sender.perform(
            request, headers, last_check, lambda answer: read_answer(answer, wanted)
        )

    async def look_up(self, request: EffectRequest, key: DownstreamKey) -> Finding:
        """Ask what became of the effect of `request` (`ProviderAdapter`); one GET, never paged.

        By key where the profile honours keys; else by reference. What is to be cancelled is asked for itself.
        An effect older than the operation (R15) is the caller's to refuse: the time is not known here, but
        `created_at` is in the result.
        """
        lookup, wanted = self._profile.lookup, WantedEffect.of(request, key)
        if lookup is None or wanted is None:
            return Refused("no-look-up", "This effect cannot be looked up.")
        if wanted.target is not None:
            path = f"{wanted.collection}/{wanted.target}"
        elif lookup.by == "key":
            path = f"{wanted.collection}?{urlencode({'idempotency_key': key.value})}"
        else:
            reference = request.lookup_reference or wanted.tag
            path = f"{wanted.collection}?{urlencode({'reference': reference})}"
        answer = await self._sender.ask(path, self._credentials())
        if isinstance(answer, NoAnswer):
            return Unavailable(answer.code, answer.detail)
        if wanted.target is not None:
            return read_target(answer, wanted)
        return read_list(answer, wanted, exact=lookup.by == "key")

    async def probe(self) -> str | None:
        """None where a look-up for nothing is answered, else one sentence that says why not."""
        answer = await self._sender.ask(
            "/v1/charges?reference=fencepost-probe", self._credentials()
        )
        if isinstance(answer, NoAnswer):
            return f"{self._profile.name} does not answer: {answer.code}."
        trouble = look_up_trouble(answer)
        if isinstance(trouble, Refused | Unavailable):
            return f"{self._profile.name} answers {answer.status} ({trouble.code})."
        return None

    async def close(self) -> None:
        """Close every connection. Calls under way end with an error."""
        await self._sender.close()

    def _credentials(self) -> list[tuple[str, str]]:
        """Added at every send, never part of a stored request."""
        if self._api_key is None:
            return []
        return [("Authorization", f"Bearer {self._api_key.get_secret_value()}")]


def _open(options: Any) -> PaymentsAdapter:
    return PaymentsAdapter(options, payments_profile(options))


provider = ProviderPlugin(
    name="payments", title="Simulated payment provider", options=PaymentsOptions, open=_open
)
