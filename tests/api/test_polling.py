"""GET /v1/operations/{id}: poll, long poll, what a client may rely on (CONTRACT 12, 13, 14, 16, 19)."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import anyio
import httpx
import psycopg
import pytest

from app.api.representation import retry_after
from app.domain.identity import OperationId
from tests.support.api import STATES, Api, api, charge, make_key, put_into, until

pytestmark = pytest.mark.anyio


async def _admitted(running: Api) -> str:
    id: str = (await running.post(charge())).json()["id"]
    return id


@pytest.mark.parametrize("state", STATES)
async def test_every_state(state: str, running: Api, database_url: str) -> None:
    """CONTRACT 11, 12, 16, 19: what each state shows; a tombstone is a 200 with what it knows."""
    id = await _admitted(running)
    put_into(database_url, id, state)
    answer = await running.get(id)
    body = answer.json()
    assert answer.status_code == 200
    done = state in ("succeeded", "failed", "cancelled", "tombstone")
    assert body["done"] is done
    assert body["state"] == ("succeeded" if state == "tombstone" else state)
    assert ("Retry-After" in answer.headers) is not done
    assert (body["completed_at"] is not None) is done
    assert ("attention" in body) is (state == "needs_attention")
    assert not {"result", "error"} <= set(body)
    assert ("purged" in body) is (state == "tombstone")
    if state == "tombstone":
        assert body["purged"] is True
        assert not {"result", "error"} & set(body)
        assert (body["steps"], body["progress"], body["metadata"]) == ([], None, {})
    if state == "failed":
        assert body["error"]["code"] == "provider-rejected"
        assert body["error"]["provider_code"] == "card_declined"
        assert body["error"]["retryable"] is False
    if state == "succeeded":
        assert body["result"] == {"charge": "ch_1"}
        assert body["progress"] == {"done": 1, "total": 1}
    text = answer.text
    for secret in ("owner", "generation", "lease", "downstream", "key_digest", "tenant"):
        assert secret not in text


async def test_terminal_answers_never_change(running: Api, database_url: str) -> None:
    """CONTRACT 16: the same bytes for as long as they are kept."""
    id = await _admitted(running)
    put_into(database_url, id, "failed")
    first = await running.get(id)
    await running.cancel(id)
    second = await running.get(id)
    assert first.content == second.content
    assert first.headers["ETag"] == second.headers["ETag"]


async def test_etag_follows_the_version(running: Api, database_url: str) -> None:
    """CONTRACT 12: strong, raised by every visible change, 304 while it matches."""
    id = await _admitted(running)
    first = await running.get(id)
    assert first.headers["ETag"] == '"v1"'
    for given in ('"v1"', 'W/"v1"', '"x", "v1"', "*"):
        same = await running.get(id, If_None_Match=given)
        assert (same.status_code, same.content) == (304, b""), given
        assert same.headers["ETag"] == '"v1"'
        assert int(same.headers["Retry-After"]) >= 1
    put_into(database_url, id, "running")
    changed = await running.get(id, If_None_Match='"v1"')
    assert (changed.status_code, changed.headers["ETag"]) == (200, '"v2"')
    put_into(database_url, id, "tombstone")
    assert (await running.get(id)).headers["ETag"] == '"v3-purged"'


async def test_claims_and_renewals_are_not_visible(running: Api, database_url: str) -> None:
    """CONTRACT 12: what only workers see raises no version."""
    id = await _admitted(running)
    first = await running.get(id)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "UPDATE work SET lease_owner_token = gen_random_uuid(), lease_expires_at = now(),"
            " lease_generation = 7, claims = 3"
        )
    second = await running.get(id)
    assert second.content == first.content
    assert second.headers["ETag"] == first.headers["ETag"]


def test_retry_after_grows_with_age() -> None:
    """CONTRACT 12: whole seconds, never less for an older operation, bounded both ways."""
    from app.domain.lifecycle import State
    from app.domain.operation import OperationView

    now = datetime(2030, 1, 1, tzinfo=UTC)

    def of(age_seconds: float) -> int:
        created = now - timedelta(seconds=age_seconds)
        return retry_after(
            OperationView(
                id=OperationId.new(0),
                tenant="t",
                type="x",
                type_version=1,
                state=State.PENDING,
                version=1,
                created_at=created,
                updated_at=created,
                completed_at=None,
                idempotency_expires_at=created,
                metadata={},
                cancel_requested=False,
                attention=None,
                result=None,
                error=None,
                purged=False,
            ),
            now,
        )

    waits = [of(age) for age in (-5, 0, 1, 10, 11, 60, 300, 3_600, 10**7)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1, 60)
    assert len(set(waits)) > 3


async def test_others_and_nothing_look_the_same(running: Api, database_url: str) -> None:
    """CONTRACT 13, B21: another tenant's id, a random id, a malformed one: one 404, also for cancel."""
    mine = await _admitted(running)
    stranger = running.of(await make_key(database_url, tenant="other"))
    strange = OperationId.new(9)
    ids = [mine, str(strange), "op_", "x", str(uuid4()), mine.upper(), "op_%00", f"{mine}%20"]
    bodies = []
    for id in ids:
        for answer in (await stranger.get(id), await stranger.cancel(id)):
            assert answer.status_code == 404, id
            bodies.append({**answer.json(), "instance": ""})
    assert all(body == bodies[0] for body in bodies)
    assert bodies[0]["code"] == "operation-not-found"
    assert (await running.get(mine)).json()["state"] == "pending"


