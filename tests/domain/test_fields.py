"""What operation inputs accept is what is stored and forwarded (CONTRACT.md 7, CASES.md B21)."""

from __future__ import annotations

import json
from typing import Annotated

import pytest
from pydantic import BaseModel, Field, ValidationError

from app.domain.fields import (
    MAX_EXACT_INTEGER,
    STRICT_INPUT,
    AcceptIntegral,
    MinorUnits,
    SafeText,
    WholeNumber,
)


class Sample(BaseModel):
    model_config = STRICT_INPUT

    amount: MinorUnits | None = None
    number: WholeNumber | None = None
    few: Annotated[int, Field(strict=True, ge=1, le=20), AcceptIntegral] | None = None
    text: Annotated[SafeText, Field(min_length=1, max_length=10)] | None = None


def errors(**members: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Sample.model_validate(members)
    return [error["type"] for error in caught.value.errors(include_input=False)]


@pytest.mark.parametrize("given", [1, 1.0, MAX_EXACT_INTEGER, float(MAX_EXACT_INTEGER)])
def test_an_integral_number_is_one_integer(given: float) -> None:
    read = Sample.model_validate({"amount": given}).amount
    assert read == int(given)
    assert type(read) is int
    assert json.dumps(read) == str(int(given))


@pytest.mark.parametrize(
    "given",
    [
        *(0, -1, -0.0, 0.5, MAX_EXACT_INTEGER + 1, float(2**53), 1e300, 10**400),
        *(float("nan"), float("inf"), True, False, "1", "1.0", b"1", [1]),
    ],
)
def test_everything_else_is_no_amount(given: object) -> None:
    assert errors(amount=given)


def test_whole_numbers_have_a_sign_and_both_bounds() -> None:
    assert Sample(number=-MAX_EXACT_INTEGER).number == -MAX_EXACT_INTEGER
    assert Sample.model_validate({"number": -3.0}).number == -3
    assert errors(number=-MAX_EXACT_INTEGER - 1) == ["greater_than_equal"]
    assert errors(number=True) == ["int_type"]


def test_bounds_of_ones_own_hold_for_both_forms() -> None:
    assert Sample.model_validate({"few": 20.0}).few == 20
    assert errors(few=21.0) == ["less_than_equal"]


def test_the_published_schema_shows_the_bounds() -> None:
    properties = Sample.model_json_schema()["properties"]
    assert properties["amount"]["anyOf"][0] == {
        "type": "integer",
        "minimum": 1,
        "maximum": MAX_EXACT_INTEGER,
    }
    assert properties["few"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 20}
    assert properties["text"]["anyOf"][0] == {"type": "string", "minLength": 1, "maxLength": 10}


@pytest.mark.parametrize("text", ["a\\u0000", "é", "e\u0301", " blank ", "\x1b", "\U0001f600"])
def test_storable_text_is_kept_as_it_is(text: str) -> None:
    assert Sample(text=text).text == text


@pytest.mark.parametrize("text", ["a\x00b", "\x00", "\ud800", "a\udfffb"])
def test_what_cannot_be_stored_is_refused(text: str) -> None:
    kinds = errors(text=text)
    assert kinds in (["text_not_storable"], ["string_unicode"])


@pytest.mark.parametrize("given", [1, None, b"bytes", ["a"], "", "x" * 11])
def test_text_is_strict_and_bounded(given: object) -> None:
    if given is None:
        assert Sample.model_validate({"text": None}).text is None
    else:
        assert len(errors(text=given)) == 1


def test_nothing_unknown_and_no_change_afterwards() -> None:
    assert errors(other=1) == ["extra_forbidden"]
    with pytest.raises(ValidationError):
        Sample().amount = 3
