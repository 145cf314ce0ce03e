"""API processes as processes: hang-ups, crashes, stops, logs, metrics.

CONTRACT 3, 12, 18, 21; CASES.md B08 a, B35, B51, K22. All of it over real connections to real uvicorn
processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import psycopg
import pytest

from tests.support.api import (
    charge,
    count,
    fresh_key,
    make_key,
    put_into,
    served,
    two,
    until,
)
from tests.support.races import until_blocked

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def _all(*posts: Any) -> list[httpx.Response]:
    return list(await asyncio.gather(*posts))


def _request(secret: str, key: str, body: bytes) -> bytes:
    head = (
        "POST /v1/operations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {secret}\r\nIdempotency-Key: {key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _hang_up(port: int, request: bytes, seconds: float) -> None:
    """Send, and cut the connection with a reset."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    # Nothing lingers: closing discards what is unsent and resets.
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    try:
        writer.write(request)
        await asyncio.sleep(seconds)
    finally:
        writer.transport.abort()


def _sessions(database_url: str, state: str) -> int:
    return count(
        database_url,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        f" AND application_name = 'fencepost-api' AND {state}",
    )


async def test_clients_hang_up(database_url: str, tmp_path: Path) -> None:
    """B35: 300 POSTs and 300 GETs reset after 0 to 50 ms, a pool of five: nothing leaks, all go on."""
    draw = random.Random(35)
    secret = await make_key(database_url)
    keys = [f"hang-{number}" for number in range(300)]
    body = json.dumps(charge()).encode()
    with served(database_url, tmp_path / "log", database_pool_size=5) as process:
        async with process.client(secret) as client:
            id = (await client.post(charge())).json()["id"]
            get = (
                f"GET /v1/operations/{id} HTTP/1.1\r\nHost: x\r\n"
                f"Authorization: Bearer {secret}\r\n\r\n"
            ).encode()
            posts = [_request(secret, key, body) for key in keys]
            cut = [request[: draw.randrange(len(request))] for request in posts[:30]]
            for first in range(0, 300, 50):
                group = posts[first : first + 50] + [get] * 50 + cut[first // 10 : first // 10 + 5]
                await asyncio.gather(
                    *(_hang_up(process.port, one, draw.random() * 0.05) for one in group)
                )
            await until(
                lambda: (
                    _sessions(database_url, "state = 'active'") == 0
                    and _sessions(database_url, "state LIKE 'idle in transaction%'") == 0
                )
            )
            assert _sessions(database_url, "true") <= 5 + 1, "the pool, and the listener"
            normal = await _all(*(client.post(charge()) for _ in range(20)))
            assert {answer.status_code for answer in normal} == {202}
            assert count(database_url) == count(database_url, "SELECT count(*) FROM work")
            again = await _all(*(client.post(charge(), key=key) for key in keys))
            assert {answer.status_code for answer in again} == {202}
    assert count(database_url) == 300 + 21
    assert "unhandled_request" not in (tmp_path / "log").read_text()


async def test_long_polls_of_clients_who_left(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 12, B35: a client that hangs up ends its wait at once; those who stay are answered."""
    secret = await make_key(database_url)
    log = tmp_path / "log"
    with served(database_url, log, log_level="info") as process:
        async with process.client(secret) as client:
            id = (await client.post(charge())).json()["id"]
            poll = (
                f"GET /v1/operations/{id} HTTP/1.1\r\nHost: x\r\nPrefer: wait=30\r\n"
                f"Authorization: Bearer {secret}\r\n\r\n"
            ).encode()
            staying = asyncio.ensure_future(client.get(id, Prefer="wait=30"))
            started = time.monotonic()
            await asyncio.gather(*(_hang_up(process.port, poll, 0.3) for _ in range(50)))
            await until(lambda: log.read_text().count('"status": 499') == 50, 10)
            assert time.monotonic() - started < 15
            assert not staying.done()
            put_into(database_url, id, "running")
            assert (await staying).json()["state"] == "running"


async def test_stop_ends_long_polls(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 12: SIGTERM answers every long poll at once with what there is, and the process is gone."""
    secret = await make_key(database_url)
    with served(database_url, tmp_path / "log") as process:
        async with process.client(secret) as client:
            id = (await client.post(charge())).json()["id"]
            polls = [asyncio.ensure_future(client.get(id, Prefer="wait=60")) for _ in range(20)]
            posts = [
                asyncio.ensure_future(client.post(charge(), headers={"Prefer": "wait=60"}))
                for _ in range(5)
            ]
            await until(lambda: count(database_url) == 6)
            await anyio.sleep(0.3)
            started = time.monotonic()
            status = await anyio.to_thread.run_sync(process.stop)
            assert time.monotonic() - started < 5
            answers = await _all(*polls, *posts)
    assert {answer.status_code for answer in answers[:20]} == {200}
    assert {answer.status_code for answer in answers[20:]} == {202}
    assert status in (0, -15)


async def test_stop_lets_commits_finish(database_url: str, tmp_path: Path) -> None:
    """B35: SIGTERM while twenty POSTs wait for the database: all of them are answered, and stand."""
    secret = await make_key(database_url)
    with served(database_url, tmp_path / "log") as process:
        async with (
            process.client(secret) as client,
            await psycopg.AsyncConnection.connect(database_url) as holder,
        ):
            await holder.execute("LOCK TABLE operations IN ACCESS EXCLUSIVE MODE")
            posts = [asyncio.ensure_future(client.post(charge())) for _ in range(20)]
            await until_blocked(database_url)
            await anyio.sleep(
                0.2
            )  # the others must have been read too; they leave no trace outside
            process.running.terminate()
            await anyio.sleep(0.3)
            assert process.running.poll() is None
            await holder.rollback()
            answers = await _all(*posts)
            await anyio.to_thread.run_sync(process.running.wait)
    assert {answer.status_code for answer in answers} == {202}
    assert count(database_url) == 20


@pytest.mark.parametrize(
    ("window", "stands"),
    [("before_admit_commit", 0), ("after_admit_commit", 1), ("before_admit_answer", 1)],
)
async def test_killed_around_the_commit(
    window: str, stands: int, database_url: str, tmp_path: Path
) -> None:
    """CONTRACT 3, B08 a: kill -9 in each window of an admission: the retry gets one id, at once."""
    secret = await make_key(database_url)
    with served(database_url, tmp_path / "log", failpoints=f"{window}=kill") as victim:
        async with victim.client(secret) as client:
            with pytest.raises(httpx.HTTPError):
                await client.post(charge(), key="k")
        assert await anyio.to_thread.run_sync(victim.running.wait) == -9
    assert count(database_url) == stands
    with served(database_url, tmp_path / "log") as process:
        async with process.client(secret) as client:
            answer = await client.post(charge(), key="k")
    assert answer.status_code == 202
    assert ("Idempotent-Replayed" in answer.headers) is bool(stands)
    assert count(database_url) == 1


async def test_no_secret_in_any_log(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 21, B51: keys, idempotency keys and payloads appear in no log line, error or metric."""
    secret = await make_key(database_url)
    log, key, word = tmp_path / "log", fresh_key(), "tok_payload_secret"
    body = charge(source=word, description="words of the payload")
    seen: list[str] = []
    with served(database_url, log, log_level="debug") as process:
        async with (
            process.client(secret) as client,
            httpx.AsyncClient(base_url=process.url) as bare,
        ):
            post = "/v1/operations"
            posted = {"Idempotency-Key": key, "Content-Type": "application/json"}
            good = {"Authorization": f"Bearer {secret}"}
            first = await client.post(body, key=key)
            assert first.status_code == 202
            tail = secret.rsplit("_", 1)[1]
            tries: list[dict[str, Any]] = [
                {"headers": {**posted, "Authorization": f"Bearer {secret}x"}},
                {"headers": {**posted, "Authorization": f"Bearer fp_test_{'0' * 16}_{tail}"}},
                {"headers": {**posted, "Authorization": f"Basic {secret}"}},
                {"headers": {**posted}, "params": {"api_key": secret, secret: "1"}},
                {"headers": [*posted.items(), *good.items(), *good.items()]},
                {"headers": {**posted, **good}, "content": json.dumps({**body, secret: 1})},
                {"headers": {**posted, **good}, "content": f'{{"type": "{word}"'},
                {"headers": {**posted, **good}, "content": json.dumps({**body, "type": word})},
                {"headers": {**posted, **good}, "content": json.dumps(charge(7, source=word))},
            ]
            for options in tries:
                answer = await bare.post(post, **options)
                assert answer.status_code >= 400
                if secret not in str(options.get("content")):
                    seen.append(answer.text + str(answer.headers))
            seen.append((await bare.get(f"{post}?key={secret}", headers=good)).text)
            seen.append((await bare.get(f"/{secret}/nothing")).headers.__repr__())
            with psycopg.connect(database_url, autocommit=True) as connection:
                # A 500 with a valid key, from the depth of the driver, with the row in the error's text.
                connection.execute(
                    "ALTER TABLE operations ADD CONSTRAINT broken CHECK (false) NOT VALID"
                )
                failed = await bare.post(
                    post,
                    headers={**posted, **good, "Idempotency-Key": f"{key}-2"},
                    content=json.dumps(body),
                )
                connection.execute("ALTER TABLE operations DROP CONSTRAINT broken")
            assert failed.status_code == 500
            seen.append(failed.text)
            seen.append((await bare.get("/metrics")).text)
        process.stop()
    text = log.read_text()
    assert "unhandled_request" in text
    assert first.json()["id"] in text, "the log was looked at in the right place"
    for hidden in (secret, tail, key, word, "words of the payload"):
        assert hidden not in text
        assert all(hidden not in shown for shown in seen), hidden


async def test_metrics_of_all_processes(database_url: str, tmp_path: Path) -> None:
    """CONTRACT, Resources: with several processes each scrape shows the sum, whichever answers."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    async with two(database_url, tmp_path, PROMETHEUS_MULTIPROC_DIR=folder) as (one, other):
        for client in (one, one, other):
            await client.post(charge())
        for client in (one, other):
            text = (await client.http.get("/metrics")).text
            line = 'fencepost_admissions_total{outcome="new",type="payments.charge"} 3.0'
            assert line in text
            assert text.count('fencepost_live_operations{state="pending"} 3.0') == 1


async def test_waiting_is_cheap(database_url: str, tmp_path: Path) -> None:
    """CONTRACT 12: many waiters on a small pool: no connection held, short requests go on, all are told."""
    secret = await make_key(database_url)
    limits = httpx.Limits(max_connections=None)
    with served(database_url, tmp_path / "log", database_pool_size=3) as process:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(process.client(secret, limits=limits))
            ids = [(await client.post(charge())).json()["id"] for _ in range(10)]
            polls = [
                asyncio.ensure_future(client.get(ids[number % 10], Prefer="wait=60"))
                for number in range(100)
            ]
            await anyio.sleep(1.0)
            assert _sessions(database_url, "true") <= 3 + 1
            started = time.monotonic()
            assert (await client.post(charge())).status_code == 202
            assert time.monotonic() - started < 1
            assert not any(poll.done() for poll in polls)
            for id in ids:
                put_into(database_url, id, "running")
            with anyio.fail_after(60):
                answers = await _all(*polls)
    assert {answer.json()["state"] for answer in answers} == {"running"}


async def test_leaves_when_the_database_is_adopted(database_url: str, tmp_path: Path) -> None:
    """R16: the epoch changes while it serves: the process stops by itself, and says why."""
    with served(database_url, tmp_path / "log") as process:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("UPDATE installation SET epoch = epoch + 1")
        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(process.running.wait, abandon_on_cancel=True)
    assert "adopted" in (tmp_path / "log").read_text()
