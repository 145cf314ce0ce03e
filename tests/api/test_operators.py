"""POST /v1/operations/{id}/resolve and /retry (CONTRACT 23, PROTOCOL R6)."""

from __future__ import annotations

from typing import Any

import httpx
import psycopg
import pytest

from tests.support.api import Api, Client, bearer, charge, fresh_key, make_key, put_into

pytestmark = pytest.mark.anyio
BODY = {"step": "charge", "as": "applied", "evidence": "ticket 1", "reason": "seen there"}


async def _operator(running: Api, database_url: str) -> Client:
    return running.of(await make_key(database_url, scopes=["operator"]))


async def act(
    client: Client,
    id: str,
    verb: str,
    body: object,
    *,
    key: str | None = None,
    version: str | None = "*",
) -> httpx.Response:
    headers = {**bearer(client.secret), "Idempotency-Key": key or fresh_key()}
    if version is not None:
        headers["If-Match"] = version
    return await client.http.post(f"/v1/operations/{id}/{verb}", json=body, headers=headers)


async def stuck(running: Api, database_url: str, *, settled: bool) -> str:
    """An operation that needs attention, with one unknown attempt that may or may not still arrive."""
    id: str = (await running.post(charge())).json()["id"]
    put_into(database_url, id, "needs_attention")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO attempts (bucket, operation_id, id, step, item, direction, key_ordinal, generation,"
            " began_at, send_by, arrives_by, settled_at, outcome, recorded_at)"
            " SELECT bucket, operation_id, gen_random_uuid(), 'charge', 0, 'forward', 0, 1, at,"
            " at + interval '1s', at + interval '60s', at + interval '61s', 'unknown', at"
            " FROM work, (SELECT now() - make_interval(secs => %s) AS at) begun",
            [120 if settled else 0],
        )
    return id


async def test_resolve_and_its_repeat(running: Api, database_url: str) -> None:
    """CONTRACT 23: done once is done once; the audit row says who, why and on what evidence."""
    id = await stuck(running, database_url, settled=False)
    operator = await _operator(running, database_url)
    etag = (await running.get(id)).headers["ETag"]
    first = await act(operator, id, "resolve", BODY, key="k", version=etag)
    assert (first.status_code, first.json()["state"]) == (200, "running")
    again = await act(operator, id, "resolve", BODY, key="k", version=etag)
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (200, "true")
    other = await act(operator, id, "resolve", {**BODY, "as": "absent"}, key="k")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency-key-reused")
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(
            "SELECT action, \"by\" LIKE 'key:%', reason, evidence FROM operator_actions"
        ).fetchall()
    assert rows == [("resolve", True, "seen there", "ticket 1")]


@pytest.mark.parametrize("verdict", ["absent", "rejected"])
async def test_too_early(verdict: str, running: Api, database_url: str) -> None:
    """CONTRACT 23, R6: 409 with Retry-After until nothing can arrive any more."""
    id = await stuck(running, database_url, settled=False)
    operator = await _operator(running, database_url)
    answer = await act(operator, id, "resolve", {**BODY, "as": verdict})
    assert (answer.status_code, answer.json()["code"]) == (409, "attempt-not-settled")
    assert 50 <= int(answer.headers["Retry-After"]) <= 61
    assert answer.json()["retryable"] is True


@pytest.mark.parametrize("verdict", ["absent", "rejected"])
async def test_late_enough(verdict: str, running: Api, database_url: str) -> None:
    """R6 once it is over."""
    id = await stuck(running, database_url, settled=True)
    operator = await _operator(running, database_url)
    answer = await act(operator, id, "resolve", {**BODY, "as": verdict})
    assert (answer.status_code, answer.json()["state"]) == (200, "running")


async def test_retry_while_in_doubt(running: Api, database_url: str) -> None:
    """Transitions, retry: nothing may be in doubt."""
    id = await stuck(running, database_url, settled=True)
    operator = await _operator(running, database_url)
    answer = await act(operator, id, "retry", {"reason": "go on"})
    assert (answer.status_code, answer.json()["code"]) == (409, "in-doubt")


async def test_retry(running: Api, database_url: str) -> None:
    id: str = (await running.post(charge())).json()["id"]
    put_into(database_url, id, "needs_attention")
    operator = await _operator(running, database_url)
    answer = await act(operator, id, "retry", {"reason": "go on"})
    assert (answer.status_code, answer.json()["state"]) == (200, "running")


async def test_who_may(running: Api, database_url: str) -> None:
    """The scope is its own: reading and writing do not give it; another tenant's is not there."""
    id = await stuck(running, database_url, settled=True)
    denied = await act(running, id, "resolve", BODY)
    assert (denied.status_code, denied.json()["code"]) == (403, "insufficient-scope")
    stranger = running.of(await make_key(database_url, tenant="other", scopes=["operator"]))
    hidden = await act(stranger, id, "resolve", BODY)
    assert (hidden.status_code, hidden.json()["code"]) == (404, "operation-not-found")


async def test_preconditions(running: Api, database_url: str) -> None:
    """If-Match: missing 428, another version or a foreign validator 412."""
    id = await stuck(running, database_url, settled=True)
    operator = await _operator(running, database_url)
    missing = await act(operator, id, "resolve", BODY, version=None)
    assert (missing.status_code, missing.json()["code"]) == (428, "if-match-missing")
    for version in ('"v99"', '"somebody-elses"', "v1"):
        stale = await act(operator, id, "resolve", BODY, version=version)
        assert (stale.status_code, stale.json()["code"]) == (412, "version-mismatch")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"as": "perhaps"}, "/as"),
        ({"step": ""}, "/step"),
        ({"item": -1}, "/item"),
        ({"evidence": "\0"}, "/evidence"),
        ({"reason": None}, "/reason"),
        ({"more": 1}, "/more"),
        ({"result": {"n": 2**60}}, "/result/n"),
    ],
)
async def test_bad_bodies(
    change: dict[str, Any], pointer: str, running: Api, database_url: str
) -> None:
    """422 with a pointer; nothing was written."""
    id = await stuck(running, database_url, settled=True)
    operator = await _operator(running, database_url)
    answer = await act(operator, id, "resolve", {**BODY, **change})
    assert answer.status_code == 422
    assert pointer in [error["pointer"] for error in answer.json()["errors"]]
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM operator_actions").fetchone() == (0,)


async def test_nothing_to_resolve(running: Api, database_url: str) -> None:
    """Done, running, or a step that was never begun: 409, each with its own code."""
    operator = await _operator(running, database_url)
    id = await stuck(running, database_url, settled=True)
    unknown = await act(operator, id, "resolve", {**BODY, "step": "other"})
    assert (unknown.status_code, unknown.json()["code"]) == (409, "step-not-begun")
    pending: str = (await running.post(charge())).json()["id"]
    assert (await act(operator, pending, "resolve", BODY)).json()["code"] == "not-in-doubt"
    assert (await act(operator, pending, "retry", {"reason": "r"})).json()["code"] == "not-stopped"
    await running.cancel(pending)
    assert (await act(operator, pending, "resolve", BODY)).json()["code"] == "operation-done"
