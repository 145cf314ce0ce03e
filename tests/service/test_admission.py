"""Admission as a use case: versions, batches, what a key is bound to (CONTRACT 4 to 7; K7, K8; R13, R17)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any

import anyio
import psycopg
import pytest
from pydantic import BaseModel, ConfigDict, Field

from app.domain.errors import StoreUnavailable
from app.domain.identity import IdempotencyKey, OperationId, Scope
from app.domain.lifecycle import State
from app.domain.profile import ProviderClass
from app.failpoints import Failpoints
from app.service.admission import (
    Admitted,
    Draft,
    Gone,
    HolderUnreadable,
    Invalid,
    Mismatched,
    NotUnderstood,
    Replayed,
    TypeUnknown,
)
from app.storage import operations, views
from app.telemetry import Metric
from tests.support.core import House, ScriptedProvider, house, profile_of, type_of
from tests.support.factories import insert, query
from tests.support.races import until_blocked

pytestmark = pytest.mark.anyio


class Tighter(BaseModel):
    """Version 2 of the test type's input: small amounts only, and a new member with a default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    amount: Annotated[int, Field(le=50)]
    note: str = "none"


OLD = type_of()
NEW = replace(OLD, version=2, input=Tighter)


@asynccontextmanager
async def admitting(url: str, *types: Any, **options: Any) -> AsyncIterator[House]:
    """A process that knows these types."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    async with house(url, provider, types=types or (OLD,), **options) as opened:
        yield opened


def _input(**members: Any) -> dict[str, Any]:
    return {"input": members}


async def test_one_admission_then_repeats(database_url: str) -> None:
    """CONTRACT 3 to 5, I1: new, replayed, mismatched; each is counted, and only the first writes."""
    async with admitting(database_url) as opened:
        first = await opened.submit("k")
        assert isinstance(first, Admitted)
        again = await opened.submit("k")
        assert isinstance(again, Replayed)
        assert again.view.id == first.view.id
        assert await opened.submit("k", **_input(amount=7)) == Mismatched(first.view.id)
        assert await opened.submit("k", type="test.none") == TypeUnknown()
        for outcome in ("new", "replayed", "mismatched"):
            assert opened.count(Metric.ADMISSIONS, type="test.one", outcome=outcome) == 1
        assert opened.count(Metric.ADMISSIONS, type="unknown", outcome="refused") == 1
        assert opened.count(Metric.ADMISSIONS, type="test.none", outcome="refused") == 0
    assert query(database_url, "SELECT count(*) FROM operations") == [(1,)]
    assert query(database_url, "SELECT count(*) FROM work") == [(1,)]


async def test_first_view_is_what_a_reader_sees(database_url: str) -> None:
    """CONTRACT 3, 13: the answer of the first POST needs no read, and differs from one in nothing."""
    members: dict[str, Any] = {
        "metadata": {"a": "é"},
        "priority": 0,
        "not_before": "2030-01-01T00:00:00Z",
    }
    async with admitting(database_url) as opened:
        answer = await opened.submit("k", **members)
        assert isinstance(answer, Admitted)
        assert await opened.view(answer.view.id) == answer.view


async def test_tightened_schema(database_url: str) -> None:
    """CONTRACT 7: a bound key is judged under the version it was admitted with, a fresh one not."""
    async with admitting(database_url, OLD) as before:
        first = await before.submit("k", **_input(amount=100))
        assert isinstance(first, Admitted)
    async with admitting(database_url, OLD, NEW) as after:
        again = await after.submit("k", **_input(amount=100))
        assert isinstance(again, Replayed)
        assert again.view.type_version == 1
        for amount in (99, 10):  # invalid and valid under version 2
            assert await after.submit("k", **_input(amount=amount)) == Mismatched(first.view.id)
        worse = await after.submit("k", **_input(amount="x"))
        assert isinstance(worse, Invalid)
        assert worse.key_bound is True
        fresh = await after.submit("fresh", **_input(amount=100))
        assert isinstance(fresh, Invalid)
        assert (fresh.key_bound, fresh.errors[0].pointer) == (False, "/input/amount")
        taken = await after.submit("fresh", **_input(amount=10))
        assert isinstance(taken, Admitted)
        assert taken.view.type_version == 2


async def test_new_optional_member(database_url: str) -> None:
    """CONTRACT 7: defaults are no part of the meaning, given or left out, before a deploy and after it."""
    async with admitting(database_url, OLD) as before:
        await before.submit("k", **_input(amount=10))
    async with admitting(database_url, OLD, NEW) as after:
        assert isinstance(await after.submit("k", **_input(amount=10)), Replayed)
        await after.submit("n", **_input(amount=10))
        assert isinstance(await after.submit("n", **_input(amount=10, note="none")), Replayed)
        assert isinstance(await after.submit("n", **_input(amount=10, note="other")), Mismatched)


async def test_version_not_known_here(database_url: str) -> None:
    """CONTRACT 7, I12: a newer type version or fingerprint algorithm is left alone."""
    async with admitting(database_url, OLD, NEW) as newer:
        first = await newer.submit("k", **_input(amount=10))
        assert isinstance(first, Admitted)
    async with admitting(database_url, OLD) as older:
        for amount in (10, 100):
            answer = await older.submit("k", **_input(amount=amount))
            assert answer == NotUnderstood(first.view.id)
        second = await older.submit("f", **_input(amount=10))
        assert isinstance(second, Admitted)
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("UPDATE operations SET fingerprint_version = 2")
        assert await older.submit("f", **_input(amount=10)) == NotUnderstood(second.view.id)


async def test_semantic_headers_are_meaning(database_url: str) -> None:
    """CONTRACT 7: the type's declared headers count, others do not."""
    async with admitting(database_url, replace(OLD, semantic_headers=("x-account",))) as opened:

        async def submit(**headers: str) -> Any:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            body = {"type": "test.one", **_input(amount=1)}
            return await opened.admission.submit(Draft("t", IdempotencyKey("k"), body, named))

        assert isinstance(await submit(x_account="1", x_other="1"), Admitted)
        assert isinstance(await submit(x_account="1", x_other="2"), Replayed)
        assert isinstance(await submit(x_account="2"), Mismatched)
        assert isinstance(await submit(), Mismatched)


