"""POST /v1/operations: first, again, with another body, by another caller (CONTRACT 3 to 6, 9, 11)."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import psycopg
import pytest

from app.domain.identity import IdempotencyKey
from app.domain.lifecycle import TERMINAL
from app.service.admission import Draft
from tests.support.api import (
    STATES,
    Api,
    api,
    bearer,
    charge,
    count,
    fresh_key,
    make_key,
    put_into,
    rows_of,
)

pytestmark = pytest.mark.anyio

DONE = [str(state) for state in TERMINAL]


async def test_first(running: Api, database_url: str) -> None:
    """CONTRACT 3: 202, Location, Retry-After, Idempotency-Expires, ETag, and the operation."""
    answer = await running.post({**charge(), "metadata": {"order": "7"}})
    body = answer.json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/operations/{body['id']}"
    assert answer.headers["Retry-After"] == "1"
    assert answer.headers["ETag"] == '"v1"'
    assert "Idempotent-Replayed" not in answer.headers
    assert "Preference-Applied" not in answer.headers
    expires = parsedate_to_datetime(answer.headers["Idempotency-Expires"])
    assert expires.isoformat()[:19] == body["idempotency_expires_at"][:19]
    links = body.pop("links")
    times = [body.pop(f"{name}_at") for name in ("created", "updated", "idempotency_expires")]
    assert all(time.endswith("Z") and "T" in time for time in times)
    assert body == {
        "id": body["id"],
        "type": "payments.charge",
        "type_version": 1,
        "state": "pending",
        "done": False,
        "completed_at": None,
        "steps": [
            {
                "name": "charge",
                "state": "pending",
                "attempts": 0,
                "provider": "payments",
                "reference": None,
            }
        ],
        "progress": {"done": 0, "total": 1},
        "cancel_requested": False,
        "metadata": {"order": "7"},
    }
    assert links == {
        "self": f"/v1/operations/{body['id']}",
        "cancel": f"/v1/operations/{body['id']}/cancel",
        "type": "/v1/operation-types?type=payments.charge",
    }
    assert count(database_url, "SELECT count(*) FROM work WHERE state = 'pending'") == 1


@pytest.mark.parametrize("state", STATES)
async def test_same_again(state: str, running: Api, database_url: str) -> None:
    """CONTRACT 4, 11, 16, B12: a repeat in every state: same id, the status that state has, no change."""
    first = await running.post(charge(), key="k")
    id = first.json()["id"]
    put_into(database_url, id, state)
    before = rows_of(database_url)
    answer = await running.post(charge(), key="k")
    body = answer.json()
    if state == "tombstone":
        assert (answer.status_code, body["code"]) == (410, "idempotency-key-expired")
        assert body["key_bound"] is True
        assert body["operation"]["id"] == id
        assert (body["operation"]["state"], body["operation"]["purged"]) == ("succeeded", True)
        assert body["operation"]["completed_at"].endswith("Z")
    else:
        assert answer.status_code == (200 if state in DONE else 202)
        assert (body["id"], body["state"], body["done"]) == (id, state, state in DONE)
        assert answer.headers["Idempotent-Replayed"] == "true"
        assert answer.headers["Location"] == f"/v1/operations/{id}"
        assert answer.headers["ETag"] == '"v2"'
        assert ("Retry-After" in answer.headers) is (state not in DONE)
        assert ("result" in body, "error" in body) == (
            state == "succeeded",
            state in ("failed", "cancelled"),
        )
    assert rows_of(database_url) == before


@pytest.mark.parametrize("state", STATES)
async def test_other_body(state: str, running: Api, database_url: str) -> None:
    """CONTRACT 5, B12: another body in every state, tombstone included, is a mismatch and changes nothing."""
    id = (await running.post(charge(), key="k")).json()["id"]
    put_into(database_url, id, state)
    before = rows_of(database_url)
    answer = await running.post(charge(101), key="k")
    body = answer.json()
    assert (answer.status_code, body["code"]) == (422, "idempotency-key-reused")
    assert body["key_bound"] is True
    assert body["operation"] == {"id": id, "href": f"/v1/operations/{id}"}
    assert rows_of(database_url) == before


@pytest.mark.parametrize("state", ["pending", "succeeded", "tombstone"])
async def test_after_a_restart(state: str, database_url: str) -> None:
    """CONTRACT 4, 5, B12: another process decides the same way."""
    async with api(database_url) as first:
        id = (await first.post(charge(), key="k")).json()["id"]
        put_into(database_url, id, state)
    async with api(database_url) as second:
        same = await second.post(charge(), key="k")
        other = await second.post(charge(101), key="k")
    assert (same.json().get("id") or same.json()["operation"]["id"]) == id
    assert other.json()["code"] == "idempotency-key-reused"


async def test_mismatch_names_the_operation_to_readers_only(
    running: Api, database_url: str
) -> None:
    """CONTRACT 5: the problem links the operation only if the caller may read it."""
    await running.post(charge(), key="k")
    writer = running.of(await make_key(database_url, scopes=("operations:write",)))
    answer = await writer.post(charge(101), key="k")
    assert answer.status_code == 422
    assert "operation" not in answer.json()


async def test_scope_is_tenant_type_and_key(running: Api, database_url: str) -> None:
    """CONTRACT 6: other tenants and other types are independent; two keys of one tenant share the scope."""
    first = await running.post(charge(), key="k")
    stranger = running.of(await make_key(database_url, tenant="other"))
    fresh = await running.http.post(
        "/v1/operations", json=charge(), headers={"Idempotency-Key": "never-used"}
    )
    theirs = await stranger.post(charge(5), key="k")
    assert theirs.status_code == 202
    assert "Idempotent-Replayed" not in theirs.headers
    assert set(theirs.json()) == set(fresh.json())
    refund = await running.post({"type": "payments.refund", "input": {"charge": "ch_1"}}, key="k")
    assert refund.status_code == 202
    colleague = running.of(await make_key(database_url))
    again = await colleague.post(charge(), key="k")
    assert again.json()["id"] == first.json()["id"]
    assert len({answer.json()["id"] for answer in (first, theirs, refund)}) == 3


async def test_replay_is_authorised_anew(running: Api, database_url: str) -> None:
    """CONTRACT 6: who asks now must be allowed now."""
    await running.post(charge(), key="k")
    reader = running.of(await make_key(database_url, scopes=("operations:read",)))
    answer = await reader.post(charge(), key="k")
    assert (answer.status_code, answer.json()["code"]) == (403, "insufficient-scope")


async def test_the_answer_leaves_after_the_commit(running: Api, database_url: str) -> None:
    """CONTRACT 3: with the commit held back there is no answer; when the answer is there, so is the row."""
    seen: list[int] = []
    flush = running.services.admission._group._flush

    async def held(batch: Any) -> Any:
        result = await flush(batch)
        seen.append(count(database_url))
        return result

    running.services.admission._group._flush = held
    assert (await running.post(charge())).status_code == 202
    assert seen == [1]
    gate = anyio.Event()

    async def never_commits(batch: Any) -> Any:
        await gate.wait()
        raise AssertionError

    running.services.admission._group._flush = never_commits
    with anyio.move_on_after(0.2) as waiting:
        await running.post(charge())
    assert waiting.cancelled_caught
    gate.set()
    await running.services.admission.drain()


async def test_expiry_never_moves_earlier(running: Api, database_url: str) -> None:
    """CONTRACT 11, R14: the date given at admission is a lower bound of every later one."""
    first = await running.post(charge(), key="k")
    given = first.json()["idempotency_expires_at"]
    put_into(database_url, first.json()["id"], "succeeded")
    later = (await running.post(charge(), key="k")).json()["idempotency_expires_at"]
    assert later >= given


async def test_wait_until_done(running: Api, database_url: str) -> None:
    """CONTRACT 9: 200 with the done operation as soon as it gets there, and Preference-Applied."""
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:

            async def finish() -> None:
                while not running.services.hub.waiting:
                    await anyio.sleep(0.005)
                [row] = rows_of(database_url)["operations"]
                id = row[1]
                put_into(database_url, f"op_{id}", "running")
                put_into(database_url, f"op_{id}", "succeeded")

            group.start_soon(finish)
            answer = await running.post(charge(), headers={"Prefer": "respond-async, wait=30"})
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")
    assert answer.headers["Preference-Applied"] == "wait=30"


async def test_wait_in_vain(database_url: str) -> None:
    """CONTRACT 9: 202 when N is over; N is bounded by the server, and the answer says to what."""
    async with api(database_url, max_wait_seconds=0.2) as running:
        answer = await running.post(charge(), headers={"Prefer": "respond-async, wait=9999999999"})
    assert answer.status_code == 202
    assert answer.headers["Preference-Applied"] == "respond-async, wait=0"


@pytest.mark.parametrize(
    ("prefer", "applied"),
    [
        ("respond-async", "respond-async"),
        ("wait=0", "wait=0"),
        ('Wait="0"', "wait=0"),
        ("return=minimal, wait=0;x=y", "wait=0"),
        ("wait=0, wait=30", "wait=0"),
        ("wait=-1", None),
        ("wait=x", None),
        ("wait", None),
        ("wait=1.5", None),
        ("wait=\u0663", None),
        (",,;", None),
        ("", None),
    ],
)
async def test_malformed_preferences_are_ignored(
    prefer: str, applied: str | None, shared: Api
) -> None:
    """CONTRACT 9, RFC 7240: what is not understood is as if it were not there; the POST does not wait."""
    with anyio.fail_after(5):
        answer = await shared.http.post(
            "/v1/operations",
            json=charge(),
            headers=[(b"Idempotency-Key", fresh_key().encode()), (b"Prefer", prefer.encode())],
        )
    assert answer.status_code == 202
    assert answer.headers.get("Preference-Applied") == applied


async def test_version_of_another_release(running: Api, database_url: str) -> None:
    """CONTRACT 7: a key bound under a version not known here is neither replayed nor refused for good."""
    id = (await running.post(charge(), key="k")).json()["id"]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE operations SET type_version = 99")
    answer = await running.post(charge(), key="k")
    assert (answer.status_code, answer.json()["code"]) == (503, "version-unknown")
    assert answer.json()["key_bound"] is True
    assert answer.json()["retryable"] is True
    assert answer.json()["operation"]["id"] == id
    assert int(answer.headers["Retry-After"]) > 0
    shown = (await running.get(id)).json()
    assert (shown["steps"], shown["progress"]) == ([], {"done": 0, "total": None})


async def test_admission_is_one_path(running: Api) -> None:
    """K7: what the route answers is what the use case says; there is no second judgement in the API."""
    await running.post(charge(), key="k")
    key = IdempotencyKey("k")
    again = await running.services.admission.submit(Draft("acme", key, charge(), {}))
    assert type(again).__name__ == "Replayed"


async def test_unused_headers_do_not_matter(running: Api) -> None:
    """CONTRACT 7: only a type's declared semantic headers are part of the meaning."""
    first = await running.post(charge(), key="k", headers={"X-Anything": "1"})
    again = await running.post(
        charge(), key="k", headers={"X-Anything": "2", **bearer(running.secret)}
    )
    assert first.json()["id"] == again.json()["id"]
