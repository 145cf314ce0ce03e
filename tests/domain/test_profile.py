"""From a profile follow the class, the deadlines, the fit of keys, and what every answer means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import ConfigurationError
from app.domain.outcome import NotApplied, Rejected, Succeeded, Unknown
from app.domain.profile import (
    CAREFUL_MEMORY_SECONDS,
    KeyRules,
    LookupRules,
    Meaning,
    ProviderAnswer,
    ProviderClass,
    ProviderProfile,
    answers,
)
from app.domain.verdict import RejectionRules

KEYS = KeyRules("Idempotency-Key", memory_seconds=86_400.0, stores_rejections=True)


def profile(**changes: Any) -> ProviderProfile:
    facts: dict[str, Any] = {
        "name": "example",
        "pinned_on": "2026-12-01",
        "answers": (answers(200, 299, mean=Meaning.SUCCESS),),
    }
    return ProviderProfile(**(facts | changes))


@pytest.mark.parametrize(
    ("keys", "lookup", "expected"),
    [
        (KEYS, None, ProviderClass.HONOURS_KEYS),
        (KEYS, LookupRules("key"), ProviderClass.HONOURS_KEYS),
        (None, LookupRules("reference"), ProviderClass.LOOKED_UP),
        (None, None, ProviderClass.NEITHER),
    ],
)
def test_the_class_follows_from_keys_and_look_up(
    keys: KeyRules | None, lookup: LookupRules | None, expected: ProviderClass
) -> None:
    assert profile(keys=keys, lookup=lookup).provider_class is expected


def test_the_resend_window_is_memory_minus_stall_and_delivery() -> None:
    given_ = profile(keys=KEYS, timeout_seconds=5.0, stall_seconds=60.0)
    assert given_.in_transit_seconds == 60.0 + 5.0 + 60.0
    assert given_.resend_seconds == 86_400.0 - 125.0
    assert profile(keys=KEYS, stall_seconds=1.0, delivery_seconds=2.0).resend_seconds == 86_397.0
    assert profile().resend_seconds == 0.0


def test_an_unpublished_memory_takes_the_careful_value() -> None:
    unpublished = profile(keys=KeyRules("X-Key"), timeout_seconds=10.0)
    assert unpublished.resend_seconds == CAREFUL_MEMORY_SECONDS - 130.0


def test_the_lag_is_the_look_ups() -> None:
    assert profile(lookup=LookupRules("reference", lag_seconds=3.0)).lag_seconds == 3.0
    assert profile().lag_seconds == 0.0


def test_rejection_rules_need_keys() -> None:
    assert profile(keys=KEYS).rejection_rules == RejectionRules(True, True)
    assert profile().rejection_rules == RejectionRules(False, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"timeout_seconds": 0.0},
        {"timeout_seconds": float("nan")},
        {"send_window_seconds": -1.0},
        {"stall_seconds": -1.0},
        {"delivery_seconds": -1.0},
        {"concurrency": 0},
        {"keys": KeyRules("K", memory_seconds=30.0)},
        {"keys": KeyRules("K", memory_seconds=150.0), "timeout_seconds": 30.0},
    ],
)
def test_what_cannot_hold_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="provider example"):
        profile(**changes)


@pytest.mark.parametrize(
    ("rules", "fits"),
    [
        (KeyRules("K"), True),
        (KeyRules("K", max_length=36), True),
        (KeyRules("K", max_length=35), False),
        (KeyRules("K", min_length=36), True),
        (KeyRules("K", min_length=37), False),
        (KeyRules("K", charset="[a-z0-9_ -]"), True),
        (KeyRules("K", charset="[0-9]"), False),
        (KeyRules("K", charset="[a-z0-9]"), False),
    ],
)
def test_whether_a_derived_key_fits(rules: KeyRules, fits: bool) -> None:
    refusal = rules.refusal("1b4e28ba-2fa1-41d2-883f-0016d3cca427")
    assert (refusal is None) is fits


RULES = (
    answers(500, 599, mean=Meaning.BURNED, replayed=True),
    answers(200, 299, mean=Meaning.SUCCESS),
    answers(402, mean=Meaning.REJECTION, codes=("card_declined",)),
    answers(422, mean=Meaning.REQUEST_INVALID),
    answers(401, mean=Meaning.CREDENTIALS),
    answers(429, mean=Meaning.BEFORE_KEY),
    answers(409, mean=Meaning.IN_FLIGHT),
    answers(400, mean=Meaning.KEY_MISMATCH, codes=("reused",)),
    answers(400, mean=Meaning.REJECTION),
)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (
            ProviderAnswer(201, reference="ch_1", result={"a": 1}, provider_request_id="r"),
            Succeeded("ch_1", {"a": 1}, "r"),
        ),
        (ProviderAnswer(200, readable=False), Unknown("unreadable-answer")),
        (ProviderAnswer(402, "card_declined", "No."), Rejected("card_declined", "No.")),
        (ProviderAnswer(402, "card_declined", readable=False), Unknown("unreadable-answer")),
        (ProviderAnswer(402, "other"), Unknown("other")),
        (ProviderAnswer(402), Unknown("http-402")),
        (ProviderAnswer(422, "bad"), NotApplied("bad", final=True)),
        (ProviderAnswer(422, readable=False), Unknown("unreadable-answer")),
        (ProviderAnswer(401, readable=False), NotApplied("http-401")),
        (
            ProviderAnswer(429, retry_after_seconds=3.0, provider_request_id="r"),
            NotApplied("http-429", retry_after_seconds=3.0, provider_request_id="r"),
        ),
        (
            ProviderAnswer(409, retry_after_seconds=3.0),
            Unknown("http-409", retry_after_seconds=3.0),
        ),
        (ProviderAnswer(400, "reused"), Unknown("reused")),
        (ProviderAnswer(400, "anything"), Rejected("anything")),
        (ProviderAnswer(500, "oops"), Unknown("oops")),
        (ProviderAnswer(500, "oops", replayed=True), Unknown("oops", burned=True)),
        (ProviderAnswer(503), Unknown("http-503")),
        (ProviderAnswer(302), Unknown("http-302")),
    ],
)
def test_what_an_answer_means(answer: ProviderAnswer, outcome: object) -> None:
    assert profile(answers=RULES).classify(answer) == outcome


def test_a_rule_for_unmarked_answers_only() -> None:
    first_only = profile(answers=(answers(500, mean=Meaning.BEFORE_KEY, replayed=False),))
    assert first_only.meaning_of(500, None) is Meaning.BEFORE_KEY
    assert first_only.meaning_of(500, None, True) is Meaning.UNKNOWN


@given(st.integers(100, 599), st.none() | st.text(max_size=5), st.booleans(), st.booleans())
def test_a_profile_that_says_nothing_knows_nothing(
    status: int, code: str | None, readable: bool, replayed: bool
) -> None:
    answer = ProviderAnswer(status, code, readable=readable, replayed=replayed)
    assert isinstance(profile(answers=()).classify(answer), Unknown)
