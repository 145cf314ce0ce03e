"""Group commit: batches, one bad item, a database that is away, and COMMITs nobody knows the end of.

The second half holds every verb against PROTOCOL.md, 'What a verb compares when a COMMIT's outcome is
unknown': once where the transaction stands, once where it does not. R13, R17; CASES.md K21, K22.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from app.domain.errors import CommitUnknown, StoreBusy, StoreUnavailable
from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import State
from app.domain.outcome import Absent, NotApplied, Unavailable, Unknown
from app.domain.profile import LookupRules, ProviderClass
from app.service.admission import Admitted, Replayed
from app.service.group_commit import GroupCommit
from app.storage import cancellation
from app.telemetry import Metric, Telemetry
from tests.support.core import (
    House,
    Play,
    ScriptedProvider,
    UnknownCommits,
    capturing_telemetry,
    counted,
    house,
    profile_of,
)
from tests.support.factories import end_leases, query
from tests.support.races import Gate

pytestmark = pytest.mark.anyio


class Flush:
    """Writes nothing; keeps what it was given, and misbehaves as told."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate: Gate | None = None
        self.errors: list[Exception] = []
        self.bad: dict[str, Exception] = {}

    async def __call__(self, items: Sequence[str]) -> list[str]:
        self.batches.append(list(items))
        if self.gate is not None:
            await self.gate.enter()
        for item in items:
            if item in self.bad:
                raise self.bad[item]
        if self.errors:
            raise self.errors.pop(0)
        return [item.upper() for item in items]


def group_of(
    flush: Callable[[Sequence[str]], Awaitable[Sequence[str]]],
    patience_seconds: float = 30.0,
    *,
    keep_trying: bool = False,
    max_batch: int = 200,
) -> tuple[GroupCommit[str, str], Telemetry]:
    telemetry, _ = capturing_telemetry()
    group = GroupCommit(
        "test",
        flush,
        telemetry,
        patience_seconds=patience_seconds,
        keep_trying=keep_trying,
        max_batch=max_batch,
    )
    return group, telemetry


async def outcomes(group: GroupCommit[str, str], *items: str) -> list[str | BaseException]:
    return await asyncio.gather(*(group.submit(item) for item in items), return_exceptions=True)


async def test_what_comes_while_a_commit_is_in_flight_goes_together() -> None:
    flush = Flush()
    flush.gate = Gate()
    group, telemetry = group_of(flush)
    first = asyncio.create_task(group.submit("a"))
    await flush.gate.reached()
    others = asyncio.create_task(outcomes(group, "b", "c", "d"))
    await asyncio.sleep(0)
    flush.gate.open()
    assert await first == "A"
    assert await others == ["B", "C", "D"]
    assert flush.batches == [["a"], ["b", "c", "d"]]
    assert counted(telemetry, Metric.FLUSHES, verb="test") == 2
    assert counted(telemetry, Metric.FLUSHED_ITEMS, verb="test") == 4


async def test_a_batch_has_a_bound() -> None:
    flush = Flush()
    group, _ = group_of(flush, max_batch=2)
    assert await outcomes(group, *"abcde") == list("ABCDE")
    assert [len(batch) for batch in flush.batches] == [2, 2, 1]


@pytest.mark.parametrize("error", [ValueError("bad text"), StoreBusy("a row was held")])
async def test_one_bad_item_fails_alone(error: Exception) -> None:
    """CASES.md B21's last sentence: the batch is tried again item by item."""
    flush = Flush()
    flush.bad["c"] = error
    group, _ = group_of(flush)
    assert await outcomes(group, *"abcde") == ["A", "B", error, "D", "E"]
    assert flush.batches[0] == list("abcde")
    assert sorted(flush.batches[1:]) == [["a"], ["b"], ["c"], ["d"], ["e"]]


async def test_a_database_that_is_away_fails_all_at_once() -> None:
    """Not item by item: every one of them would wait for the same dead server."""
    flush = Flush()
    flush.errors = [StoreUnavailable("away")]
    group, _ = group_of(flush)
    told = await outcomes(group, *"abc")
    assert [type(one) for one in told] == [StoreUnavailable] * 3
    assert flush.batches == [list("abc")]
    assert await outcomes(group, "d") == ["D"]


