"""Reading a request before its key is bound (CONTRACT.md 2, 7, 18; CASES.md B18, B20, B21)."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from app.domain.errors import MalformedBody
from app.domain.fields import STRICT_INPUT, SafeText, WholeNumber
from app.domain.identity import fingerprint
from app.domain.plan import OperationType
from app.domain.policy import TypePolicy
from app.domain.request import (
    MAX_DEPTH,
    MAX_FIELD_ERRORS,
    MAX_POINTER,
    FieldError,
    ReadRequest,
    parse_json,
    read_request,
)
from app.operations.payments_charge import operation_type

# -- JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a":1,"b":{"x":1,"y":2}}', {"a": 1, "b": {"x": 1, "y": 2}}),
        (b'\xef\xbb\xbf {"a" : 1 }\n', {"a": 1}),
        (b'{"a":"\\u00e9\\/"}', {"a": "é/"}),
        ('{"a":"é/"}'.encode(), {"a": "é/"}),
        (b'{"a":"\\\\u0000"}', {"a": "\\u0000"}),  # six characters, not a NUL (B21 c)
        (b"[]", []),
        (b"0", 0),
        (b"-0.0", -0.0),
        (b"1e2", 100.0),
        (b"null", None),
    ],
)
def test_one_json_text(body: bytes, value: object) -> None:
    assert parse_json(body) == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}{}",
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":01}',
        b"\xff\xfe{\x00}\x00",
        b'{"a":"\xff"}',
        b'{"a":1,"a":1}',
        b'{"a":1,"\\u0061":2}',  # the same name in other words
        b'{"x":[{"amount":1,"amount":2}]}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b"[" * 100_000,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_no_json_text_here(body: bytes) -> None:
    with pytest.raises(MalformedBody) as refused:
        parse_json(body)
    assert len(refused.value.detail) < 120


def test_what_is_wrong_is_said_without_repeating_the_body() -> None:
    """CASES.md B51: a refused body may hold a secret."""
    for body in (b'{"s3cret":1,"s3cret":2}', b'"s3cret', b'{"a":"s3cret\xff"}'):
        with pytest.raises(MalformedBody) as refused:
            parse_json(body)
        assert "s3cret" not in str(refused.value)


def test_just_deep_enough() -> None:
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    wide = b"[" + b",".join([b"[]"] * 1000) + b"]"
    assert parse_json(wide) == [[]] * 1000


def test_an_endless_number_takes_no_time() -> None:
    """Python's own conversion of long integers takes quadratic time, and has a limit that raises."""
    value = parse_json(b'{"a":' + b"9" * 100_000 + b"}")
    assert isinstance(value, dict)
    assert value["a"] > 2**53


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_every_json_text_is_read_as_what_it_says(value: object) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=1).encode()) == value


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    with suppress(MalformedBody):
        parse_json(body)


# -- members ---------------------------------------------------------------------------------------------


class Input(BaseModel):
    model_config = STRICT_INPUT

    amount: WholeNumber
    note: SafeText | None = None
    tags: list[SafeText] = []


TYPE = OperationType(
    name="test.one",
    version=1,
    title="A test",
    input=Input,
    result=BaseModel,
    steps=operation_type.steps,
    build_result=lambda context: {},
    policy=TypePolicy(priority=2),
    semantic_headers=("x-account",),
)


def read(
    headers: dict[str, str] | None = None, **members: Any
) -> ReadRequest | tuple[FieldError, ...]:
    body = {"type": "test.one", "input": {"amount": 1}, **members}
    return read_request(TYPE, body, headers or {})


def good(headers: dict[str, str] | None = None, **members: Any) -> ReadRequest:
    told = read(headers, **members)
    assert isinstance(told, ReadRequest), told
    return told


def wrong(**members: Any) -> dict[str, str]:
    """What is wrong, by pointer: the code."""
    told = read(**members)
    assert isinstance(told, tuple), told
    return {error.pointer: error.code for error in told}


def test_a_request_that_holds() -> None:
    told = good(metadata={"a": "b"}, priority=0, not_before="2026-01-01T01:00:00+01:00")
    assert told.input == b'{"amount":1,"tags":[]}'
    assert (told.metadata, told.priority) == ({"a": "b"}, 0)
    assert told.not_before is not None
    assert told.not_before.isoformat() == "2026-01-01T00:00:00+00:00"
    assert good().priority == 2


