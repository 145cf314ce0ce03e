"""Every error is one kind of answer (CONTRACT 18, 20), whoever made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from app.api import schemas
from app.api.problems import PROBLEMS, Slug
from app.domain.errors import CommitUnknown, StoreUnavailable
from app.service.admission import HolderUnreadable
from tests.support.api import Api, api, charge, count, fresh_key, put_into

pytestmark = pytest.mark.anyio

MEMBERS = {"type", "title", "status", "detail", "instance", "code", "retryable", "key_bound"}


def check(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Hold an answer against the contract of problems."""
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Request-Id"]
    body: dict[str, Any] = answer.json()
    jsonschema.validate(body, schemas.problem())
    assert set(body) >= MEMBERS
    assert (body["status"], body["code"]) == (status, code)
    assert body["type"] == f"/problems/{code}"
    assert body["retryable"] is PROBLEMS[Slug(code)].retryable
    return body


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not-found"),
        ("GET", "/v1/nothing", 404, "not-found"),
        ("GET", "/v1/operations/op_x/nothing", 404, "not-found"),
        ("GET", "/%00", 404, "not-found"),
        ("GET", "/problems/nothing", 404, "not-found"),
        ("POST", "/v1/operations/", 404, "not-found"),
        ("PUT", "/v1/operations", 405, "method-not-allowed"),
        ("DELETE", "/v1/operations/op_x", 405, "method-not-allowed"),
        ("GET", "/v1/operations/op_x/cancel", 405, "method-not-allowed"),
        ("POST", "/livez", 405, "method-not-allowed"),
        ("OPTIONS", "/v1/operations", 405, "method-not-allowed"),
        ("BREW", "/livez", 405, "method-not-allowed"),
    ],
)
async def test_the_frameworks_own(
    method: str, path: str, status: int, code: str, shared: Api
) -> None:
    """CONTRACT 18: unknown routes and methods are problems too, 405 with every method in Allow."""
    answer = await shared.http.request(method, path)
    check(answer, status, code)
    if path == "/v1/operations":
        assert answer.headers["Allow"] == "GET, HEAD, POST"
    elif status == 405:
        assert answer.headers["Allow"]


@pytest.mark.parametrize(
    ("accept", "good"),
    [
        (None, True),
        ("*/*", True),
        ("application/*;q=0.1", True),
        ("text/html, application/json;q=0.5", True),
        ("application/problem+json, */*;q=0.1", True),
        ("nonsense", True),
        ("text/html", False),
        ("application/json;q=0", False),
        ("application/json;q=0, */*", False),
        ("*/*;q=0.0", False),
    ],
)
async def test_accept(accept: str | None, good: bool, running: Api, database_url: str) -> None:
    """CONTRACT 18: 406 where JSON is excluded, and nothing is admitted then."""
    if accept is None:
        del running.http.headers["Accept"]
    headers = {} if accept is None else {"Accept": accept}
    answer = await running.post(charge(), headers=headers)
    if good:
        assert answer.status_code == 202
    else:
        check(answer, 406, "not-acceptable")
        assert count(database_url) == 0


async def test_order_of_refusals(running: Api, database_url: str) -> None:
    """CONTRACT 2: 401, 403, key, media type, size, JSON, words: the first that is wrong is told."""
    from tests.support.api import make_key

    reader = running.of(await make_key(database_url, scopes=("operations:read",)))
    wrong = {"Idempotency-Key": "a b", "Content-Type": "text/plain"}
    big, huge = b"{" * 10, b"{" * 300_000

    async def send(client: Any, content: bytes, **headers: str) -> tuple[int, str]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await client.http.post("/v1/operations", content=content, headers=given)
        return answer.status_code, answer.json()["code"]

    assert (await send(running, huge, **wrong, Authorization="Bearer x"))[0] == 401
    assert (await send(reader, huge, **wrong))[0] == 403
    assert (await send(running, huge, **wrong))[1] == "idempotency-key-malformed"
    wrong["Idempotency-Key"] = "k"
    assert (await send(running, huge, **wrong))[0] == 415
    wrong["Content-Type"] = "application/json"
    assert (await send(running, huge, **wrong))[0] == 413
    assert (await send(running, big, **wrong))[1] == "malformed-json"
    assert (await send(running, b"{}", **wrong))[1] == "invalid-input"
    assert count(database_url) == 0


async def test_unhandled(database_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """CONTRACT 18, B51: a 500 shows nothing of its inside; body, header and log have one request id."""
    async with api(database_url) as running:

        async def broken(*_: object) -> None:
            secret = "tok_secret"
            raise RuntimeError(f"secret words of a driver: {secret}")

        running.services.reading.one = broken  # type: ignore[method-assign,assignment]
        answer = await running.get("op_01900000-0000-7000-8000-000000000000")
        body = check(answer, 500, "internal-error")
        assert body["request_id"] == answer.headers["X-Request-Id"]
        assert body["key_bound"] is False
        running.services.admission.submit = broken  # type: ignore[method-assign,assignment]
        posted = check(await running.post(charge()), 500, "internal-error")
        assert posted["key_bound"] == "unknown"
    log = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]
    [found] = [line for line in log if line.get("request_id") == body["request_id"]]
    assert found["event"] == "unhandled_request"
    assert found["route"] == "/v1/operations/{id}"
    assert found["error"] == "RuntimeError"
    assert any("test_errors.py" in where for where in found["where"])
    everything = json.dumps(log) + answer.text + str(answer.headers)
    assert "secret words" not in everything
    assert "tok_secret" not in everything


