"""GET /v1/operations: filters, pages, look-up by key (CONTRACT 15; CASES.md K28)."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.support.api import Api, api, charge, make_key, put_into

pytestmark = pytest.mark.anyio


async def _list(running: Api, **parameters: Any) -> Any:
    answer = await running.http.get("/v1/operations", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _all(running: Api, **parameters: Any) -> list[str]:
    """Every id, following `next` as it stands."""
    page = await _list(running, **parameters)
    ids = [item["id"] for item in page["data"]]
    while page["next"] is not None:
        page = (await running.http.get(page["next"])).json()
        assert page["data"], "an empty page was promised"
        ids += [item["id"] for item in page["data"]]
    return ids


async def test_pages_on_equal_timestamps(running: Api, database_url: str) -> None:
    """CONTRACT 15: a page boundary on equal times loses and repeats nothing; microseconds count."""
    ids = [(await running.post(charge())).json()["id"] for _ in range(13)]
    with psycopg.connect(database_url, autocommit=True) as connection:
        # Three groups: two of equal times, a microsecond apart.
        connection.execute("UPDATE operations SET created_at = '2030-01-01T00:00:00.000001Z'")
        connection.execute(
            "UPDATE operations SET created_at = '2030-01-01T00:00:00.000002Z' WHERE id IN"
            " (SELECT id FROM operations ORDER BY id LIMIT 5)"
        )
        expected = [
            f"op_{row[0]}"
            for row in connection.execute(
                "SELECT id FROM operations ORDER BY created_at DESC, id DESC"
            )
        ]
    assert sorted(ids) == sorted(expected)
    for limit in (1, 2, 3, 5, 12, 13, 14, 100):
        assert await _all(running, limit=limit) == expected, limit


async def test_pages_are_stable_while_operations_arrive(running: Api) -> None:
    """CONTRACT 15: newest first; what arrives later is on no later page."""
    ids = [(await running.post(charge())).json()["id"] for _ in range(4)]
    page = await _list(running, limit=2)
    await running.post(charge())
    rest = (await running.http.get(page["next"])).json()
    assert [item["id"] for item in page["data"] + rest["data"]] == ids[::-1]
    assert rest["next"] is None


async def test_filters(running: Api, database_url: str) -> None:
    """CONTRACT, Resources: type, state, created_after, created_before, metadata.K."""
    one = (await running.post({**charge(), "metadata": {"order": "7", "é.x": "a b"}})).json()
    two = (
        await running.post(
            {
                "type": "payments.refund",
                "input": {"charge": "ch_1"},
                "metadata": {"order": "8"},
            }
        )
    ).json()
    put_into(database_url, two["id"], "succeeded")
    both = [two["id"], one["id"]]
    assert await _all(running) == both
    assert await _all(running, type="payments.charge") == [one["id"]]
    assert await _all(running, type="none") == []
    assert await _all(running, state="pending") == [one["id"]]
    assert await _all(running, state="succeeded") == [two["id"]]
    assert await _all(running, created_after=one["created_at"]) == [two["id"]]
    assert await _all(running, created_before=two["created_at"]) == [one["id"]]
    assert await _all(running, created_before=one["created_at"]) == []
    assert await _all(running, **{"metadata.order": "7"}) == [one["id"]]
    assert await _all(running, **{"metadata.é.x": "a b"}) == [one["id"]]
    assert await _all(running, **{"metadata.order": "7", "metadata.é.x": "b"}) == []
    page = await _list(running, limit=1, **{"metadata.order": "7"})
    assert page["next"] is None
    assert page["data"][0] == (await running.get(one["id"])).json()


async def test_next_keeps_the_filters(running: Api) -> None:
    """CONTRACT 15: following `next` goes on with what was asked for."""
    for order in "7787":
        await running.post({**charge(), "metadata": {"order": order}})
    assert len(await _all(running, limit=1, **{"metadata.order": "7"})) == 3


async def test_tenants_see_their_own(running: Api, database_url: str) -> None:
    """CONTRACT 6, 13: no list and no look-up shows another tenant's operation."""
    await running.post(charge(), key="k")
    stranger = running.of(await make_key(database_url, tenant="other"))
    assert (await stranger.http.get("/v1/operations")).json() == {"data": [], "next": None}
    found = await stranger.http.get(
        "/v1/operations",
        params={"type": "payments.charge"},
        headers={"Idempotency-Key": "k"},
    )
    assert found.json() == {"data": [], "next": None}


