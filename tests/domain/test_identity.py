"""Keys, scopes, ids, fingerprints, derived keys (CONTRACT.md 1, 6, 7; PROTOCOL.md R15; B16, B20)."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from uuid import UUID

import pytest

from app.domain.errors import IdempotencyKeyMalformed, IdempotencyKeyMissing, InvalidInput
from app.domain.identity import (
    Direction,
    DownstreamKey,
    IdempotencyKey,
    OperationId,
    Scope,
    fingerprint,
    parse_idempotency_key,
)

GOOD = {
    b"abc-1": "abc-1",
    b'"abc-1"': "abc-1",
    b" \tabc-1\t ": "abc-1",
    b"ABC-1": "ABC-1",
    b'"a,b;c"': "a,b;c",
    rb'"a\"b\\c"': 'a"b\\c',
    b"%C3%A9": "%C3%A9",
    b"x" * 255: "x" * 255,
    b'"' + b"x" * 255 + b'"': "x" * 255,
    b"!~": "!~",
}
BAD = [
    b"",
    b" ",
    b"\t",
    b'""',
    b'" "',
    b'"abc',
    b'abc"',
    b'"a" "b"',
    b'"abc";p=1',
    b"abc;p=1",
    b"K, K",
    b"K,L",
    b"a b",
    b'"a b"',
    b"\xc3\xa9",
    b"a\x00b",
    b"a\x7f",
    rb'"a\b"',
    b"x" * 256,
]


@pytest.mark.parametrize(("line", "value"), GOOD.items(), ids=repr)
def test_keys_that_hold(line: bytes, value: str) -> None:
    assert parse_idempotency_key([line]) == IdempotencyKey(value)


@pytest.mark.parametrize("line", BAD, ids=repr)
def test_keys_that_do_not(line: bytes) -> None:
    with pytest.raises(IdempotencyKeyMalformed):
        parse_idempotency_key([line])


def test_none_and_several() -> None:
    with pytest.raises(IdempotencyKeyMissing):
        parse_idempotency_key([])
    with pytest.raises(IdempotencyKeyMalformed):
        parse_idempotency_key([b"K", b"K"])


def test_a_key_shows_no_key() -> None:
    assert "secret" not in repr(IdempotencyKey("secret"))


@pytest.mark.parametrize("bucket", range(256))
def test_the_id_carries_the_bucket(bucket: int) -> None:
    id = OperationId.new(bucket)
    assert id.bucket == bucket
    assert id.uuid.version == 7
    assert OperationId.parse(str(id)) == id


def test_ids_are_ordered_by_time() -> None:
    ids = [OperationId.new(255 - number).uuid.hex[:12] for number in range(200)]
    assert ids == sorted(ids)


@pytest.mark.parametrize(
    "text", ["", "op_", "op_x", "op_01A22F05-E164-76BD-9940-3B0079B63CFF", str(UUID(int=0))]
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(InvalidInput):
        OperationId.parse(text)


def test_the_bucket_is_the_first_byte_of_the_scope() -> None:
    """DESIGN.md, 5, computed apart from the code."""
    expected = hashlib.sha256(b"acme\0payments.charge\0k").digest()[0]
    assert Scope("acme", "payments.charge", IdempotencyKey("k")).bucket == expected


PARTS: dict[str, Any] = {
    "installation": "prod-1",
    "tenant": "acme",
    "type": "payments.charge",
    "key_digest": hashlib.sha256(b"k").digest(),
    "step": "charge",
    "item": 0,
    "direction": Direction.FORWARD,
}


def test_the_derived_key_is_what_r15_says() -> None:
    """Computed apart from the code: length-prefixed parts, SHA-256, as a v4-shaped UUID."""
    parts = [b"prod-1", b"acme", b"payments.charge", hashlib.sha256(b"k").digest(), b"charge"]
    parts += [b"0", b"forward", b"0"]
    text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    raw = bytearray(hashlib.sha256(text).digest()[:16])
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    derived = DownstreamKey.derive(**PARTS).value
    assert derived == str(UUID(bytes=bytes(raw)))
    assert len(derived) == 36


@pytest.mark.parametrize(
    "change",
    [
        {"installation": "prod-2"},
        {"tenant": "bold"},
        {"type": "payments.refund"},
        {"key_digest": hashlib.sha256(b"l").digest()},
        {"step": "ship"},
        {"item": 1},
        {"direction": Direction.COMPENSATION},
        {"ordinal": 1},
        {"tenant": "acmepayments", "type": ".charge"},
    ],
    ids=str,
)
def test_each_part_matters_and_none_runs_into_the_next(change: dict[str, Any]) -> None:
    assert DownstreamKey.derive(**PARTS) != DownstreamKey.derive(**{**PARTS, **change})


def test_the_fingerprint_is_rfc_8785_and_sha_256() -> None:
    """One example by hand: members sorted, no blanks, numbers in their shortest form."""
    meaning = {"type": "t", "input": {"b": 1.0, "a": "é\n"}}
    expected = hashlib.sha256('{"input":{"a":"é\\n","b":1},"type":"t"}'.encode()).digest()
    assert fingerprint(meaning).digest == expected


def test_the_same_meaning_in_other_words() -> None:
    one = json.loads('{"a": 1, "b": {"x": 1, "y": "\\u00e9\\/"}}')
    other = json.loads('{"b":{"y":"é/","x":1.0},"a":1}')
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"n": "Jos\u00e9"}, {"n": "Jose\u0301"}),
        ({"n": 1}, {"n": "1"}),
        ({"n": [1, 2]}, {"n": [2, 1]}),
    ],
)
def test_other_meanings(one: dict[str, Any], other: dict[str, Any]) -> None:
    """CONTRACT.md 7: NFC and NFD, number and text, and the order of an array are differences."""
    assert fingerprint(one) != fingerprint(other)


def test_an_algorithm_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidInput):
        fingerprint({}, version=99)
