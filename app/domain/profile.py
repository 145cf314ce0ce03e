"""Provider profiles: what a provider does with keys, answers and look-ups, as data.

From a profile follow, by this one piece of code: whether a key fits, the resend deadline (R3), when an
attempt is settled (R2), the classification of answers, and the class that decides what may follow an
`Unknown`. Facts and their sources are in the profile's module; unpublished ones take the careful value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from app.domain.errors import ConfigurationError
from app.domain.outcome import JsonObject, NotApplied, Outcome, Rejected, Succeeded, Unknown
from app.domain.restraint import RestraintRules
from app.domain.verdict import RejectionRules

CAREFUL_MEMORY_SECONDS = 1800.0
"""Assumed where a provider does not publish how long it remembers a key (PROVIDERS.md: 30 minutes)."""

DEFAULT_STALL_SECONDS = 60.0
"""R2: from the last clock check to the bytes leaving."""


class ProviderClass(StrEnum):
    """What can be done after an `Unknown` (PROTOCOL.md, 'What holds, and under what')."""

    HONOURS_KEYS = "honours_keys"
    LOOKED_UP = "looked_up"
    NEITHER = "neither"


class Meaning(StrEnum):
    """What one of a provider's answers means."""

    SUCCESS = "success"
    REJECTION = "rejection"
    """A definite refusal that speaks for the key (R5)."""
    BEFORE_KEY = "before_key"
    """Given before the key was read: this attempt was not applied; try again later."""
    REQUEST_INVALID = "request_invalid"
    """Given before the key was read, about the request itself; no retry can change it."""
    CREDENTIALS = "credentials"
    """401, 403: the operator's fault, not the caller's; not applied, tried again, alerted on."""
    IN_FLIGHT = "in_flight"
    """The first call with this key is still under way: unknown."""
    KEY_MISMATCH = "key_mismatch"
    """The key was used with another body: unknown."""
    BURNED = "burned"
    """A stored failure that executed nothing makes the key useless: unknown, burned (R18)."""
    UNKNOWN = "unknown"


_DEFINITE = frozenset({Meaning.SUCCESS, Meaning.REJECTION, Meaning.REQUEST_INVALID})
"""What can end a step, and therefore needs a body that can be read."""


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """Which answers mean what: a status range, and where given the provider's error codes.

    `replayed`: only answers that the provider marks (True), or does not mark (False), as stored; None: both.
    """

    statuses: range
    meaning: Meaning
    codes: frozenset[str] = frozenset()
    replayed: bool | None = None

    def covers(self, status: int, code: str | None, replayed: bool = False) -> bool:
        """Whether this rule speaks about an answer with `status` and the provider's error `code`."""
        return (
            status in self.statuses
            and (not self.codes or (code or "") in self.codes)
            and self.replayed in (None, replayed)
        )


def answers(
    first: int,
    last: int | None = None,
    *,
    mean: Meaning,
    codes: tuple[str, ...] = (),
    replayed: bool | None = None,
) -> AnswerRule:
    """A rule for the statuses `first` to `last` (inclusive), read aloud in a profile."""
    end = (first if last is None else last) + 1
    return AnswerRule(range(first, end), mean, frozenset(codes), replayed)


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """One HTTP answer as an adapter read it: `code` is the provider's own, `result` a JSON object.

    `readable` is False when the body is not what the provider documents (truncated, not JSON, too large).
    `replayed`: the provider marks it as the stored answer to an earlier call with the key.
    """

    status: int
    code: str | None = None
    detail: str | None = None
    reference: str | None = None
    result: JsonObject | None = None
    retry_after_seconds: float | None = None
    provider_request_id: str | None = None
    readable: bool = True
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class KeyRules:
    """Where a key goes, what it may look like, and how long it is remembered (`None`: unpublished)."""

    name: str
    placement: Literal["header", "body"] = "header"
    min_length: int = 1
    max_length: int = 255
    charset: str = "[ -~]"
    scope: str = "account"
    memory_seconds: float | None = None
    compares_bodies: bool = True
    stores_rejections: bool = False
    replays_success: bool = True

    @property
    def remembered_seconds(self) -> float:
        """Seconds a key is relied on, from the first send: the published memory, or the careful value."""
        return CAREFUL_MEMORY_SECONDS if self.memory_seconds is None else self.memory_seconds

    def refusal(self, key: str) -> str | None:
        """Why this provider cannot carry `key`, or None where it can."""
        if not self.min_length <= len(key) <= self.max_length:
            return f"keys have {self.min_length} to {self.max_length} characters, not {len(key)}"
        if re.fullmatch(f"(?:{self.charset})*", key) is None:
            return f"keys are made of {self.charset}"
        return None


@dataclass(frozen=True, slots=True)
class LookupRules:
    """How the truth is learned: by the key, or by the reference that was sent along."""

    by: Literal["key", "reference"]
    lag_seconds: float = 0.0
    absent_trusted: bool = True