@pytest.mark.parametrize(
    ("members", "pointer"),
    [
        ({"extra": 1}, "/extra"),
        ({"input": 1}, "/input"),
        ({"input": {}}, "/input/amount"),
        ({"input": {"amount": "1"}}, "/input/amount"),
        ({"input": {"amount": True}}, "/input/amount"),
        ({"input": {"amount": 1.5}}, "/input/amount"),
        ({"input": {"amount": 2**53}}, "/input/amount"),
        ({"input": {"amount": -(2**53)}}, "/input/amount"),
        ({"input": {"amount": 1, "a/b~c": 1}}, "/input/a~1b~0c"),
        ({"input": {"amount": 1, "tags": ["ok", 1]}}, "/input/tags/1"),
        ({"input": {"amount": 1, "note": "a\0b"}}, "/input/note"),
        ({"input": {"amount": 1, "note": "a\ud800b"}}, "/input/note"),
        ({"input": {"amount": 1, "tags": ["ok", "\0"]}}, "/input/tags/1"),
        ({"input": {"amount": 1, "a\0": 1}}, "/input"),
        ({"metadata": {"a": 1}}, "/metadata/a"),
        ({"metadata": {"": "b"}}, "/metadata/"),
        ({"metadata": {"a": "x" * 1025}}, "/metadata/a"),
        ({"metadata": {str(n): "x" for n in range(21)}}, "/metadata"),
        ({"metadata": {str(n): "x" * 1000 for n in range(5)}}, "/metadata"),
        ({"metadata": {"a\0": "b"}}, "/metadata"),
        ({"priority": 4}, "/priority"),
        ({"priority": -1}, "/priority"),
        ({"priority": True}, "/priority"),
        ({"priority": "1"}, "/priority"),
        ({"deadline": "2026-01-01T00:00:00"}, "/deadline"),
        ({"deadline": "tomorrow"}, "/deadline"),
        ({"deadline": 1767225600}, "/deadline"),
        ({"deadline": "2026-13-01T00:00:00Z"}, "/deadline"),
        ({"not_before": "0001-01-01T00:00:00+01:00"}, "/not_before"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_a_request_that_does_not_hold(members: dict[str, Any], pointer: str) -> None:
    assert set(wrong(**members)) == {pointer}


def test_everything_wrong_is_said_at_once() -> None:
    assert set(wrong(input={"amount": "x", "note": 1, "tags": [1, 2]})) == {
        "/input/amount",
        "/input/note",
        "/input/tags/0",
        "/input/tags/1",
    }


def test_an_answer_need_not_be_as_long_as_what_it_refuses() -> None:
    told = read(input={"amount": 1, "tags": [1] * 5000})
    assert isinstance(told, tuple)
    assert len(told) == MAX_FIELD_ERRORS
    told = read(input={"amount": 1, "tags": ["\0"] * 5000})
    assert isinstance(told, tuple)
    assert len(told) == MAX_FIELD_ERRORS
    [pointer] = wrong(input={"amount": 1, "x" * 10_000: 1})
    assert len(pointer) == MAX_POINTER


# -- meaning ---------------------------------------------------------------------------------------------


def meaning(headers: dict[str, str] | None = None, **members: Any) -> bytes:
    return fingerprint(good(headers, **members).meaning).digest


@pytest.mark.parametrize(
    "members",
    [
        {"input": {"amount": 1.0}},
        {"input": {"amount": 1, "note": None}},
        {"input": {"amount": 1, "tags": []}},
        {"input": {"tags": [], "amount": 1}},
        {"priority": 2},
        {"priority": None},
        {"metadata": {}},
        {"deadline": None},
    ],
    ids=str,
)
def test_the_same_in_other_words(members: dict[str, Any]) -> None:
    """CONTRACT.md 7: order, `1.0` and members that equal their default make no difference."""
    assert meaning(**members) == meaning()


@pytest.mark.parametrize(
    "members",
    [
        {"input": {"amount": 2}},
        {"input": {"amount": 1, "note": ""}},
        {"input": {"amount": 1, "tags": ["a"]}},
        {"priority": 1},
        {"metadata": {"a": "b"}},
        {"deadline": "2026-01-01T00:00:00Z"},
        {"not_before": "2026-01-01T00:00:00Z"},
    ],
    ids=str,
)
def test_something_else(members: dict[str, Any]) -> None:
    assert meaning(**members) != meaning()


def test_order_within_an_array_and_forms_of_a_letter_matter() -> None:
    """B18, B20: NFC and NFD are a mismatch, and both are kept as they came."""
    one = {"input": {"amount": 1, "tags": ["a", "b"]}}
    other = {"input": {"amount": 1, "tags": ["b", "a"]}}
    assert meaning(**one) != meaning(**other)
    composed = {"input": {"amount": 1, "note": "Jos\u00e9"}}
    apart = {"input": {"amount": 1, "note": "Jose\u0301"}}
    assert meaning(**composed) != meaning(**apart)
    assert orjson.loads(good(**apart).input)["note"] == "Jose\u0301"


def test_one_instant_in_two_spellings() -> None:
    assert meaning(deadline="2026-01-01T00:00:00Z") == meaning(
        deadline="2026-01-01T02:00:00.000+02:00"
    )


def test_only_the_types_semantic_headers_count() -> None:
    assert meaning({"x-account": "a"}) != meaning({"x-account": "b"}) != meaning()
    assert meaning({"x-other": "a", "authorization": "s3cret"}) == meaning()
    assert good({"x-account": "a", "x-other": "b"}).semantic_headers == {"x-account": "a"}


def test_what_is_accepted_is_what_is_stored_and_meant() -> None:
    """CONTRACT.md 7's last words: reading the stored input again gives the same request."""
    told = good(input={"amount": 1.0, "note": "\u2028 é \\u0000", "tags": ["", "x"]})
    again = good(input=orjson.loads(told.input))
    assert (again.input, again.meaning) == (told.input, told.meaning)
