"""API keys at the door (CONTRACT 21; CASES.md B14 b, B51)."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import anyio
import anyio.lowlevel
import psycopg
import pytest

from app.domain.errors import InvalidInput
from app.service import credentials
from app.service.credentials import Caller, Verifier
from app.storage.database import Database
from tests.support.api import TENANT, Api, charge, count, make_key
from tests.support.races import session

pytestmark = pytest.mark.anyio


async def _revoked(database_url: str) -> str:
    secret = await make_key(database_url)
    async with session(database_url) as database:
        assert await credentials.revoke(database, secret.split("_")[2]) is not None
    return secret


async def _refusals(database_url: str) -> dict[str, list[tuple[bytes, bytes]]]:
    good = await make_key(database_url)
    expired = await make_key(database_url, expires_in_seconds=0.001)
    prefix, other = good.rsplit("_", 1)[0], (await make_key(database_url)).rsplit("_", 1)[1]

    def bearer(text: bytes | str) -> list[tuple[bytes, bytes]]:
        raw = text if isinstance(text, bytes) else text.encode()
        return [(b"Authorization", b"Bearer " + raw)]

    return {
        "none": [],
        "empty": [(b"Authorization", b"")],
        "scheme only": [(b"Authorization", b"Bearer")],
        "basic": [(b"Authorization", b"Basic " + good.encode())],
        "no scheme": [(b"Authorization", good.encode())],
        "unknown id": bearer(f"fp_test_{'0' * 16}_{other}"),
        "right id, wrong secret": bearer(f"{prefix}_{other}"),
        "another environment": bearer(good.replace("fp_test_", "fp_production_")),
        "more behind": bearer(good + "x"),
        "cut off": bearer(good[:-1]),
        "two words": bearer(f"{good} {good}"),
        "non-ASCII": bearer(good.encode() + b"\xc3\xa9"),
        "NUL": bearer(good.encode() + b"\0"),
        "8 kB": bearer(b"fp_test_" + b"a" * 8192),
        "revoked": bearer(await _revoked(database_url)),
        "expired": bearer(expired),
        "two lines": bearer(good) + bearer(good),
        "two lines, one bad": bearer(good) + bearer("x"),
    }


async def test_one_refusal_for_all_reasons(running: Api, database_url: str) -> None:
    """CONTRACT 21, B51: the very same 401, whatever is wrong; nothing of the key in it; no row."""
    bodies = set()
    del running.http.headers["Authorization"]
    for name, lines in (await _refusals(database_url)).items():
        answer = await running.http.post(
            "/v1/operations",
            json=charge(),
            headers=[*lines, (b"Idempotency-Key", b"k")],
        )
        assert answer.status_code == 401, name
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        bodies.add(answer.content)
    assert len(bodies) == 1
    assert b"fp_" not in bodies.pop()
    assert count(database_url) == 0
    good = {"Authorization": f"bearer  {running.secret} "}
    again = await running.post(charge(), key="k", headers=good)
    assert again.status_code == 202


async def test_a_key_in_the_query_is_no_key(running: Api) -> None:
    """B51: and it is not repeated either."""
    secret = running.secret
    del running.http.headers["Authorization"]
    answer = await running.http.get(f"/v1/operations?api_key={secret}&{secret}=1")
    assert answer.status_code == 401
    assert secret not in answer.text
    running.http.headers["Authorization"] = f"Bearer {secret}"
    answer = await running.http.get(f"/v1/operations?api_key={secret}&{secret}=1")
    assert answer.status_code == 400
    assert secret not in answer.text


@pytest.mark.parametrize(
    ("scope", "method", "path"),
    [
        ("operations:write", "POST", "/v1/operations"),
        ("operations:read", "GET", "/v1/operations"),
        ("operations:read", "GET", "/v1/operations/op_x"),
        ("operations:write", "POST", "/v1/operations/op_x/cancel"),
        ("operations:read", "GET", "/v1/operation-types"),
    ],
)
async def test_scopes(scope: str, method: str, path: str, shared: Api) -> None:
    """CONTRACT, Resources: each route needs its scope and no other."""
    others = tuple(name for name in credentials.SCOPES if name != scope)
    without = shared.of(await make_key(shared.database_url, scopes=others))
    answer = await without.http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (403, "insufficient-scope")
    with_it = shared.of(await make_key(shared.database_url, scopes=(scope,)))
    assert (await with_it.http.request(method, path)).status_code not in (401, 403)
    nobody = await shared.of("x").http.request(method, path)
    assert nobody.status_code == 401


async def test_what_is_stored(database_url: str) -> None:
    """CONTRACT 21: `fp_<env>_<id>_<secret>`, enough chance, and only a digest in the database."""
    secret = await make_key(database_url)
    match = re.fullmatch(r"fp_test_([0-9a-f]{16})_([A-Za-z0-9]{40})", secret)
    assert match is not None  # 62**40 is more than 2**192
    with psycopg.connect(database_url) as connection:
        row = connection.execute("SELECT * FROM api_keys").fetchone()
        digest = connection.execute("SELECT secret_digest FROM api_keys").fetchone()
    assert row is not None
    assert match[2] not in str(row)
    assert digest == (hashlib.sha256(match[2].encode()).digest(),)
    assert len({(await make_key(database_url)) for _ in range(5)}) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": ""},
        {"tenant": "a b"},
        {"tenant": "x" * 101},
        {"scopes": ()},
        {"scopes": ("operations:all",)},
        {"name": "a\0"},
        {"expires_in_seconds": 0},
        {"expires_in_seconds": float("nan")},
    ],
)
async def test_issue_refuses(wrong: dict[str, Any], database_url: str) -> None:
    """CONTRACT 21: nonsense is refused before a key exists."""
    given: dict[str, Any] = {
        "environment": "test",
        "tenant": TENANT,
        "scopes": ("operator",),
        "name": "",
        "expires_in_seconds": None,
    }
    async with session(database_url) as database:
        with pytest.raises(InvalidInput):
            await credentials.issue(database, **(given | wrong))
        assert await credentials.every(database) == []


class CountingDatabase(Database):
    """Counts transactions."""

    transactions = 0

    def transaction(self) -> Any:
        """As always, and one more."""
        self.transactions += 1
        return super().transaction()


async def _verifier(database_url: str, **options: Any) -> tuple[CountingDatabase, Verifier]:
    database = CountingDatabase(database_url, application="test", pool_size=3)
    await database.open()
    return database, Verifier(database, "test", **options)


async def test_verify_is_one_read_per_span(database_url: str) -> None:
    """CONTRACT 21: a thousand requests with one key are one read, and one for an id that does not exist."""
    secret = await make_key(database_url)
    database, verifier = await _verifier(database_url)
    try:
        callers: list[Caller | None] = []

        async def ask() -> None:
            callers.append(await verifier.verify(secret))

        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(ask)
        assert database.transactions == 1
        assert {caller and caller.tenant for caller in callers} == {TENANT}
        unknown = f"fp_test_{'0' * 16}_{'x' * 40}"
        for _ in range(5):
            assert await verifier.verify(unknown) is None
        assert database.transactions == 2, (
            "an id that does not exist costs what one that does costs"
        )
        for malformed in ("", "x", secret + "\n", secret.upper(), "fp_test_é_x"):
            assert await verifier.verify(malformed) is None
        assert database.transactions == 2
    finally:
        await database.close()


async def test_what_is_known_is_bounded(database_url: str) -> None:
    """CONTRACT 21: a flood of made-up ids does not fill the memory."""
    database, verifier = await _verifier(database_url, known_keys=3)
    try:
        for number in range(10):
            await verifier.verify(f"fp_test_{number:016x}_{'x' * 40}")
        assert len(verifier._known) == 3
    finally:
        await database.close()


async def test_revocation_takes_effect_within_its_time(database_url: str) -> None:
    """CONTRACT 21: what is known of a key is at most so old; revoked and expired keys then fail."""
    assert credentials.MAX_AGE_SECONDS < 5
    secret = await make_key(database_url)
    database, verifier = await _verifier(database_url, max_age_seconds=0.3)
    try:
        assert await verifier.verify(secret) is not None
        await credentials.revoke(database, secret.split("_")[2])
        with anyio.fail_after(2):
            while await verifier.verify(secret) is not None:
                await anyio.sleep(0.02)
        brief = await make_key(database_url, expires_in_seconds=0.2)
        with anyio.fail_after(2):
            while await verifier.verify(brief) is not None:
                await anyio.sleep(0.02)
    finally:
        await database.close()


async def test_one_hang_up_does_not_disturb_the_others(database_url: str) -> None:
    """K22: the read that several requests wait for is not cancelled with one of them."""
    secret = await make_key(database_url)
    database, verifier = await _verifier(database_url)
    try:
        async with anyio.create_task_group() as group:

            async def impatient() -> None:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await verifier.verify(secret)

            group.start_soon(impatient)
            await anyio.lowlevel.checkpoint()
            assert await verifier.verify(secret) is not None
    finally:
        await database.close()


async def test_revoke(database_url: str) -> None:
    """CONTRACT 21: revoking twice keeps the first time; there is no key of an odd id."""
    secret = await make_key(database_url)
    async with session(database_url) as database:
        first = await credentials.revoke(database, secret.split("_")[2])
        second = await credentials.revoke(database, secret.split("_")[2])
        assert first is not None
        assert first == second
        assert not first.usable
        for odd in ("nothing", "a\0", "\ud800"):
            assert await credentials.revoke(database, odd) is None
        assert [key.id for key in await credentials.every(database)] == [first.id]