async def test_look_up_by_key(running: Api, database_url: str) -> None:
    """CONTRACT, Resources: an Idempotency-Key and a type find the operation, its tombstone, or nothing."""
    id = (await running.post(charge(), key="k")).json()["id"]

    async def found(key: str, **parameters: str) -> Any:
        return await running.http.get(
            "/v1/operations", params=parameters, headers={"Idempotency-Key": key}
        )

    for key in ("k", '"k"'):
        answer = await found(key, type="payments.charge")
        assert [item["id"] for item in answer.json()["data"]] == [id]
        assert answer.json()["next"] is None
    assert (await found("K", type="payments.charge")).json()["data"] == []
    assert (await found("k", type="payments.refund")).json()["data"] == []
    put_into(database_url, id, "tombstone")
    assert (await found("k", type="payments.charge")).json()["data"][0]["purged"] is True
    assert (await found("k")).json()["code"] == "invalid-query"
    assert (await found("k", type="payments.charge", limit="1")).json()["code"] == "invalid-query"
    malformed = await found("a b", type="payments.charge")
    assert malformed.json()["code"] == "idempotency-key-malformed"


BAD = {
    "limit 0": {"limit": "0"},
    "limit 101": {"limit": "101"},
    "limit sign": {"limit": "+1"},
    "limit digits": {"limit": "\u0661"},
    "state": {"state": "sleeping"},
    "time": {"created_after": "yesterday"},
    "time without zone": {"created_after": "2030-01-01T00:00:00"},
    "time as number": {"created_before": "1700000000"},
    "time out of range": {"created_before": "0001-01-01T00:00:00+14:00"},
    "no such day": {"created_before": "2030-02-31T00:00:00Z"},
    "cursor": {"cursor": "x"},
    "cursor of zeros": {"cursor": "_" * 32 + "="},
    "cursor out of range": {"cursor": "f" + "_" * 31},
    "unknown": {"limt": "1"},
    "NUL in type": {"type": "a\0"},
    "NUL in metadata": {"metadata.a": "\0"},
    "NUL in a name": {"metadata.\0": "a"},
    "no metadata name": {"metadata.": "a"},
    "long": {"type": "x" * 2_000},
    "empty": {"type": ""},
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_queries(name: str, shared: Api) -> None:
    """CONTRACT 15, 18, B21: 400 with the parameter named, never a 500, nothing repeated."""
    answer = await shared.http.get("/v1/operations", params=BAD[name])
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid-query")
    [(parameter, value)] = BAD[name].items()
    shown = answer.json()["errors"][0]
    assert shown["detail"]
    assert parameter not in ("limt",) or shown["parameter"] == ""
    if len(value) > 3:
        assert value not in answer.text


async def test_repeated_parameter(running: Api) -> None:
    """CONTRACT 15: two values of one parameter have no meaning."""
    answer = await running.http.get("/v1/operations?state=pending&state=failed")
    assert answer.json()["code"] == "invalid-query"


async def test_next_under_a_prefix(database_url: str) -> None:
    """CONTRACT 14, 15: `next` is a link like any other."""
    async with api(database_url, public_url="https://api.example.com/pay") as running:
        for _ in range(2):
            await running.post(charge())
        page = await _list(running, limit=1)
    assert page["next"].startswith("https://api.example.com/pay/v1/operations?limit=1&cursor=")