async def test_what_must_not_be_lost_waits_for_the_database() -> None:
    flush = Flush()
    flush.errors = [StoreUnavailable("away"), StoreUnavailable("still away")]
    group, telemetry = group_of(flush, keep_trying=True)
    assert await outcomes(group, *"ab") == ["A", "B"]
    assert flush.batches == [["a", "b"]] * 3
    assert counted(telemetry, Metric.STORE_ERRORS, where="test") == 2


async def test_patience_has_an_end() -> None:
    flush = Flush()
    flush.errors = [StoreUnavailable("away")] * 9
    group, _ = group_of(flush, 0.0, keep_trying=True)
    [told] = await outcomes(group, "a")
    assert isinstance(told, StoreUnavailable)
    assert not isinstance(told, CommitUnknown)


async def test_an_unknown_commit_is_settled_by_the_same_batch() -> None:
    """R13, R17: again with the same items, also through an outage that comes in between."""
    flush = Flush()
    flush.errors = [CommitUnknown("lost"), StoreUnavailable("away"), CommitUnknown("lost")]
    group, _ = group_of(flush)
    assert await outcomes(group, *"ab") == ["A", "B"]
    assert flush.batches == [["a", "b"]] * 4


@pytest.mark.parametrize("then", [CommitUnknown("again"), StoreUnavailable("away")])
async def test_an_unknown_commit_that_cannot_be_settled_is_told_as_unknown(then: Exception) -> None:
    """Contract 10: never as 'not committed'."""
    flush = Flush()
    flush.errors = [CommitUnknown("lost"), then]
    group, _ = group_of(flush, 0.01)
    told = await outcomes(group, *"ab")
    assert [type(one) for one in told] == [CommitUnknown] * 2
    assert flush.batches == [["a", "b"]] * len(flush.batches), "a batch in doubt is not taken apart"


async def test_a_caller_that_leaves_disturbs_nobody() -> None:
    """CASES.md K22: what is durable does not depend on who still listens."""
    flush = Flush()
    flush.gate = Gate()
    group, _ = group_of(flush)
    leaving = asyncio.create_task(group.submit("a"))
    await flush.gate.reached()
    waiting = [asyncio.create_task(group.submit(item)) for item in "bcd"]
    await asyncio.sleep(0)
    leaving.cancel()
    waiting[1].cancel()
    flush.gate.open()
    told = await asyncio.gather(leaving, *waiting, return_exceptions=True)
    assert [type(told[0]), told[1], type(told[2]), told[3]] == [
        asyncio.CancelledError,
        "B",
        asyncio.CancelledError,
        "D",
    ]
    assert flush.batches == [["a"], ["b", "c", "d"]]


