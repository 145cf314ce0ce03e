"""The database goes away: before, at and after the commit (CONTRACT 10; R13; CASES.md B14 e, K21)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import psycopg
import pytest

from tests.support.api import Api, api, charge, count, put_into, until
from tests.support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.anyio

ADMISSION = b"INSERT INTO operations"


@pytest.fixture
async def behind(database_url: str) -> AsyncIterator[tuple[Api, TcpProxy]]:
    """The API in this process, with its database behind a proxy."""
    async with (
        TcpProxy.before(database_url) as (proxy, url),
        api(url, database_timeout_seconds=1.0, poll_interval_seconds=0.1) as running,
    ):
        await running.post(charge(), key="warm")
        yield running, proxy


@pytest.mark.slow
async def test_down_and_up(behind: tuple[Api, TcpProxy], database_url: str) -> None:
    """CONTRACT 10, B14 e: 503 and no row while it is down; the same request under the same key afterwards."""
    running, proxy = behind
    id = (await running.post(charge(), key="before")).json()["id"]
    rows = count(database_url)
    await proxy.close_door()
    for answer in (
        await running.post(charge(), key="k"),
        await running.get(id),
        await running.http.get("/v1/operations"),
        await running.cancel(id),
        await running.http.get("/readyz"),
    ):
        assert answer.status_code == 503
        body = answer.json()
        assert (body["code"], body["retryable"]) == ("store-unavailable", True)
        assert int(answer.headers["Retry-After"]) > 0
        assert body["key_bound"] is False
        assert "state" not in body, "an outage cannot be taken for an operation's failure"
    assert (await running.http.get("/livez")).status_code == 200
    metrics = await running.http.get("/metrics")
    assert metrics.status_code == 200
    assert "fencepost_store_errors_total" in metrics.text
    assert count(database_url) == rows
    proxy.open_door()

    async def admitted() -> bool:
        return (await running.post(charge(), key="k")).status_code == 202

    await until(admitted, 20)
    assert count(database_url) == rows + 1
    assert (await running.get(id)).json()["state"] == "pending"


async def test_commit_reached_the_server(behind: tuple[Api, TcpProxy], database_url: str) -> None:
    """CONTRACT 10, R13: the connection is lost at COMMIT, which stands: admitted, once, by this request."""
    running, proxy = behind
    proxy.cut_after_commit(ADMISSION)
    answer = await running.post(charge(), key="k")
    assert answer.status_code == 202
    assert "Idempotent-Replayed" not in answer.headers, "the operation is this request's own"
    assert proxy.cuts == 1
    assert count(database_url) == 2
    again = await running.post(charge(), key="k")
    assert again.json()["id"] == answer.json()["id"]


async def test_commit_never_arrived(behind: tuple[Api, TcpProxy], database_url: str) -> None:
    """CONTRACT 10, R13: the connection is lost before COMMIT: rolled back, and admitted by the next try."""
    running, proxy = behind
    proxy.cut_before_commit(ADMISSION)
    answer = await running.post(charge(), key="k")
    assert (answer.status_code, proxy.cuts) == (202, 1)
    assert count(database_url) == 2
    assert count(database_url, "SELECT count(*) FROM work") == 2


async def test_another_body_won_meanwhile(behind: tuple[Api, TcpProxy], database_url: str) -> None:
    """R13 (b): mine was rolled back and another body took the key: a mismatch, not my id."""
    running, proxy = behind
    proxy.cut_before_commit(ADMISSION)
    flush = running.services.admission._group._flush
    calls = 0

    async def second_time_too_late(batch: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            async with api(database_url) as other:
                assert (await other.post(charge(7), key="k")).status_code == 202
        return await flush(batch)  # type: ignore[arg-type]

    running.services.admission._group._flush = second_time_too_late  # type: ignore[assignment]
    answer = await running.post(charge(), key="k")
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency-key-reused")
    assert calls == 2
    assert count(database_url) == 2


async def test_unknown_until_the_end(behind: tuple[Api, TcpProxy], database_url: str) -> None:
    """CONTRACT 10: it cannot be settled in time: 503 with key_bound unknown; the retry finds out."""
    running, proxy = behind
    proxy.cut_after_commit(ADMISSION)
    flush = running.services.admission._group._flush

    async def then_down(batch: object) -> object:
        try:
            return await flush(batch)  # type: ignore[arg-type]
        finally:
            await proxy.close_door()

    running.services.admission._group._flush = then_down  # type: ignore[assignment]
    answer = await running.post(charge(), key="k")
    assert (answer.status_code, answer.json()["code"]) == (503, "store-unavailable")
    assert answer.json()["key_bound"] == "unknown"
    assert count(database_url) == 2, "it stands, and nobody could know"
    running.services.admission._group._flush = flush
    proxy.open_door()

    async def replayed() -> bool:
        again = await running.post(charge(), key="k")
        return again.status_code == 202 and again.headers.get("Idempotent-Replayed") == "true"

    await until(replayed, 20)
    assert count(database_url) == 2


async def test_cancel_at_an_unknown_commit(behind: tuple[Api, TcpProxy], database_url: str) -> None:
    """CONTRACT 17, R17: the cancel that stood is found again: one action, one end."""
    running, proxy = behind
    id = (await running.post(charge(), key="k")).json()["id"]
    proxy.cut_after_commit(b"INSERT INTO operator_actions")
    cancelled = await running.cancel(id)
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert proxy.cuts == 1
    assert count(database_url, "SELECT count(*) FROM operator_actions") == 1


async def test_a_held_row_is_too_slow(behind: tuple[Api, TcpProxy], database_url: str) -> None:
    """CONTRACT 10: somebody holds the table for longer than the time-out: 503, no wait for ever."""
    running, _ = behind
    async with await psycopg.AsyncConnection.connect(database_url) as holder:
        await holder.execute("LOCK TABLE operations IN ACCESS EXCLUSIVE MODE")
        with anyio.fail_after(15):
            answer = await running.post(charge(), key="k")
        assert (answer.status_code, answer.json()["code"]) == (503, "store-unavailable")
        assert answer.json()["key_bound"] is False
    assert (await running.post(charge(), key="k")).status_code == 202


async def test_long_poll_survives_an_outage(
    behind: tuple[Api, TcpProxy], database_url: str
) -> None:
    """CONTRACT 12, B37: the listener links again, and the slow poll would find the change anyway."""
    running, proxy = behind
    id = (await running.post(charge(), key="k")).json()["id"]
    answers = []

    async def poll() -> None:
        answers.append(await running.get(id, Prefer="wait=30"))

    with anyio.fail_after(25):
        async with anyio.create_task_group() as group:
            group.start_soon(poll)
            await until(lambda: running.services.hub.waiting)
            await proxy.close_door()
            put_into(database_url, id, "running")
            await anyio.sleep(0.3)
            assert not answers
            proxy.open_door()
    assert answers[0].json()["state"] == "running"