async def test_gone(database_url: str) -> None:
    """CONTRACT 11: mismatch first, then 410: a tombstone answers its own request only."""
    async with admitting(database_url) as opened:
        id = await opened.admit("k")
        insert(database_url, state=State.SUCCEEDED)  # somebody else's, to be left alone
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("DELETE FROM work WHERE operation_id = %s", [id.uuid])
            connection.execute(
                "UPDATE operations SET state = 'failed', completed_at = now(), version = 2,"
                " idempotency_expires_at = now(), purged_at = now(), input = NULL, metadata = NULL,"
                " idempotency_key = NULL WHERE id = %s",
                [id.uuid],
            )
        gone = await opened.submit("k")
        assert isinstance(gone, Gone)
        assert (gone.view.id, gone.view.state, gone.view.purged) == (id, State.FAILED, True)
        assert await opened.submit("k", **_input(amount=7)) == Mismatched(id)


async def test_loser_that_finds_nobody_inserts_again(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13 (c): the holder is purged between the insert and the read: no 500, the key is taken anew."""
    async with admitting(database_url) as opened:
        old = await opened.admit("k")
        holders = operations.holders
        calls = 0

        async def purged_meanwhile(tx: Any, scopes: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                with psycopg.connect(database_url, autocommit=True) as connection:
                    connection.execute("DELETE FROM work")
                    connection.execute("DELETE FROM operations")
            return await holders(tx, scopes)

        monkeypatch.setattr(operations, "holders", purged_meanwhile)
        answer = await opened.submit("k")
    assert isinstance(answer, Admitted)
    assert answer.view.id != old
    assert calls == 1
    assert query(database_url, "SELECT count(*) FROM work") == [(1,)]


async def test_one_bad_item_does_not_fail_its_neighbours(database_url: str) -> None:
    """B21, R17: what PostgreSQL cannot store fails alone, though it went out in one batch with others."""
    async with admitting(database_url) as opened:
        body = {"type": "test.one", **_input(amount=1)}

        async def submit(tenant: str, key: str) -> Any:
            draft = Draft(tenant, IdempotencyKey(key), body, {})
            return await opened.admission.submit(draft)

        first = asyncio.ensure_future(submit("tenant", "first"))  # goes out alone
        tenants = ["tenant", "bad\0tenant", "tenant"]
        rest = await asyncio.gather(
            *(submit(tenant, str(number)) for number, tenant in enumerate(tenants)),
            return_exceptions=True,
        )
        assert isinstance(await first, Admitted)
        assert isinstance(rest[0], Admitted)
        assert isinstance(rest[1], psycopg.DataError)
        assert isinstance(rest[2], Admitted)
        assert opened.count(Metric.FLUSHES, verb="admit") > 1
    assert query(database_url, "SELECT count(*) FROM operations") == [(3,)]


async def test_batches(database_url: str) -> None:
    """R17: many at once go out in few transactions, duplicates within one batch included."""
    async with admitting(database_url) as opened:
        keys = [str(number % 50) for number in range(150)]
        answers = await asyncio.gather(*(opened.submit(key) for key in keys))
        assert sum(isinstance(answer, Admitted) for answer in answers) == 50
        assert sum(isinstance(answer, Replayed) for answer in answers) == 100
        assert opened.count(Metric.FLUSHES, verb="admit") < 10
    assert query(database_url, "SELECT count(*) FROM operations") == [(50,)]


async def test_hang_up_does_not_disturb(database_url: str) -> None:
    """K22: a caller cancelled while its batch is in flight: the batch goes on, its own row included."""
    async with admitting(database_url) as opened:
        scope = Scope("tenant", "test.one", IdempotencyKey("held"))
        async with await psycopg.AsyncConnection.connect(database_url) as holder:
            await holder.execute("LOCK TABLE operations IN ACCESS EXCLUSIVE MODE")
            async with anyio.create_task_group() as group:

                async def leave() -> None:
                    await opened.submit("held")

                group.start_soon(leave)
                await until_blocked(database_url)
                group.cancel_scope.cancel()
            await holder.rollback()
        await opened.admission.drain()
        assert query(database_url, "SELECT key_digest FROM operations") == [(scope.key.digest,)]
        assert isinstance(await opened.submit("held"), Replayed)


async def test_bound_but_unreadable(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRACT 10: the key is bound and the answer cannot be read: not the same as "nothing done"."""
    async with admitting(database_url) as opened:
        await opened.admit("k")

        async def away(*_: object) -> None:
            raise StoreUnavailable("gone")

        monkeypatch.setattr(views, "read", away)
        with pytest.raises(HolderUnreadable):
            await opened.submit("k")


async def test_windows_are_passed_in_order(database_url: str, tmp_path: Any) -> None:
    """DESIGN 6: the crash windows of an admission: before its commit, after it, before the answer."""
    gates = ",".join(
        f"{name}=gate:{tmp_path}"
        for name in ("before_admit_commit", "after_admit_commit", "before_admit_answer")
    )
    async with admitting(database_url, failpoints=Failpoints.parse(gates)) as opened:
        posting = asyncio.ensure_future(opened.submit("k"))
        for name, rows in (
            ("before_admit_commit", 0),
            ("after_admit_commit", 1),
            ("before_admit_answer", 1),
        ):
            with anyio.fail_after(10):
                while not await anyio.Path(tmp_path, f"{name}.reached").exists():
                    await anyio.sleep(0.005)
            assert query(database_url, "SELECT count(*) FROM operations") == [(rows,)]
            assert not posting.done()
            await anyio.Path(tmp_path, f"{name}.go").touch()
        assert isinstance(await posting, Admitted)


def test_ids_carry_their_bucket() -> None:
    """DESIGN 5: the last byte of an id is the scope's bucket, which is the same for every repeat."""
    scope = Scope("t", "x.y", IdempotencyKey("k"))
    ids = {OperationId.new(scope.bucket) for _ in range(100)}
    assert {id.bucket for id in ids} == {scope.bucket}
    assert len(ids) == 100
    assert scope.bucket == Scope("t", "x.y", IdempotencyKey("k")).bucket
