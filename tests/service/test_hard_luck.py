"""Several things wrong at once: answers are kept, neighbours spared, no other cluster is used."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from app.domain.course import Attention
from app.domain.errors import StoreUnavailable
from app.domain.lifecycle import State
from app.domain.outcome import NotApplied, Refused, Succeeded, Unavailable, Unknown
from app.domain.profile import KeyRules, LookupRules, ProviderClass
from app.service import installation
from app.storage.database import Database
from tests.support.core import House, Play, ScriptedProvider, house, profile_of, type_of
from tests.support.factories import age, end_leases, query

pytestmark = pytest.mark.anyio
LOST = Play(answer=Unknown("timeout"))


async def again(core: House, times: int = 1) -> None:
    for _ in range(times):
        age(core.url)
        await core.reconcile()


class TestAnswersAreKept:
    """R7: a definite answer in hand is never thrown away, at the class that has nothing but it."""

    async def test_when_deciding_fails(self, database_url: str) -> None:
        """A result builder that raises: the effect is known, a human looks at the rest."""

        def broken(_context: object) -> dict[str, object]:
            raise ZeroDivisionError

        provider = ScriptedProvider(profile_of(ProviderClass.NEITHER))
        types = [replace(type_of(), build_result=broken)]
        async with house(database_url, provider, types=types) as core:
            id = await core.admit()
            for _ in range(8):
                await core.work()
                end_leases(database_url)
            assert query(core.url, "SELECT kind, attempt_outcome FROM findings") == [
                ("applied", "succeeded")
            ]
            assert (await core.view(id)).attention == Attention.CLAIMS_EXHAUSTED
        assert len(provider.effects) == 1

    async def test_when_recording_fails(self, database_url: str) -> None:
        """The store fails the record for good; the answer goes in as a finding and ends the operation."""
        provider = ScriptedProvider(profile_of(ProviderClass.NEITHER))
        async with house(database_url, provider) as core:
            id = await core.admit()
            ends = core.turns._ends
            real, ends.submit = ends.submit, _fails  # type: ignore[method-assign]
            await core.work()
            ends.submit = real  # type: ignore[method-assign]
            assert query(core.url, "SELECT attempt_outcome FROM findings") == [("succeeded",)]
            end_leases(database_url)
            await core.work()
            assert await core.state(id) is State.SUCCEEDED
        assert len(provider.effects) == 1

    @pytest.mark.parametrize("value", [2**70, float("nan"), object(), b"\xff", {1: {2: 2**64}}])
    async def test_when_the_result_cannot_be_stored_as_it_is(
        self, value: object, database_url: str
    ) -> None:
        provider = ScriptedProvider(profile_of(ProviderClass.NEITHER))
        provider.plays(Play(answer=Succeeded("r", {"odd": value})))
        async with house(database_url, provider) as core:
            id = await core.admit()
            await core.work()
            assert await core.state(id) is State.SUCCEEDED


async def _fails(_end: object) -> None:
    raise StoreUnavailable("away")


async def test_one_unreadable_row_stops_nothing(database_url: str) -> None:
    """K5, I12: the neighbours of a row that cannot be read end well; it alone comes to a human."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    async with house(database_url, provider) as core:
        bad = await core.admit("bad")
        provider.plays(Play(effect=False, answer=NotApplied("busy")))
        await core.work()
        query(core.url, "UPDATE attempts SET result = '\\x7b' RETURNING 1")
        good = [await core.admit(f"good-{number}") for number in range(3)]
        for _ in range(8):
            age(database_url)
            await core.work()
            end_leases(database_url)
        assert [await core.state(id) for id in good] == [State.SUCCEEDED] * 3
        assert (await core.view(bad)).attention == Attention.CLAIMS_EXHAUSTED


async def test_a_deadline_that_passes_while_a_send_waits(database_url: str) -> None:
    """The first send never begins after its deadline, however long it waited for its turn."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    async with house(database_url, provider) as core:
        id = await core.admit(deadline="2999-01-01T00:00:00Z")
        [claimed] = await core.execution.claim(1)
        query(core.url, "UPDATE work SET deadline = now() - interval '1 second' RETURNING 1")
        await core.execution.run(replace(claimed, deadline=None))
        assert provider.called == 0
        end_leases(database_url)
        await core.work()
        assert await core.state(id) is State.FAILED
    assert provider.effects == []


async def test_a_turn_cut_short_while_it_begins_says_that_nothing_was_sent(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K22: the attempt's row stands, no byte left, so it is no doubt, also where nothing can be asked."""
    provider = ScriptedProvider(profile_of(ProviderClass.NEITHER))
    async with house(database_url, provider) as core:
        id = await core.admit()
        [claimed] = await core.execution.claim(1)
        turn = asyncio.create_task(core.execution.run(claimed))
        submit = core.turns._begins.submit

        async def cut(start: object) -> object:
            turn.cancel()
            return await submit(start)  # type: ignore[arg-type]

        monkeypatch.setattr(core.turns._begins, "submit", cut)
        await asyncio.gather(turn, return_exceptions=True)
        monkeypatch.undo()
        assert query(core.url, "SELECT outcome, code FROM attempts") == [
            ("not_applied", "not-sent")
        ]
        age(database_url)
        await core.work()
        assert await core.state(id) is State.SUCCEEDED
    assert len(provider.effects) == 1