async def test_drain_returns_when_nothing_is_in_flight() -> None:
    flush = Flush()
    flush.gate = Gate()
    group, _ = group_of(flush, max_batch=1)
    await group.drain()
    writing = asyncio.create_task(outcomes(group, *"ab"))
    await flush.gate.reached()
    draining = asyncio.create_task(group.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    flush.gate.open()
    await draining
    assert flush.batches == [["a"], ["b"]]
    assert writing.done() or await writing == ["A", "B"]


# -- COMMITs with an unknown end ---------------------------------------------------------------------------


@pytest.fixture
def store(database_url: str) -> UnknownCommits:
    return UnknownCommits(database_url)


def house_on(
    store: UnknownCommits, kind: ProviderClass = ProviderClass.HONOURS_KEYS, **profile: object
):  # type: ignore[no-untyped-def]
    provider = ScriptedProvider(profile_of(kind, **profile))
    return house(store.url, provider, database=store)


def ledger(core: House) -> list[tuple[object, ...]]:
    return query(core.url, "SELECT outcome, generation FROM attempts ORDER BY began_at, id")


def no_false_alarm(core: House) -> None:
    """Nothing was taken for lost, and no answer for a late one."""
    assert core.log.of("lease_lost") == []
    assert core.count(Metric.LEASE_LOST, verb="record") == 0
    assert query(core.url, "SELECT count(*) FROM findings WHERE source = 'late_answer'") == [(0,)]


STANDS = pytest.mark.parametrize("stands", [True, False], ids=["stands", "does not stand"])


@STANDS
async def test_admit(stands: bool, store: UnknownCommits) -> None:
    """Run again with the same id: mine, once; a repeat is a replay."""
    async with house_on(store) as core:
        store.strike("operations.admit", stands=stands)
        answer = await core.submit("key")
        assert store.struck == 1
        assert isinstance(answer, Admitted)
        assert query(core.url, "SELECT id FROM operations") == [(answer.view.id.uuid,)]
        assert query(core.url, "SELECT count(*) FROM work") == [(1,)]
        again = await core.submit("key")
        assert isinstance(again, Replayed)
        assert again.view.id == answer.view.id


async def test_admit_makes_no_work_for_what_is_done_already(store: UnknownCommits) -> None:
    """The blind re-run's danger: the operation was worked off before the admission ran again."""
    async with house_on(store) as core:

        async def worked_off() -> None:
            await core.work()

        store.strike("operations.admit", stands=True, then=worked_off)
        answer = await core.submit("key")
        assert isinstance(answer, Admitted)
        assert answer.view.state is State.SUCCEEDED
        assert query(core.url, "SELECT count(*) FROM work") == [(0,)]
        assert core.provider.called == 1


async def test_admit_that_was_rolled_back_meets_another_winner(store: UnknownCommits) -> None:
    """R13 b: mine rolled back, another body won: a mismatch or a replay of theirs, never mine."""
    async with house_on(store) as core, house_on(UnknownCommits(store.url)) as other:

        async def win() -> None:
            await other.admit("key")

        store.strike("operations.admit", stands=False, then=win)
        answer = await core.submit("key")
        assert isinstance(answer, Replayed)
        assert query(core.url, "SELECT count(*) FROM operations") == [(1,)]


@STANDS
async def test_claim(stands: bool, store: UnknownCommits) -> None:
    """Read back by the token of this very call: its rows, counted once; or nothing was claimed."""
    async with house_on(store) as core:
        ids = [await core.admit(f"k-{n}") for n in range(3)]
        store.strike("claims.claim", stands=stands)
        claimed = await core.work()
        assert store.struck == 1
        if stands:
            assert sorted(one.id for one in claimed) == sorted(ids)
            assert {one.lease.generation for one in claimed} == {1}
            assert {one.claims for one in claimed} == {1}
        else:
            assert claimed == []
            assert query(core.url, "SELECT DISTINCT claims, lease_generation FROM work") == [(0, 0)]
            await core.work()
        assert {await core.state(id) for id in ids} == {State.SUCCEEDED}
        assert core.provider.called == 3
        no_false_alarm(core)


@STANDS
async def test_begin(stands: bool, store: UnknownCommits) -> None:
    """The attempt's id was made before: one row, one send."""
    async with house_on(store) as core:
        id = await core.admit()
        store.strike("steps.insert_attempts", stands=stands)
        await core.work()
        assert store.struck == 1
        assert await core.state(id) is State.SUCCEEDED
        assert ledger(core) == [("succeeded", 1)]
        assert core.provider.called == 1
        no_false_alarm(core)


@STANDS
async def test_begin_of_a_re_send(stands: bool, store: UnknownCommits) -> None:
    async with house_on(store) as core:
        core.provider.plays(Play(effect=True, answer=Unknown("timeout")))
        id = await core.admit()
        await core.work()
        end_leases(core.url)
        store.strike("steps.insert_attempts", stands=stands)
        await core.reconcile()
        assert store.struck == 1
        assert await core.state(id) is State.SUCCEEDED
        assert ledger(core) == [("unknown", 1), ("succeeded", 2)]
        assert core.provider.called == 2
        no_false_alarm(core)


@STANDS
async def test_begin_after_sends_that_were_not_applied(stands: bool, store: UnknownCommits) -> None:
    """The resend deadline counts from this send; running again moves it no further (R3)."""
    async with house_on(store) as core:
        core.provider.plays(Play(effect=False, answer=NotApplied("http-503")))
        id = await core.admit()
        await core.work()
        end_leases(core.url)
        store.strike("steps.insert_attempts", stands=stands)
        await core.work()
        assert store.struck == 1
        assert await core.state(id) is State.SUCCEEDED
        assert ledger(core) == [("not_applied", 1), ("succeeded", 2)]
        assert query(
            core.url,
            "SELECT s.resend_by - a.began_at = interval '595 s' FROM steps AS s JOIN attempts AS a"
            " USING (bucket, operation_id) WHERE a.outcome = 'succeeded'",
        ) == [(True,)]


async def test_begin_that_stands_is_sent_though_a_cancel_came_since(store: UnknownCommits) -> None:
    """The table: 'row with that id exists and lease still held': send. The cancel could only be noted."""
    async with house_on(store) as core:
        id = await core.admit()

        async def wish() -> None:
            async with core.database.transaction() as tx:
                state = await cancellation.cancel(
                    tx, id, tenant="tenant", action_id=new_id(), by="t", reason=None, error=b"{}"
                )
            assert state is State.RUNNING

        store.strike("steps.insert_attempts", stands=True, then=wish)
        await core.work()
        assert await core.state(id) is State.SUCCEEDED
        assert ledger(core) == [("succeeded", 1)]


async def test_begin_whose_lease_is_over_by_then_is_not_sent(store: UnknownCommits) -> None:
    async with house_on(store) as core:
        id = await core.admit()

        async def over() -> None:
            end_leases(core.url)
            await core.execution.claim(1)

        store.strike("steps.insert_attempts", stands=True, then=over)
        [claimed] = await core.execution.claim(1)
        await core.execution.run(claimed)
        assert core.provider.called == 0
        assert ledger(core) == [(None, 1)]
        assert await core.state(id) is State.RUNNING


@STANDS
@pytest.mark.parametrize(
    ("play", "ends"),
    [
        (Play(), State.SUCCEEDED),
        (Play(effect=False, answer=NotApplied("http-503")), State.RUNNING),
        (Play(effect=True, answer=Unknown("timeout")), State.UNCERTAIN),
    ],
    ids=["finish", "release", "park"],
)
async def test_record(play: Play, ends: State, stands: bool, store: UnknownCommits) -> None:
    """Attempt id and outcome are compared: not a lost lease, no late answer, counted once."""
    async with house_on(store) as core:
        core.provider.plays(play)
        id = await core.admit()
        store.strike("attempts.record", stands=stands)
        await core.work()
        assert store.struck == 1
        assert await core.state(id) is ends
        assert len(ledger(core)) == core.provider.called == 1
        assert query(core.url, "SELECT count(*) FROM work") == [(ends is not State.SUCCEEDED,)]
        no_false_alarm(core)


@STANDS
@pytest.mark.parametrize("told", [Absent(), Unavailable("http-503")], ids=["absent", "unavailable"])
async def test_finding(told: Absent | Unavailable, stands: bool, store: UnknownCommits) -> None:
    """The row that matters most for safety: one Absent is one Absent, whatever its COMMIT says."""
    async with house_on(store, ProviderClass.LOOKED_UP) as core:
        core.provider.plays(Play(effect=False, answer=Unknown("timeout")))
        id = await core.admit()
        await core.work()
        query(
            core.url,
            "UPDATE attempts SET began_at = began_at - interval '1 h', send_by = send_by - interval"
            " '1 h', arrives_by = arrives_by - interval '1 h', settled_at = settled_at - interval '1 h'",
        )
        end_leases(core.url)
        core.provider.finds(told)
        store.strike("findings.find", stands=stands)
        await core.reconcile()
        assert store.struck == 1
        assert query(core.url, "SELECT kind FROM findings") == [(type(told).__name__.lower(),)]
        assert await core.state(id) is State.UNCERTAIN
        assert core.provider.called == 1
        no_false_alarm(core)


@STANDS
async def test_applied_finding_that_finishes(stands: bool, store: UnknownCommits) -> None:
    async with house_on(store, lookup=LookupRules("key")) as core:
        core.provider.plays(Play(effect=True, answer=Unknown("timeout")))
        id = await core.admit()
        await core.work()
        end_leases(core.url)
        store.strike("findings.find", stands=stands)
        await core.reconcile()
        assert store.struck == 1
        assert await core.state(id) is State.SUCCEEDED
        assert query(core.url, "SELECT kind FROM findings") == [("applied",)]
        assert core.provider.called == 1
        no_false_alarm(core)


@STANDS
async def test_finish_without_an_answer(stands: bool, store: UnknownCommits) -> None:
    """`finished_by` says whose end it was: a deadline that ended the operation is no lost lease."""
    async with house_on(store) as core:
        id = await core.admit(deadline="2999-01-01T00:00:00Z")
        query(core.url, "UPDATE work SET deadline = now() - interval '1 s'")
        store.strike("operations.finish", stands=stands)
        await core.work()
        assert store.struck == 1
        assert await core.state(id) is State.FAILED
        assert core.provider.called == 0
        no_false_alarm(core)


@STANDS
async def test_late_answer(stands: bool, store: UnknownCommits) -> None:
    """R7: inserted once, by whatever number of tries."""
    gate = Gate()
    async with house_on(store) as core:
        core.provider.plays(Play(after=gate.enter))
        id = await core.admit()
        [claimed] = await core.execution.claim(1)
        turn = asyncio.create_task(core.execution.run(claimed))
        await gate.reached()
        end_leases(core.url)
        await core.execution.claim(1)
        store.strike("attempts.insert_late", stands=stands)
        gate.open()
        await turn
        assert store.struck == 1
        assert query(core.url, "SELECT kind, attempt_outcome FROM findings") == [
            ("applied", "succeeded")
        ]
        assert core.count(Metric.LATE_EVIDENCE, provider="test") == 1
        await finish(core, id)


async def finish(core: House, id: OperationId) -> None:
    end_leases(core.url)
    await core.work()
    assert await core.state(id) is State.SUCCEEDED
    assert core.provider.called == 1


@STANDS
async def test_release_of_what_was_not_begun(stands: bool, store: UnknownCommits) -> None:
    """Giving back on SIGTERM: whatever its COMMIT says, nothing was begun and nothing is lost."""
    async with house_on(store) as core:
        id = await core.admit()
        [claimed] = await core.execution.claim(1)
        core.turns.draining = True
        store.strike("leases.release", stands=stands)
        await core.execution.run(claimed)
        assert store.struck == 1
        core.turns.draining = False
        end_leases(core.url)
        await core.work()
        assert await core.state(id) is State.SUCCEEDED
        assert core.provider.called == 1


async def test_a_batch_that_is_held_up_is_overtaken() -> None:
    """CASES.md K32: what waits behind a blocked batch goes beside it, where the verb allows that."""
    release = asyncio.Event()

    async def flush(batch: Sequence[str]) -> list[str]:
        if "held" in batch:
            await release.wait()
        return list(batch)

    group: GroupCommit[str, str] = GroupCommit(
        "test", flush, capturing_telemetry()[0], patience_seconds=1, overtake_after_seconds=0.01
    )
    held = asyncio.create_task(group.submit("held"))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(group.submit("free"), 5) == "free"
    assert not held.done()
    release.set()
    assert await held == "held"
    await group.drain()


async def test_without_overtaking_one_batch_follows_the_other() -> None:
    """The order in which verbs of one operation are written is the order of their batches."""
    release = asyncio.Event()
    seen: list[list[str]] = []

    async def flush(batch: Sequence[str]) -> list[str]:
        seen.append(list(batch))
        await release.wait()
        return list(batch)

    group: GroupCommit[str, str] = GroupCommit(
        "test", flush, capturing_telemetry()[0], patience_seconds=1
    )
    callers = [asyncio.create_task(group.submit(item)) for item in ("a", "b", "c")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*callers)
    assert seen in ([["a"], ["b", "c"]], [["a", "b", "c"]])