@pytest.mark.parametrize(
    ("error", "key_bound"),
    [
        (StoreUnavailable("x"), False),
        (CommitUnknown("x"), "unknown"),
        (HolderUnreadable("x"), True),
    ],
)
async def test_store_errors(error: Exception, key_bound: object, running: Api) -> None:
    """CONTRACT 10: 503 with Retry-After, and what is known of the key."""

    async def failing(*_: object) -> None:
        raise error

    running.services.admission.submit = failing  # type: ignore[method-assign,assignment]
    answer = await running.post(charge())
    body = check(answer, 503, "store-unavailable")
    assert body["key_bound"] == key_bound
    assert int(answer.headers["Retry-After"]) > 0


async def test_instance_is_bounded_and_has_no_query(running: Api) -> None:
    """CONTRACT 18, 19: the path, cut; a query may hold anything."""
    answer = await running.http.get(f"/{'x' * 5_000}?api_key=fp_test_secret")
    assert len(answer.json()["instance"]) == 200
    assert "fp_test_secret" not in answer.text


ORIGIN = "https://shop.example"


async def test_cors(database_url: str) -> None:
    """CONTRACT 20: for the origins of the setting, errors included; others get nothing."""
    async with api(database_url, cors_origins=f"{ORIGIN}, https://b.example") as running:
        answer = await running.post(charge(), headers={"Origin": ORIGIN})
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        exposed = answer.headers["Access-Control-Expose-Headers"]
        for name in (
            "Location",
            "Retry-After",
            "Idempotent-Replayed",
            "Idempotency-Expires",
            "ETag",
            "Preference-Applied",
        ):
            assert name in exposed.split(", ")
        assert "Origin" in answer.headers["Vary"]
        missing = await running.http.get("/nothing", headers={"Origin": ORIGIN})
        assert missing.headers["Access-Control-Allow-Origin"] == ORIGIN
        asked = {"Access-Control-Request-Method": "POST"}
        preflight = await running.http.options(
            "/v1/operations",
            headers={"Origin": ORIGIN, "Authorization": "", **asked},
        )
        assert (preflight.status_code, preflight.content) == (204, b"")
        assert "Idempotency-Key" in preflight.headers["Access-Control-Allow-Headers"]
        assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
        for origin in ("https://evil.example", "null", ORIGIN + ".evil"):
            other = await running.http.get("/livez", headers={"Origin": origin})
            assert "Access-Control-Allow-Origin" not in other.headers
            refused = await running.http.options(
                "/v1/operations", headers={"Origin": origin, **asked}
            )
            assert refused.status_code == 405


async def test_cors_is_off_by_default(running: Api) -> None:
    """CONTRACT 20: without the setting no origin is answered for."""
    answer = await running.http.get("/livez", headers={"Origin": ORIGIN})
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_every_problem_is_in_the_table_and_used() -> None:
    """CONTRACT 18: one table; every code has a row with a meaning and advice, and somebody who says it."""
    assert set(PROBLEMS) == set(Slug)
    source = "".join(
        path.read_text() for path in Path("app").rglob("*.py") if path.name != "problems.py"
    )
    for slug, kind in PROBLEMS.items():
        assert 400 <= kind.status < 600, slug
        assert kind.meaning.endswith(".")
        assert kind.advice.endswith(".")
        assert f"Slug.{slug.name}" in source or f'"{slug}"' in source, slug


async def test_a_client_that_leaves_is_no_error(
    running: Api, capfd: pytest.CaptureFixture[str]
) -> None:
    """B35: hanging up while the body is awaited ends the request without a 500 and without a row."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/operations",
        "raw_path": b"/v1/operations",
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"authorization", f"Bearer {running.secret}".encode()),
            (b"idempotency-key", b"k"),
            (b"content-type", b"application/json"),
        ],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    with anyio.fail_after(5):
        await running.app(scope, receive, send)
    assert sent == []
    assert "unhandled_request" not in capfd.readouterr().err
    counted = running.services.telemetry.registry.get_sample_value(
        "fencepost_http_requests_total",
        {"route": "/v1/operations", "method": "POST", "status": "499"},
    )
    assert counted == 1


async def test_gone_and_mismatch_have_the_shape(running: Api, database_url: str) -> None:
    """CONTRACT 5, 11, 18: the problems with an operation in them."""
    key = fresh_key()
    id = (await running.post(charge(), key=key)).json()["id"]
    check(await running.post(charge(2), key=key), 422, "idempotency-key-reused")
    put_into(database_url, id, "tombstone")
    check(await running.post(charge(), key=key), 410, "idempotency-key-expired")
