"""Idempotency-Key header lines (CONTRACT 1; CASES.md B16, K11)."""

from __future__ import annotations

import pytest

from tests.support.api import Api, charge, count

pytestmark = pytest.mark.anyio

MALFORMED = {
    "two equal lines": [b"abc-1", b"abc-1"],
    "two other lines": [b"abc-1", b"abc-2"],
    "list": [b"abc-1, abc-1"],
    "list of quoted": [b'"abc-1", "abc-1"'],
    "parameters": [b'"abc-1";p=1'],
    "bare with parameters": [b"abc-1;p=1"],
    "empty": [b""],
    "blanks": [b"   "],
    "tab": [b"\t"],
    "quoted empty": [b'""'],
    "quoted blank": [b'" "'],
    "unbalanced": [b'"abc-1'],
    "unbalanced behind": [b'abc-1"'],
    "space inside": [b"abc 1"],
    "quoted space inside": [b'"abc 1"'],
    "bad escape": [b'"abc\\1"'],
    "non-ASCII": [b"caf\xc3\xa9"],
    "latin-1": [b"caf\xe9"],
    "control": [b"abc\x01"],
    "DEL": [b"abc\x7f"],
    "NUL": [b"abc\x00"],
    "too long": [b"k" * 256],
    "too long when unquoted": [b'"' + b"k" * 256 + b'"'],
}
SAME = {
    "bare": b"abc-1",
    "quoted": b'"abc-1"',
    "blanks around": b"  abc-1\t",
    "blanks around quotes": b' "abc-1" ',
}


def _lines(values: list[bytes]) -> list[tuple[bytes, bytes]]:
    return [(b"Idempotency-Key", value) for value in values]


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed(name: str, shared: Api) -> None:
    """CONTRACT 1, B16: 400, key not bound, no row, never a 500."""
    rows = count(shared.database_url)
    answer = await shared.http.post(
        "/v1/operations", json=charge(), headers=_lines(MALFORMED[name])
    )
    assert answer.status_code == 400
    body = answer.json()
    assert body["code"] == "idempotency-key-malformed"
    assert body["type"] == "/problems/idempotency-key-malformed"
    assert body["key_bound"] is False
    assert count(shared.database_url) == rows


async def test_missing(running: Api, database_url: str) -> None:
    """CONTRACT 1: no key at all."""
    answer = await running.http.post("/v1/operations", json=charge())
    assert answer.status_code == 400
    assert answer.json()["code"] == "idempotency-key-missing"
    assert count(database_url) == 0


async def test_forms_of_one_key(running: Api, database_url: str) -> None:
    """CONTRACT 1, B16: bare and quoted forms of one value are one key."""
    answers = [
        await running.http.post("/v1/operations", json=charge(), headers=_lines([value]))
        for value in SAME.values()
    ]
    assert [answer.status_code for answer in answers] == [202] * len(SAME)
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert count(database_url) == 1


async def test_quoted_list_characters_are_a_key(running: Api) -> None:
    """CONTRACT 1: a comma is no list within quotes, and escapes are undone."""
    answer = await running.http.post(
        "/v1/operations", json=charge(), headers=_lines([b'"a,b;c\\"d"'])
    )
    assert answer.status_code == 202


@pytest.mark.parametrize("key", [b"k", b"k" * 255, b'"' + b"k" * 255 + b'"', b"%C3%A9", b"!~"])
async def test_bounds(key: bytes, shared: Api) -> None:
    """CONTRACT 1: 1 to 255 bytes; a percent form is what it is."""
    answer = await shared.http.post("/v1/operations", json=charge(), headers=_lines([key]))
    assert answer.status_code == 202


async def test_case_counts(running: Api, database_url: str) -> None:
    """CONTRACT 1, B20: `ABC` and `abc` are two keys."""
    first = await running.post(charge(), key="ABC")
    second = await running.post(charge(), key="abc")
    assert first.json()["id"] != second.json()["id"]
    assert count(database_url) == 2