@dataclass(frozen=True, slots=True)
class ProviderProfile:
    """Everything Fencepost's decisions need to know about one provider. Times are in seconds.

    `send_window_seconds` (R1, S) from begin to the last clock check; `stall_seconds` (G) from there to the
    bytes leaving; `delivery_seconds` (D) from there to the effect existing, by default the call's timeout
    plus 60 s. `answers` is read in order, the first match wins; what no rule covers is unknown.
    """

    name: str
    pinned_on: str
    answers: tuple[AnswerRule, ...]
    timeout_seconds: float = 30.0
    keys: KeyRules | None = None
    lookup: LookupRules | None = None
    cancels_by: Literal["key", "reference"] | None = None
    send_window_seconds: float = 15.0
    stall_seconds: float = DEFAULT_STALL_SECONDS
    delivery_seconds: float | None = None
    concurrency: int = 64
    restraint: RestraintRules = field(default_factory=RestraintRules)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("timeout_seconds", "send_window_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"provider {self.name}: {name} must be above 0.")
        if self.stall_seconds < 0 or self.in_transit_seconds < self.stall_seconds:
            raise ConfigurationError(f"provider {self.name}: stall and delivery must be 0 or more.")
        if self.concurrency < 1:
            raise ConfigurationError(f"provider {self.name}: concurrency must be at least 1.")
        if self.keys is not None and self.resend_seconds <= 0:
            raise ConfigurationError(
                f"provider {self.name}: a key's memory of {self.keys.remembered_seconds:g} s does not "
                f"outlast stall and delivery ({self.in_transit_seconds:g} s), so no re-send could ever be "
                "safe; declare the provider without keys."
            )

    @property
    def provider_class(self) -> ProviderClass:
        """Which of the three classes of PROTOCOL.md this provider belongs to."""
        if self.keys is not None:
            return ProviderClass.HONOURS_KEYS
        return ProviderClass.NEITHER if self.lookup is None else ProviderClass.LOOKED_UP

    @property
    def in_transit_seconds(self) -> float:
        """Stall plus delivery: how long after `send_by` an effect may still come into being (R2)."""
        delivery = self.delivery_seconds
        return self.stall_seconds + (self.timeout_seconds + 60.0 if delivery is None else delivery)

    @property
    def lag_seconds(self) -> float:
        """How far the look-up runs behind the effect; 0 where there is none."""
        return 0.0 if self.lookup is None else self.lookup.lag_seconds

    @property
    def resend_seconds(self) -> float:
        """R3: from the first begin to the resend deadline: memory minus (stall + delivery)."""
        return 0.0 if self.keys is None else self.keys.remembered_seconds - self.in_transit_seconds

    @property
    def rejection_rules(self) -> RejectionRules:
        """What R4 and R5 need to know."""
        return RejectionRules(
            stores_rejections=self.keys is not None and self.keys.stores_rejections,
            replays_success=self.keys is not None and self.keys.replays_success,
            absence_counts=self.lookup is not None and self.lookup.absent_trusted,
            lag_seconds=self.lag_seconds,
        )

    def meaning_of(self, status: int, code: str | None, replayed: bool = False) -> Meaning:
        """What an answer means; `UNKNOWN` where the profile says nothing."""
        for rule in self.answers:
            if rule.covers(status, code, replayed):
                return rule.meaning
        return Meaning.UNKNOWN

    def classify(self, answer: ProviderAnswer) -> Outcome:
        """The outcome of an attempt that got `answer`; an unreadable body proves nothing."""
        meaning = self.meaning_of(answer.status, answer.code, answer.replayed)
        code = answer.code or f"http-{answer.status}"
        request_id = answer.provider_request_id
        if not answer.readable and meaning in _DEFINITE:
            return Unknown(
                "unreadable-answer",
                answer.detail,
                answer.retry_after_seconds,
                provider_request_id=request_id,
            )
        match meaning:
            case Meaning.SUCCESS:
                return Succeeded(answer.reference, answer.result, request_id)
            case Meaning.REJECTION:
                return Rejected(code, answer.detail, request_id)
            case Meaning.BEFORE_KEY | Meaning.CREDENTIALS:
                return NotApplied(
                    code, answer.detail, answer.retry_after_seconds, provider_request_id=request_id
                )
            case Meaning.REQUEST_INVALID:
                return NotApplied(
                    code,
                    answer.detail,
                    answer.retry_after_seconds,
                    final=True,
                    provider_request_id=request_id,
                )
            case Meaning.BURNED:
                return Unknown(
                    code,
                    answer.detail,
                    answer.retry_after_seconds,
                    burned=True,
                    provider_request_id=request_id,
                )
            case Meaning.IN_FLIGHT | Meaning.KEY_MISMATCH | Meaning.UNKNOWN:
                return Unknown(
                    code, answer.detail, answer.retry_after_seconds, provider_request_id=request_id
                )