class TestEvidenceThatCannotCome:
    """I7: doubt that no look-up will ever settle goes to a human, with the reason; an outage does not."""

    async def test_a_look_up_that_refuses(self, database_url: str) -> None:
        provider = ScriptedProvider(profile_of(ProviderClass.LOOKED_UP))
        async with house(database_url, provider) as core:
            id = await _doubtful(core)
            provider.finds(*[Refused("forbidden")] * 3)
            await again(core, 3)
            assert (await core.view(id)).attention == Attention.NO_EVIDENCE_POSSIBLE

    async def test_a_look_up_that_is_away_keeps_waiting(self, database_url: str) -> None:
        """B27: an outage never turns doubts into work for people."""
        provider = ScriptedProvider(profile_of(ProviderClass.LOOKED_UP))
        async with house(database_url, provider) as core:
            id = await _doubtful(core)
            provider.finds(*[Unavailable("down")] * 10)
            await again(core, 10)
            assert await core.state(id) is State.UNCERTAIN

    async def test_a_burned_key_with_the_look_up_down(self, database_url: str) -> None:
        """R18: nothing else can come, so a human is asked; look-ups go on and may still settle it."""
        profile = profile_of(
            ProviderClass.HONOURS_KEYS,
            keys=KeyRules("Key", memory_seconds=86_400),
            lookup=LookupRules("key", lag_seconds=0),
        )
        provider = ScriptedProvider(profile)
        async with house(database_url, provider) as core:
            provider.plays(Play(answer=Unknown("http-500", burned=True)))
            id = await core.admit()
            await core.work()
            provider.finds(*[Unavailable("down")] * 2)
            await again(core, 2)
            assert (await core.view(id)).attention == Attention.KEY_BURNED
            await again(core)
            assert await core.state(id) is State.SUCCEEDED
        assert len(provider.effects) == 1


async def _doubtful(core: House) -> object:
    core.provider.plays(LOST)
    id = await core.admit()
    await core.work()
    assert await core.state(id) is State.UNCERTAIN
    return id


class TestAnotherCluster:
    """I11, R16: after a failover a running process finds no connection, before any poll could notice."""

    async def test_gets_no_connection(self, database_url: str) -> None:
        database = Database(database_url, application="moved", timeout_seconds=1.0)
        await database.open()
        try:
            stamp = await installation.verify(database, "")
            installation.insist(database, replace(stamp, cluster_timeline=stamp.timeline + 1))
            await database._pool.drain()
            with pytest.raises(StoreUnavailable):
                async with database.transaction():
                    pass
        finally:
            await database.close()

    async def test_the_same_one_does(self, database_url: str) -> None:
        database = Database(database_url, application="stayed", timeout_seconds=5.0)
        await database.open()
        try:
            stamp = await installation.verify(database, "")
            installation.insist(database, stamp)
            await database._pool.drain()
            assert await installation.verify(database, "") == stamp
        finally:
            await database.close()

    async def test_a_running_process_leaves(self, database_url: str) -> None:
        database = Database(database_url, application="watching", timeout_seconds=5.0)
        await database.open()
        try:
            stamp = await installation.verify(database, "")
            query(database_url, "UPDATE installation SET timeline = timeline + 1 RETURNING 1")
            with pytest.raises(installation.EpochChanged, match="timeline"):
                async with asyncio.timeout(20):
                    await installation.watch_epoch(
                        database, stamp.epoch, interval_seconds=0.01, expected_stamp=stamp.stamp
                    )
        finally:
            await database.close()


async def test_behind_a_pooler_a_transaction_has_its_timeouts(database_url: str) -> None:
    """CASES.md B37 d: a shared session is set up for each transaction, not once."""
    database = Database(
        database_url, application="pooled", timeout_seconds=3.0, prepared_statements=False
    )
    await database.open()
    try:
        async with database.transaction() as tx:
            rows = await tx._connection.execute("SHOW lock_timeout")
            assert (await rows.fetchone()) == {"lock_timeout": "3s"}
    finally:
        await database.close()
