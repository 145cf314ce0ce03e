"""POST /v1/operations/{id}/cancel (CONTRACT 17; CASES.md K18)."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.api import Api, charge, make_key, put_into, rows_of

pytestmark = pytest.mark.anyio

NOTED = ("uncertain", "compensating")
AT_ONCE = ("pending", "running", "waiting", "needs_attention")
DONE = ("succeeded", "failed", "cancelled", "tombstone")


async def _in_state(running: Api, database_url: str, state: str) -> str:
    id: str = (await running.post(charge())).json()["id"]
    put_into(database_url, id, state)
    return id


@pytest.mark.parametrize("state", AT_ONCE)
async def test_at_once(state: str, running: Api, database_url: str) -> None:
    """CONTRACT 17: nothing was begun: cancelled, in every state where that can be."""
    id = await _in_state(running, database_url, state)
    answer = await running.cancel(id, {"reason": "changed my mind"})
    body = answer.json()
    assert (answer.status_code, body["state"], body["done"]) == (200, "cancelled", True)
    assert body["cancel_requested"] is True
    assert body["error"]["code"] == "cancelled"
    assert rows_of(database_url)["work"] == []
    with psycopg.connect(database_url) as connection:
        [row] = connection.execute('SELECT action, "by", reason FROM operator_actions').fetchall()
    assert (row[0], row[2]) == ("cancel", "changed my mind")
    assert row[1].startswith("key:")
    assert running.secret not in row[1]


async def _begun(running: Api, database_url: str, outcome: str | None) -> str:
    """An operation with one attempt, open or with that outcome."""
    id = await _in_state(running, database_url, "running")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO attempts (bucket, operation_id, id, step, item, direction, key_ordinal, generation,"
            " began_at, send_by, arrives_by, settled_at, outcome, recorded_at)"
            " SELECT bucket, operation_id, gen_random_uuid(), 'charge', 0, 'forward', 0, 1, now(),"
            " now() + interval '1s', now() + interval '2s', now() + interval '3s', %(o)s::text,"
            " CASE WHEN %(o)s::text IS NULL THEN NULL ELSE now() END FROM work",
            {"o": outcome},
        )
    return id


@pytest.mark.parametrize("outcome", [None, "unknown", "succeeded"])
async def test_noted_once_something_was_begun(
    outcome: str | None, running: Api, database_url: str
) -> None:
    """CONTRACT 17: with an effect that may exist the wish is noted, and the operation goes on."""
    id = await _begun(running, database_url, outcome)
    answer = await running.cancel(id)
    body = answer.json()
    assert (answer.status_code, body["state"], body["done"]) == (202, "running", False)
    assert body["cancel_requested"] is True
    assert answer.headers["ETag"] == '"v3"'
    assert int(answer.headers["Retry-After"]) >= 1
    again = await running.cancel(id)
    assert (again.status_code, again.headers["ETag"]) == (202, '"v3"')


async def test_not_applied_is_not_begun(running: Api, database_url: str) -> None:
    """CONTRACT 17: attempts known not to have been applied do not stand in the way."""
    id = await _begun(running, database_url, "not_applied")
    assert (await running.cancel(id)).json()["state"] == "cancelled"


@pytest.mark.parametrize("state", NOTED)
async def test_noted_in_doubt(state: str, running: Api, database_url: str) -> None:
    """CONTRACT 17: in doubt, and on the way back, it is only noted."""
    id = await _in_state(running, database_url, state)
    answer = await running.cancel(id)
    assert (answer.status_code, answer.json()["state"]) == (202, state)
    assert answer.json()["cancel_requested"] is True


@pytest.mark.parametrize("state", DONE)
async def test_done_stays(state: str, running: Api, database_url: str) -> None:
    """CONTRACT 16, 17: on a done operation nothing changes, and it is returned."""
    id = await _in_state(running, database_url, state)
    before, rows = (await running.get(id)).json(), rows_of(database_url)
    answer = await running.cancel(id, {"reason": "late"})
    assert (answer.status_code, answer.json()) == (200, before)
    assert rows_of(database_url) == rows


async def test_idempotent(running: Api, database_url: str) -> None:
    """CONTRACT 17: the second cancel answers like the first."""
    id = await _in_state(running, database_url, "pending")
    first, second = await running.cancel(id), await running.cancel(id)
    assert first.content == second.content


async def test_needs_the_write_scope(running: Api, database_url: str) -> None:
    """CONTRACT, Resources: reading is not enough."""
    id = await _in_state(running, database_url, "pending")
    reader = running.of(await make_key(database_url, scopes=("operations:read",)))
    assert (await reader.cancel(id)).status_code == 403
    assert (await running.get(id)).json()["state"] == "pending"


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"", None, 200),
        (b"", "application/json", 400),
        (b"{}", "application/json", 200),
        (b'{"reason":null}', "application/json", 200),
        (b"{}", None, 415),
        (b"{}", "text/plain", 415),
        (b"[]", "application/json", 422),
        (b'{"reason":1}', "application/json", 422),
        (b'{"reason":"a\\u0000"}', "application/json", 422),
        (b'{"reason":"%s"}' % (b"x" * 1001), "application/json", 422),
        (b'{"why":"x"}', "application/json", 422),
        (b'{"reason":"' + b"x" * 300_000 + b'"}', "application/json", 413),
        (b"{", "application/json", 400),
    ],
)
async def test_bodies(
    content: bytes, media_type: str | None, status: int, running: Api, database_url: str
) -> None:
    """CONTRACT, Shapes: no body, or `{"reason"}`; whatever is refused changes nothing."""
    id = await _in_state(running, database_url, "pending")
    headers = {} if media_type is None else {"Content-Type": media_type}
    answer = await running.http.post(
        f"/v1/operations/{id}/cancel", content=content, headers=headers
    )
    assert answer.status_code == status
    expected = "cancelled" if status == 200 else "pending"
    assert (await running.get(id)).json()["state"] == expected
