"""Bodies: what is one request and what is not, what is refused before a key is bound (CONTRACT 2, 7, 19)."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from tests.support.api import Api, charge, count, fresh_key

pytestmark = pytest.mark.anyio

BODY = {
    "type": "payments.charge",
    "input": {
        "amount": 100,
        "currency": "eur",
        "source": "tok_ok",
        "description": "José/1",
    },
    "metadata": {"a": "1", "b": "2"},
}
TEXT = json.dumps(BODY)
JSON = {"Content-Type": "application/json"}


def _reordered() -> bytes:
    members = {name: BODY[name] for name in reversed(BODY)}
    members["input"] = dict(reversed(BODY["input"].items()))  # type: ignore[attr-defined]
    members["metadata"] = dict(reversed(BODY["metadata"].items()))  # type: ignore[attr-defined]
    return json.dumps(members).encode()


SAME: dict[str, tuple[bytes, dict[str, str]]] = {
    "reordered": (_reordered(), JSON),
    "pretty": (json.dumps(BODY, indent=4).encode(), JSON),
    "byte-order mark": (b"\xef\xbb\xbf" + TEXT.encode(), JSON),
    "charset": (TEXT.encode(), {"Content-Type": "application/json; charset=utf-8"}),
    "quoted charset": (TEXT.encode(), {"Content-Type": 'Application/JSON;charset="UTF-8"'}),
    "gzip": (gzip.compress(TEXT.encode()), {**JSON, "Content-Encoding": "gzip"}),
    "gzip in two members": (
        gzip.compress(TEXT[:9].encode()) + gzip.compress(TEXT[9:].encode()),
        {**JSON, "Content-Encoding": "gzip"},
    ),
    "identity": (TEXT.encode(), {**JSON, "Content-Encoding": "identity"}),
    "raw UTF-8": (json.dumps(BODY, ensure_ascii=False).encode(), JSON),
    "escaped slash": (TEXT.replace("/", "\\/").encode(), JSON),
    "escaped letters": (TEXT.replace("tok_ok", "\\u0074ok_ok").encode(), JSON),
    "declared number as 100.0": (TEXT.replace("100", "100.0").encode(), JSON),
    "declared number as 1e2": (TEXT.replace("100", "1e2").encode(), JSON),
    "defaults given": (json.dumps({**BODY, "priority": 2, "not_before": None}).encode(), JSON),
}
OTHER: dict[str, Any] = {
    "amount": {**BODY, "input": {**BODY["input"], "amount": 101}},  # type: ignore[dict-item]
    "decomposed": {**BODY, "input": {**BODY["input"], "description": "Jose\u0301/1"}},  # type: ignore[dict-item]
    "metadata": {**BODY, "metadata": {"a": "1"}},
    "priority": {**BODY, "priority": 0},
    "not_before": {**BODY, "not_before": "2030-01-01T00:00:00Z"},
    "deadline": {**BODY, "deadline": "2030-01-01T00:00:00Z"},
}


async def _send(running: Api, content: bytes, headers: dict[str, str], key: str) -> Any:
    return await running.http.post(
        "/v1/operations", content=content, headers={**headers, "Idempotency-Key": key}
    )


async def test_one_request_in_many_spellings(running: Api, database_url: str) -> None:
    """CONTRACT 7, B18, B20: order, space, escapes, charset and encoding make no difference."""
    first = await _send(running, TEXT.encode(), JSON, "k")
    assert first.status_code == 202
    for name, (content, headers) in SAME.items():
        again = await _send(running, content, headers, "k")
        assert (again.status_code, again.json().get("id")) == (202, first.json()["id"]), name
        assert again.headers["Idempotent-Replayed"] == "true"
    assert count(database_url) == 1


@pytest.mark.parametrize("name", OTHER)
async def test_another_request(name: str, shared: Api) -> None:
    """CONTRACT 5, 7, B20: another meaning under the key is a mismatch; NFC and NFD differ."""
    key = fresh_key()
    first = await _send(shared, TEXT.encode(), JSON, key)
    answer = await shared.post(OTHER[name], key=key)
    assert answer.status_code == 422
    assert answer.json()["code"] == "idempotency-key-reused"
    assert answer.json()["operation"]["id"] == first.json()["id"]


async def test_two_spellings_of_one_instant(running: Api) -> None:
    """CONTRACT 7: `not_before` is a point in time, not its text."""
    first = await running.post({**BODY, "not_before": "2030-01-01T00:00:00Z"}, key="k")
    again = await running.post({**BODY, "not_before": "2030-01-01T02:00:00.000+02:00"}, key="k")
    assert again.json()["id"] == first.json()["id"]


REFUSED: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "member twice": (b'{"type":"payments.charge","type":"x"}', JSON, 400, "malformed-json"),
    "inner member twice": (
        TEXT.replace('"amount": 100', '"amount": 1, "amount": 2').encode(),
        JSON,
        400,
        "malformed-json",
    ),
    "NaN": (TEXT.replace("100", "NaN").encode(), JSON, 400, "malformed-json"),
    "Infinity": (TEXT.replace("100", "-Infinity").encode(), JSON, 400, "malformed-json"),
    "overflow": (TEXT.replace("100", "1e999").encode(), JSON, 400, "malformed-json"),
    "cut off": (TEXT[:-1].encode(), JSON, 400, "malformed-json"),
    "empty": (b"", JSON, 400, "malformed-json"),
    "UTF-16": (TEXT.encode("utf-16"), JSON, 400, "malformed-json"),
    "latin-1": (
        json.dumps(BODY, ensure_ascii=False).encode("latin-1"),
        JSON,
        400,
        "malformed-json",
    ),
    "deep": (b"[" * 5_000 + b"]" * 5_000, JSON, 400, "malformed-json"),
    "deep, below what the parser minds": (
        b'{"type":"payments.charge","input":' + b'{"a":' * 300 + b"1" + b"}" * 301,
        JSON,
        400,
        "malformed-json",
    ),
    "no media type": (TEXT.encode(), {}, 415, "unsupported-media-type"),
    "another": (TEXT.encode(), {"Content-Type": "text/json"}, 415, "unsupported-media-type"),
    "form": (
        b"a=1",
        {"Content-Type": "application/x-www-form-urlencoded"},
        415,
        "unsupported-media-type",
    ),
    "charset": (
        TEXT.encode("latin-1", "replace"),
        {"Content-Type": "application/json; charset=iso-8859-1"},
        415,
        "unsupported-media-type",
    ),
    "encoding": (
        TEXT.encode(),
        {**JSON, "Content-Encoding": "br"},
        415,
        "unsupported-media-type",
    ),
    "encoded twice": (
        gzip.compress(gzip.compress(TEXT.encode())),
        {**JSON, "Content-Encoding": "gzip, gzip"},
        415,
        "unsupported-media-type",
    ),
    "no gzip": (TEXT.encode(), {**JSON, "Content-Encoding": "gzip"}, 400, "malformed-json"),
    "half a gzip": (
        gzip.compress(TEXT.encode())[:-9],
        {**JSON, "Content-Encoding": "gzip"},
        400,
        "malformed-json",
    ),
    "too large": (b" " * 300_000, JSON, 413, "body-too-large"),
    "zip bomb": (
        gzip.compress(b" " * 50_000_000),
        {**JSON, "Content-Encoding": "gzip"},
        413,
        "body-too-large",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_and_then_corrected(name: str, shared: Api) -> None:
    """CONTRACT 2, B14, B18: refused before the key is bound; the corrected request is admitted under it."""
    content, headers, status, code = REFUSED[name]
    key, rows = fresh_key(), count(shared.database_url)
    refused = await _send(shared, content, headers, key)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert refused.json()["key_bound"] is False
    assert count(shared.database_url) == rows
    assert (await _send(shared, TEXT.encode(), JSON, key)).status_code == 202


async def test_too_large_without_a_length(running: Api, database_url: str) -> None:
    """CONTRACT 2: the bound holds for a body that comes in pieces and never says how long it is."""
    asked_for = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal asked_for
        for _ in range(1_000):
            asked_for += 1
            yield b" " * 10_000

    answer = await running.http.post(
        "/v1/operations", content=pieces(), headers={**JSON, "Idempotency-Key": "k"}
    )
    assert answer.status_code == 413
    assert asked_for < 100
    assert count(database_url) == 0


INVALID: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "no object": ([1], [("", "object_type")]),
    "null": (None, [("", "object_type")]),
    "no type": ({"input": {}}, [("/type", "missing")]),
    "type is a number": ({"type": 7, "input": {}}, [("/type", "string_type")]),
    "unknown member": (
        {**charge(), "timeout_seconds": 0},
        [("/timeout_seconds", "extra_forbidden")],
    ),
    "no input": ({"type": "payments.charge"}, [("/input", "missing")]),
    "fields": (
        {"type": "payments.charge", "input": {"amount": "1", "currency": "EURO", "x/~y": 1}},
        [
            ("/input/amount", "int_type"),
            ("/input/currency", "string_pattern_mismatch"),
            ("/input/source", "missing"),
            ("/input/x~1~0y", "extra_forbidden"),
        ],
    ),
    "beyond 2^53": (charge(2**53), [("/input/amount", "integer_out_of_range")]),
    "far beyond": (charge(10**400), [("/input/amount", "integer_out_of_range")]),
    "beyond, undeclared": (
        {**charge(), "x": [1, {"y": -(2**53)}]},
        [("/x/1/y", "integer_out_of_range")],
    ),
    "NUL": (charge(description="a\0b"), [("/input/description", "text_not_storable")]),
    "NUL in a name": (charge(**{"a\0": 1}), [("/input", "text_not_storable")]),
    "NUL in metadata": (
        {**charge(), "metadata": {"a": "\0"}},
        [("/metadata/a", "text_not_storable")],
    ),
    "lone surrogate": (charge(description="\ud800"), [("/input/description", "text_not_storable")]),
    "metadata number": ({**charge(), "metadata": {"a": 1}}, [("/metadata/a", "string_type")]),
    "metadata pairs": (
        {**charge(), "metadata": {str(n): "" for n in range(21)}},
        [("/metadata", "too_long")],
    ),
    "metadata bytes": (
        {**charge(), "metadata": {str(n): "x" * 300 for n in range(15)}},
        [("/metadata", "too_long")],
    ),
    "priority": ({**charge(), "priority": 4}, [("/priority", "literal_error")]),
    "priority true": ({**charge(), "priority": True}, [("/priority", "literal_error")]),
    "time without zone": (
        {**charge(), "not_before": "2030-01-01T00:00:00"},
        [("/not_before", "instant")],
    ),
    "time as a number": ({**charge(), "deadline": "1700000000"}, [("/deadline", "instant")]),
    "time out of range": (
        {**charge(), "deadline": "0001-01-01T00:00:00+14:00"},
        [("/deadline", "instant")],
    ),
}


@pytest.mark.parametrize("name", INVALID)
async def test_invalid(name: str, shared: Api) -> None:
    """CONTRACT 2, 7, 19, B21: 422 with one entry per field, each with a JSON Pointer; no row."""
    body, expected = INVALID[name]
    key, rows = fresh_key(), count(shared.database_url)
    answer = await shared.post(body, key=key)
    assert answer.status_code == 422
    assert answer.json()["code"] == "invalid-input"
    assert answer.json()["key_bound"] is False
    found = [(error["pointer"], error["code"]) for error in answer.json()["errors"]]
    assert sorted(found) == sorted(expected)
    assert all(error["detail"] for error in answer.json()["errors"])
    assert count(shared.database_url) == rows
    assert (await shared.post(charge(), key=key)).status_code == 202


@pytest.mark.parametrize("type", ["payments.steal", "", "x" * 9_000, "a\0", "\ud800"])
async def test_unknown_type(type: str, shared: Api) -> None:
    """CONTRACT 2: a type that is not there; nothing is echoed, nothing breaks."""
    rows = count(shared.database_url)
    answer = await shared.post({**charge(), "type": type})
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown-type")
    assert answer.json()["errors"][0]["pointer"] == "/type"
    assert len(answer.content) < 1_000
    assert count(shared.database_url) == rows


async def test_endless_lists_of_errors_are_cut(running: Api) -> None:
    """CONTRACT 19: an answer is not as long as what it refuses."""
    many = await running.post(charge(**{f"x{n}": n for n in range(5_000)}))
    assert len(many.json()["errors"]) == 100
    long = await running.post(charge(**{"x" * 200_000: 1}))
    assert long.status_code == 422
    assert len(long.content) < 5_000


async def test_text_that_looks_escaped_stays(running: Api, database_url: str) -> None:
    """CONTRACT 19, B21: the six characters of an escaped NUL are text like any other, kept byte for byte."""
    text = "a\\u0000b"
    answer = await running.post(charge(description=text))
    assert answer.status_code == 202
    with psycopg.connect(database_url) as connection:
        [stored] = connection.execute("SELECT input FROM operations").fetchone() or [b""]
    assert json.loads(stored)["description"] == text


async def test_invalid_under_a_bound_key_says_so(running: Api) -> None:
    """CONTRACT 2: `key_bound` says whether the key is bound now."""
    key = fresh_key()
    await running.post(charge(), key=key)
    answer = await running.post(charge(amount="x"), key=key)  # type: ignore[arg-type]
    assert answer.status_code == 422
    assert answer.json()["code"] == "invalid-input"
    assert answer.json()["key_bound"] is True