async def test_percent_encoded_ids(running: Api) -> None:
    """CONTRACT 14, B42: an id in percent form is the same id; no slash form redirects."""
    id = await _admitted(running)
    encoded = "".join(f"%{byte:02X}" for byte in id.encode())
    assert (await running.get(encoded)).json()["id"] == id
    for method, path in (("POST", "/v1/operations/"), ("GET", f"/v1/operations/{id}/")):
        answer = await running.http.request(method, path)
        assert answer.status_code == 404
        assert "Location" not in answer.headers


FORGED = {
    "X-Forwarded-Host": "evil.test",
    "X-Forwarded-Proto": "gopher",
    "X-Forwarded-Prefix": "/evil",
    "Forwarded": "host=evil.test;proto=http",
    "Host": "evil.test",
}


@pytest.mark.parametrize(
    ("public_url", "root_path", "prefix"),
    [
        ("", "", ""),
        ("", "/pay", "/pay"),
        ("https://api.example.com", "", "https://api.example.com"),
        ("https://api.example.com/pay/", "/inner", "https://api.example.com/pay"),
    ],
)
async def test_links(public_url: str, root_path: str, prefix: str, database_url: str) -> None:
    """CONTRACT 14, B42: behind a proxy and a prefix; forged forwarding headers change nothing."""
    async with api(database_url, root_path=root_path, public_url=public_url) as running:
        base = httpx.URL(f"http://fencepost.test{root_path}/")
        running.http.base_url = base
        answer = await running.post(charge(), key="k", headers=FORGED)
        id = answer.json()["id"]
        path = f"{prefix}/v1/operations/{id}"
        assert answer.headers["Location"] == path
        assert answer.json()["links"] == {
            "self": path,
            "cancel": f"{path}/cancel",
            "type": f"{prefix}/v1/operation-types?type=payments.charge",
        }
        assert "evil" not in answer.text + str(answer.headers)
        mismatch = await running.post(charge(7), key="k")
        assert mismatch.json()["operation"]["href"] == path
        assert mismatch.json()["type"] == f"{prefix}/problems/idempotency-key-reused"
        if not public_url:  # a strict client follows Location as it stands
            followed = await running.http.get(f"http://fencepost.test{answer.headers['Location']}")
            assert followed.json()["id"] == id


async def test_long_poll_sees_the_change(running: Api, database_url: str) -> None:
    """CONTRACT 12: held until the representation changes, which a notice or the slow poll tells."""
    id = await _admitted(running)
    answers: list[httpx.Response] = []

    async def poll() -> None:
        answers.append(await running.get(id, Prefer="wait=30", If_None_Match='"v1"'))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(poll)
            await until(lambda: running.services.hub.waiting)
            assert not answers
            put_into(database_url, id, "running")
    assert (answers[0].status_code, answers[0].json()["state"]) == (200, "running")
    assert answers[0].headers["Preference-Applied"] == "wait=30"
    assert running.services.hub.waiting == 0


async def test_long_poll_answers_at_once(running: Api, database_url: str) -> None:
    """CONTRACT 12: what the client has not seen yet, and what is done, is not held back."""
    id = await _admitted(running)
    put_into(database_url, id, "running")
    with anyio.fail_after(5):
        assert (await running.get(id, Prefer="wait=30", If_None_Match='"v1"')).status_code == 200
        put_into(database_url, id, "succeeded")
        assert (await running.get(id, Prefer="wait=30")).json()["done"] is True
        same = await running.get(id, Prefer="wait=30", If_None_Match='"v3"')
        assert same.status_code == 304
        assert (await running.get("op_x", Prefer="wait=30")).status_code == 404


async def test_long_poll_in_vain(database_url: str) -> None:
    """CONTRACT 12: after N seconds what there is: 304 for who knows it, 200 for others. N is bounded."""
    async with api(database_url, max_wait_seconds=1) as running:
        id = await _admitted(running)
        started = time.monotonic()
        same = await running.get(id, Prefer="wait=99", If_None_Match='"v1"')
        assert (same.status_code, same.headers["Preference-Applied"]) == (304, "wait=1")
        assert 0.9 < time.monotonic() - started < 5
        assert (await running.get(id, Prefer="wait=1")).status_code == 200
        assert running.services.hub.waiting == 0


async def test_state_comes_from_one_snapshot(running: Api, database_url: str) -> None:
    """B43: reads and changes at the same time: the state never goes backwards and nothing is missing."""
    id = await _admitted(running)
    order = ["pending", "running", "uncertain", "succeeded"]
    seen: list[tuple[int, str]] = []

    async def poll() -> None:
        while not seen or seen[-1][1] != "succeeded":
            answer = await running.get(id)
            assert answer.status_code == 200
            seen.append((int(answer.headers["ETag"].strip('"v')), answer.json()["state"]))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(poll)
            for state in order[1:]:
                await anyio.to_thread.run_sync(put_into, database_url, id, state)
    assert {state for _, state in seen} <= set(order)
    for version, state in seen:
        assert order[version - 1] == state
