"""A worker's turns on a real database: what each answer leaves in our rows and in the provider's ledger.

PROTOCOL.md R1, R7, R9, R10 and its decisions; CASES.md B01, B04, B10, B23, B32, B36.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import psycopg
import pytest

from app.domain.course import BeginStep, next_move
from app.domain.errors import LeaseLost
from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import Ending, State, StopCause
from app.domain.operation import Claimed, History, Lease
from app.domain.outcome import NotApplied, Outcome, Rejected, Unavailable, Unknown
from app.domain.plan import EffectRequest
from app.domain.policy import Backoff, LeasePolicy
from app.domain.profile import LookupRules, ProviderClass
from app.failpoints import Failpoints
from app.service import sending, turns
from app.service.clock import elapsed
from app.service.execution import Renewal
from app.service.turn import Start, TurnEnd, may_begin
from app.storage import cancellation, leases
from app.storage.attempts import Answer
from app.storage.database import Database
from app.telemetry import Metric
from tests.support.core import (
    House,
    Play,
    ScriptedProvider,
    capturing_telemetry,
    house,
    profile_of,
    type_of,
)
from tests.support.factories import age, end_leases, query, snapshot
from tests.support.races import Gate, holding, until, until_blocked
from workers.lease_keeper import LeaseKeeper

pytestmark = pytest.mark.anyio
KINDS = tuple(ProviderClass)


@pytest.fixture
async def core(database_url: str) -> AsyncIterator[House]:
    """A house whose provider honours keys."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    async with house(database_url, provider) as opened:
        yield opened


def attempts_of(core: House, id: OperationId) -> list[tuple[object, ...]]:
    return query(
        core.url,
        "SELECT outcome, code FROM attempts WHERE operation_id = %s ORDER BY began_at, id",
        id.uuid,
    )


def work_of(core: House, id: OperationId) -> dict[str, object]:
    [row] = query(
        core.url, "SELECT to_jsonb(w) FROM work AS w WHERE operation_id = %s", id.uuid
    ) or [({},)]
    found: dict[str, object] = row[0]
    return found


async def cancel(core: House, id: OperationId) -> State | None:
    async with core.database.transaction() as tx:
        return await cancellation.cancel(
            tx, id, tenant="tenant", action_id=new_id(), by="t", reason=None, error=b"{}"
        )


async def error_of(core: House, id: OperationId) -> dict[str, object]:
    error = (await core.view(id)).error
    assert error is not None
    parsed: dict[str, object] = orjson.loads(error)
    return parsed


# -- each answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_succeeded(kind: ProviderClass, database_url: str) -> None:
    async with house(database_url, ScriptedProvider(profile_of(kind))) as core:
        id = await core.admit()
        [claimed] = await core.work()
        view = await core.view(id)
        assert view.state is State.SUCCEEDED
        assert orjson.loads(view.result or b"") == {"references": {"send": "effect-1"}}
        assert attempts_of(core, id) == [("succeeded", None)]
        assert work_of(core, id) == {}
        assert query(
            core.url, "SELECT finished_by_token, finished_by_generation FROM operations"
        ) == [(claimed.lease.owner_token, 1)]
        assert len(core.provider.effects) == core.provider.called == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_rejected(kind: ProviderClass, database_url: str) -> None:
    async with house(database_url, ScriptedProvider(profile_of(kind))) as core:
        core.provider.plays(Play(effect=False, answer=Rejected("declined", "No.")))
        id = await core.admit()
        await core.work()
        assert await core.state(id) is State.FAILED
        error = await error_of(core, id)
        assert (error["code"], error["provider_code"]) == ("provider-rejected", "declined")
        assert attempts_of(core, id) == [("rejected", "declined")]
        assert core.provider.effects == []


@pytest.mark.parametrize("kind", KINDS)
async def test_not_applied_is_tried_again(kind: ProviderClass, database_url: str) -> None:
    async with house(database_url, ScriptedProvider(profile_of(kind))) as core:
        core.provider.plays(Play(effect=False, answer=NotApplied("http-503")))
        id = await core.admit()
        await core.work()
        assert await core.state(id) is State.RUNNING
        assert work_of(core, id)["actor"] == "worker"
        assert work_of(core, id)["claims"] == 0
        end_leases(core.url)
        await core.work()
        assert await core.state(id) is State.SUCCEEDED
        assert attempts_of(core, id) == [("not_applied", "http-503"), ("succeeded", None)]
        assert len(core.provider.effects) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_final_refusal_of_the_request_ends_it(
    kind: ProviderClass, database_url: str
) -> None:
    async with house(database_url, ScriptedProvider(profile_of(kind))) as core:
        core.provider.plays(Play(effect=False, answer=NotApplied("invalid", final=True)))
        id = await core.admit()
        await core.work()
        assert await core.state(id) is State.FAILED
        assert (await error_of(core, id))["provider_code"] == "invalid"


@pytest.mark.parametrize(
    "answer",
    [
        Unknown("timeout"),
        ValueError("bad \x00 text \ud800"),
        TimeoutError(),
        asyncio.CancelledError(),
        ExceptionGroup("several", [KeyError("a")]),
    ],
    ids=lambda answer: type(answer).__name__,
)
@pytest.mark.parametrize("kind", KINDS)
async def test_unknown_is_parked_and_whatever_leaks_is_unknown(
    kind: ProviderClass, answer: Outcome | BaseException, database_url: str
) -> None:
    """DESIGN.md, 4: an exception that leaks from an adapter is Unknown; its text is storable (B21)."""
    async with house(database_url, ScriptedProvider(profile_of(kind))) as core:
        core.provider.plays(Play(effect=True, answer=answer))
        id = await core.admit()
        await core.work()
        row = work_of(core, id)
        assert (row["state"], row["actor"]) == ("uncertain", "reconciler")
        assert row["lease_owner_token"] is None
        assert row["uncertain_since"] is not None
        [(outcome, _)] = attempts_of(core, id)
        assert outcome == "unknown"
        end_leases(core.url)
        assert await core.work() == [], "a worker leaves doubt to the reconciler"
        assert core.provider.called == 1


# -- R1 --------------------------------------------------------------------------------------------------


class Clock:
    """This process' clock, put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        for module in (sending, turns):
            monkeypatch.setattr(module, "elapsed", self.read)

    def read(self) -> float:
        return elapsed() + self.ahead

    async def jump(self) -> None:
        """Past the send window (5 s), far from the lease's end."""
        self.ahead = 6.0


async def test_trust_that_ended_before_the_send_sends_nothing(core: House) -> None:
    """R1, counterexample 2: the check is the last thing before the bytes."""
    id = await core.admit()
    [claimed] = await core.execution.claim(1)

    async def lose() -> None:
        claimed.lease.trust.end()

    core.provider.plays(Play(before=lose))
    await core.execution.run(claimed)
    assert core.provider.called == 1
    assert core.provider.arrived == core.provider.effects == []
    assert attempts_of(core, id) == [("not_applied", "send-window-closed")]
    end_leases(core.url)
    await core.work()
    assert await core.state(id) is State.SUCCEEDED
    assert len(core.provider.arrived) == 1


async def test_a_closed_window_sends_nothing_though_the_lease_is_renewed(
    core: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counterexample 1: renewals stretch the lease, never the send window."""
    clock = Clock(monkeypatch)
    id = await core.admit()
    [claimed] = await core.execution.claim(1)
    claimed.lease.trust.until = float("inf")
    core.provider.plays(Play(before=clock.jump))
    await core.execution.run(claimed)
    assert core.provider.arrived == []
    assert attempts_of(core, id) == [("not_applied", "send-window-closed")]


async def test_the_window_is_counted_from_before_the_begin_was_enqueued(
    core: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: a begin that waits (for a row here) uses up its window by the sender's clock."""
    clock = Clock(monkeypatch)
    id = await core.admit()
    [claimed] = await core.execution.claim(1)
    claimed.lease.trust.until = float("inf")
    async with holding(core.url, "SELECT FROM work FOR UPDATE") as other:
        turn = asyncio.create_task(core.execution.run(claimed))
        await until_blocked(core.url)
        await clock.jump()
        await other.rollback()
        await turn
    [(began, send_by)] = query(core.url, "SELECT began_at, send_by FROM attempts")
    assert (send_by - began).total_seconds() == 5.0
    assert core.provider.arrived == []
    assert attempts_of(core, id) == [("not_applied", "send-window-closed")]


# -- B04 -------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_blocking_code_does_not_lose_the_lease(database_url: str) -> None:
    """CASES.md B04: the adapter blocks the loop for three leases; the keeper's thread renews meanwhile."""
    policy = LeasePolicy(lease_seconds=0.6, renew_interval_seconds=0.15, margin_seconds=0.1)
    stop, taken = threading.Event(), list[Claimed]()

    async def covet() -> None:
        """A second worker, idle beside it, in a loop of its own."""
        async with house(database_url, ScriptedProvider(profile), policy=policy) as other:
            while not stop.is_set():
                taken.extend(await other.execution.claim(1))
                await asyncio.sleep(0.05)

    async def block() -> None:
        time.sleep(3 * policy.lease_seconds)  # noqa: ASYNC251 - that is the case

    profile = profile_of(ProviderClass.HONOURS_KEYS, send_window_seconds=0.5)
    async with house(database_url, ScriptedProvider(profile), policy=policy) as core:
        core.provider.plays(Play(meanwhile=block))
        keeper = LeaseKeeper(
            lambda: Renewal(Database(database_url, application="keeper", pool_size=2), policy),
            policy,
            capturing_telemetry()[0],
        )
        id = await core.admit()
        [claimed] = await core.execution.claim(1)
        keeper.hold(claimed.lease)
        keeper.start()
        rival = threading.Thread(target=lambda: asyncio.run(covet()))
        rival.start()
        try:
            await core.execution.run(claimed)
        finally:
            stop.set()
            keeper.stop()
            await asyncio.to_thread(rival.join)
        assert taken == []
        assert await core.state(id) is State.SUCCEEDED
        assert query(core.url, "SELECT finished_by_generation FROM operations") == [(1,)]
        assert len(core.provider.effects) == core.provider.called == 1


# -- B01, R7 ---------------------------------------------------------------------------------------------


async def stale_turn(
    core: House, answer: Outcome | None = None, *, effect: bool = True
) -> tuple[OperationId, Gate, asyncio.Task[None]]:
    """A worker whose provider has executed and not answered yet, and whose lease is over."""
    gate = Gate()
    core.provider.plays(Play(effect=effect, answer=answer, after=gate.enter))
    id = await core.admit()
    [claimed] = await core.execution.claim(1)
    turn = asyncio.create_task(core.execution.run(claimed))
    await gate.reached()
    end_leases(core.url)
    return id, gate, turn


async def test_a_late_answer_on_a_done_operation_changes_nothing(core: House) -> None:
    """B01 a: finished by the next owner; the stale one leaves a finding, and nothing else moves."""
    id, gate, turn = await stale_turn(core)
    await core.work()
    end_leases(core.url)
    await core.reconcile()
    assert await core.state(id) is State.SUCCEEDED
    before = snapshot(core.url)
    gate.open()
    await turn
    after = snapshot(core.url)
    [finding] = after.pop("findings")
    assert "late_answer" in finding
    assert before.pop("findings") == []
    assert after == before
    assert len(core.provider.effects) == 1
    assert core.count(Metric.LATE_EVIDENCE, provider="test") == 1
    assert core.log.of("late_evidence") == [{"operation": str(id), "outcome": "succeeded"}]


async def test_a_late_answer_leaves_the_new_owners_lease_and_is_what_it_settles_from(
    core: House,
) -> None:
    """B01 b: generation 2 is running; its lease is untouched, and it ends the operation without a call."""
    id, gate, turn = await stale_turn(core)
    [second] = await core.execution.claim(1)
    assert second.taken_over
    before = work_of(core, id)
    gate.open()
    await turn
    after = work_of(core, id)
    assert {**after, "due_at": None} == {**before, "due_at": None}
    await core.execution.run(second)
    assert await core.state(id) is State.SUCCEEDED
    assert core.provider.called == 1
    assert attempts_of(core, id) == [(None, None)], "the ledger row keeps what its owner wrote"


@pytest.mark.parametrize(
    ("answer", "effect", "ends"),
    [
        (None, True, State.SUCCEEDED),
        (Rejected("declined"), False, State.FAILED),
        (NotApplied("http-503"), False, State.SUCCEEDED),
        (NotApplied("invalid", final=True), False, State.FAILED),
        (Unknown("timeout"), True, State.NEEDS_ATTENTION),
    ],
    ids=["succeeded", "rejected", "not applied", "final", "unknown"],
)
async def test_a_late_answer_ends_the_wait_for_a_human(
    answer: Outcome | None, effect: bool, ends: State, database_url: str
) -> None:
    """Counterexample 14: a neither keys nor look-up, and the truth in the stale worker's hand."""
    provider = ScriptedProvider(profile_of(ProviderClass.NEITHER))
    async with house(database_url, provider) as core:
        id, gate, turn = await stale_turn(core, answer, effect=effect)
        await core.work()
        await core.reconcile()
        assert await core.state(id) is State.NEEDS_ATTENTION
        assert await core.reconcile() == []
        gate.open()
        await turn
        await core.reconcile()  # the finding made it due: nothing is aged
        await core.work()
        assert await core.state(id) is ends
        assert len(provider.effects) == (0 if ends is State.FAILED else 1)
        assert provider.called == (2 if answer == NotApplied("http-503") else 1)


async def test_a_record_under_way_is_not_taken_over(database_url: str, tmp_path: Path) -> None:
    """B01: the lease ends while the record holds the row: nobody claims it, the record stands."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    failpoints = Failpoints.parse(f"before_record_commit=gate:{tmp_path}")
    async with house(database_url, provider, failpoints=failpoints) as core:
        id = await core.admit()
        [claimed] = await core.execution.claim(1)
        claimed.lease.trust.until = float("inf")
        query(core.url, "UPDATE work SET lease_expires_at = now() + interval '0.2 s'")
        turn = asyncio.create_task(core.execution.run(claimed))

        async def reached() -> bool:
            return (tmp_path / "before_record_commit.reached").exists()

        async def over() -> bool:
            [(ended,)] = query(core.url, "SELECT lease_expires_at <= now() FROM work")
            return bool(ended)

        await until(reached)
        await until(over)
        assert await core.work() == await core.reconcile() == []
        (tmp_path / "before_record_commit.go").touch()
        await turn
        assert await core.state(id) is State.SUCCEEDED
        assert query(core.url, "SELECT finished_by_generation FROM operations") == [(1,)]


@pytest.mark.parametrize("stale_first", [True, False])
async def test_two_generations_of_one_operation_in_one_flush(
    stale_first: bool, core: House
) -> None:
    """A process that lost a lease may hold the operation again: the old turn must not pass for the new."""
    id, gate, turn = await stale_turn(core)
    [second] = await core.execution.claim(1)
    [(attempt,)] = query(core.url, "SELECT id FROM attempts")
    first = replace(second, lease=Lease(id, new_id(), 1, second.lease.trust))
    answer = Answer(first.lease, attempt, Unknown("late", retry_after_seconds=5000.0))
    ends = [TurnEnd(first, core.execution.actor, answer), TurnEnd(second, core.execution.actor)]
    told = await asyncio.gather(
        *(core.turns.settle(end) for end in (ends if stale_first else reversed(ends))),
        return_exceptions=True,
    )
    stale, new = told if stale_first else reversed(told)
    assert isinstance(stale, LeaseLost)
    assert not isinstance(new, BaseException)
    assert query(core.url, "SELECT kind, attempt_outcome FROM findings") == [
        ("unavailable", "unknown")
    ]
    row = work_of(core, id)
    assert (row["state"], row["lease_owner_token"]) == ("uncertain", None)
    assert query(core.url, "SELECT due_at < now() + interval '1 min' FROM work") == [(True,)], (
        "the old turn's answer decided the new one's rest"
    )
    gate.open()
    await turn
    assert query(core.url, "SELECT count(*) FROM findings") == [(1,)]


# -- B10 -------------------------------------------------------------------------------------------------


async def test_a_poison_operation_needs_attention_and_the_others_finish(database_url: str) -> None:
    """CASES.md B10, K5: counted at the claim; past the limit a human is asked, never `failed`."""
    policy = LeasePolicy(claims_limit=3)
    async with house(
        database_url, ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS)), policy=policy
    ) as core:
        poison = await core.admit("poison")
        others = [await core.admit(f"other-{n}") for n in range(10)]
        for round in range(1, 4):
            claimed = await core.execution.claim(50)
            for one in claimed:  # whoever carries the poison dies before it does anything
                if one.id != poison:
                    await core.execution.run(one)
            assert work_of(core, poison)["claims"] == round
            end_leases(core.url)
        assert [await core.state(id) for id in others] == [State.SUCCEEDED] * 10
        await core.work()
        assert await core.state(poison) is State.NEEDS_ATTENTION
        assert (await core.view(poison)).attention == "claims-exhausted"
        assert core.provider.called == 10
        assert core.count(Metric.TAKEOVERS, actor="worker") == 3
        end_leases(core.url)
        assert await core.work() == []
        assert await cancel(core, poison) is State.CANCELLED


async def test_cancel_wins_while_the_poison_goes_round(core: House) -> None:
    """CASES.md B10: held all the time by somebody who dies, and cancelled at once all the same (R10)."""
    id = await core.admit()
    [claimed] = await core.execution.claim(1)
    assert await cancel(core, id) is State.CANCELLED
    await core.execution.run(claimed)
    assert await core.state(id) is State.CANCELLED
    assert core.provider.called == 0


async def test_a_send_that_kills_its_process_ends_with_a_human(database_url: str) -> None:
    """B10: with a call that may have gone out it is doubt, looked into until the claims are used up."""
    policy = LeasePolicy(claims_limit=2)
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))

    class Death(BaseException):
        """A process that ends writes nothing."""

    async with house(database_url, provider, policy=policy) as core:
        provider.always = Play(effect=False, answer=Death())
        id = await core.admit()
        for _ in range(10):
            for role in (core.execution, core.reconciliation):
                for one in await role.claim(1):
                    try:
                        await role.run(one)
                    except Death:
                        end_leases(core.url)
            if await core.state(id) is State.NEEDS_ATTENTION:
                break
        assert (await core.view(id)).attention == "claims-exhausted"
        assert provider.called == 1 + policy.claims_limit
        assert provider.effects == []


async def test_a_graceful_release_uses_up_no_claim(core: House) -> None:
    """CASES.md B10: SIGTERM gives back what was not begun, at once and uncounted."""
    id = await core.admit()
    for _ in range(2 * core.turns.policy.claims_limit):
        core.turns.draining = False
        [claimed] = await core.execution.claim(1)
        core.turns.draining = True
        await core.execution.run(claimed)
        row = work_of(core, id)
        assert (row["claims"], row["state"], row["lease_owner_token"]) == (0, "pending", None)
    core.turns.draining = False
    await core.work()
    assert await core.state(id) is State.SUCCEEDED
    assert core.provider.called == 1


async def test_cut_short_while_it_waits_for_its_place_it_uses_up_no_claim(
    database_url: str,
) -> None:
    """The end of a drain cancels what is left: a turn that has begun nothing gives its lease back."""
    gate = Gate()
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS, concurrency=1))
    provider.plays(Play(meanwhile=gate.enter))
    async with house(database_url, provider) as core:
        first, second = await core.admit("a"), await core.admit("b")
        claimed = {one.id: one for one in await core.execution.claim(2)}
        running = asyncio.create_task(core.execution.run(claimed[first]))
        await gate.reached()
        waiting = asyncio.create_task(core.execution.run(claimed[second]))
        await asyncio.sleep(0)
        core.turns.draining = True
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        row = work_of(core, second)
        assert (row["claims"], row["state"], row["lease_owner_token"]) == (0, "pending", None)
        gate.open()
        await running
        assert await core.state(first) is State.SUCCEEDED


# -- B23 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer", [Unknown("timeout"), NotApplied("http-503")], ids=["unknown", "not applied"]
)
async def test_key_and_request_stay_when_the_builder_changes(
    answer: Outcome, database_url: str
) -> None:
    """CASES.md B23, I10: built once, stored, sent again byte for byte by whatever is deployed since."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    provider.plays(Play(effect=isinstance(answer, Unknown), answer=answer))
    async with house(database_url, provider) as core:
        id = await core.admit()
        await core.work()
    [step] = type_of().steps
    other = replace(step, build=lambda context: EffectRequest("PUT", "/other", b"other"))
    changed = replace(type_of(), steps=(other,))
    async with house(database_url, provider, types=[changed]) as core:
        end_leases(core.url)
        await core.work()
        await core.reconcile()
        assert await core.state(id) is State.SUCCEEDED
    first, second = provider.arrived
    assert first == second
    assert first.request.path == "/effects"
    assert len(provider.effects) == 1


async def test_two_operations_never_share_a_key(core: House) -> None:
    """B23's last sentence, and I10: neither generation nor attempt is in the key."""
    for n in range(5):
        await core.admit(f"k-{n}")
    core.provider.always = Play(effect=False, answer=NotApplied("no"))
    await core.work()
    end_leases(core.url)
    core.provider.always = None
    await core.work()
    keys = [arrival.key for arrival in core.provider.arrived]
    assert len(keys) == 10
    assert len(set(keys)) == 5


# -- B36 -------------------------------------------------------------------------------------------------


async def test_no_connection_is_held_during_the_call(database_url: str) -> None:
    """CASES.md B36, I4: fifty calls under way, two connections, and every read gets one."""
    gate = Gate()
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    provider.always = Play(meanwhile=gate.enter)
    async with house(database_url, provider, pool_size=2) as core:
        ids = [await core.admit(f"k-{n}") for n in range(50)]
        working = asyncio.create_task(core.work())
        await gate.reached(by=50)
        await core.turns.drain()
        await core.turns.notifier.drain()
        sessions = query(
            core.url,
            "SELECT application_name, state FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'",
        )
        assert sessions == []
        views = await asyncio.gather(*(core.view(id) for id in ids))
        assert {view.state for view in views} == {State.RUNNING}
        await core.admit("one more")
        gate.open()
        await working
        assert {await core.state(id) for id in ids} == {State.SUCCEEDED}


# -- horizon, deadline, Retry-After ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_retry_horizon_ends_what_was_never_applied(
    kind: ProviderClass, database_url: str
) -> None:
    provider = ScriptedProvider(profile_of(kind))
    types = [type_of(retry_horizon_seconds=60.0)]
    async with house(database_url, provider, types=types) as core:
        provider.plays(Play(effect=False, answer=NotApplied("http-503", "Busy.")))
        id = await core.admit()
        await core.work()
        assert await core.state(id) is State.RUNNING
        age(core.url, 61)
        await core.work()
        assert await core.state(id) is State.FAILED
        error = await error_of(core, id)
        assert (error["code"], error["retryable"]) == ("provider-unavailable", True)
        assert (error["provider_code"], error["detail"]) == ("http-503", "Busy.")
        assert provider.called == 1
        assert provider.effects == []


@pytest.mark.parametrize("kind", KINDS)
async def test_the_retry_horizon_decides_nothing_in_doubt(
    kind: ProviderClass, database_url: str
) -> None:
    """I5: age never decides."""
    provider = ScriptedProvider(profile_of(kind))
    types = [type_of(retry_horizon_seconds=60.0)]
    async with house(database_url, provider, types=types) as core:
        provider.plays(Play(effect=True, answer=Unknown("timeout")))
        id = await core.admit()
        await core.work()
        age(core.url, 100_000)
        await core.work()
        await core.reconcile()
        expected = {
            ProviderClass.HONOURS_KEYS: State.NEEDS_ATTENTION,
            ProviderClass.LOOKED_UP: State.SUCCEEDED,
            ProviderClass.NEITHER: State.NEEDS_ATTENTION,
        }[kind]
        assert await core.state(id) is expected
        assert provider.called == 1


async def test_a_passed_deadline_with_nothing_begun_fails(core: House) -> None:
    id = await core.admit(deadline="2999-01-01T00:00:00Z")
    query(core.url, "UPDATE work SET deadline = now() - interval '1 s'")
    await core.work()
    assert await core.state(id) is State.FAILED
    assert (await error_of(core, id))["code"] == "deadline-exceeded"
    assert core.provider.called == 0


async def test_a_passed_deadline_after_sends_that_were_not_applied_fails(core: House) -> None:
    """R10: what is known not to have been applied is nothing begun."""
    core.provider.plays(Play(effect=False, answer=NotApplied("http-503")))
    id = await core.admit(deadline="2999-01-01T00:00:00Z")
    await core.work()
    query(
        core.url,
        "UPDATE work SET deadline = now() - interval '1 s', due_at = now() - interval '1 s'",
    )
    await core.work()
    assert await core.state(id) is State.FAILED
    assert (await error_of(core, id))["code"] == "deadline-exceeded"


async def test_a_passed_deadline_ends_what_waits_for_a_human_with_nothing_begun(
    database_url: str,
) -> None:
    """R10: its first sentence holds in every live state, `needs_attention` included."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    async with house(database_url, provider, policy=LeasePolicy(claims_limit=1)) as core:
        id = await core.admit(deadline="2999-01-01T00:00:00Z")
        await core.execution.claim(1)
        end_leases(core.url)
        await core.work()
        assert await core.state(id) is State.NEEDS_ATTENTION
        assert work_of(core, id)["due_at"] == work_of(core, id)["deadline"]
        query(core.url, "UPDATE work SET deadline = now(), due_at = now()")
        await core.reconcile()
        assert await core.state(id) is State.FAILED
        assert (await error_of(core, id))["code"] == "deadline-exceeded"


async def test_a_passed_deadline_never_decides_doubt(database_url: str) -> None:
    """CONTRACT.md 17: a deadline that passes during the call is noted; the truth wins."""
    provider = ScriptedProvider(profile_of(ProviderClass.LOOKED_UP))

    async def over() -> bool:
        [(passed,)] = query(database_url, "SELECT deadline < now() FROM work")
        return bool(passed)

    provider.plays(Play(meanwhile=lambda: until(over), answer=Unknown("timeout")))
    provider.finds(Unavailable("http-503"))
    async with house(database_url, provider) as core:
        soon = datetime.now(UTC) + timedelta(seconds=0.4)
        id = await core.admit(deadline=soon.isoformat())
        await core.work()
        assert (work_of(core, id)["state"], work_of(core, id)["stop_cause"]) == (
            "uncertain",
            "deadline",
        )
        end_leases(core.url)
        await core.reconcile()
        assert await core.state(id) is State.UNCERTAIN
        end_leases(core.url)
        await core.reconcile()
        assert await core.state(id) is State.SUCCEEDED
        assert provider.called == 1


@pytest.mark.parametrize(
    "answer",
    [NotApplied("http-429", retry_after_seconds=5.0), Unknown("http-503", retry_after_seconds=5.0)],
    ids=["not applied", "unknown"],
)
async def test_retry_after_is_a_floor_and_jitter_comes_on_top(
    answer: Outcome, database_url: str
) -> None:
    """CASES.md B32: nobody comes back before it, and not all in the same instant."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    provider.always = Play(effect=False, answer=answer)
    types = [type_of(backoff=Backoff(10.0, 10.0))]
    async with house(database_url, provider, types=types) as core:
        for n in range(30):
            await core.admit(f"k-{n}")
        await core.work()
        waits = [
            float(seconds)
            for (seconds,) in query(
                core.url, "SELECT extract(epoch FROM due_at - changed_at) FROM work ORDER BY 1"
            )
        ]
        assert len(waits) == 30
        assert 5.0 <= waits[0] < waits[-1] <= 15.0
        assert max(sum(at <= wait < at + 1 for wait in waits) for at in range(5, 15)) <= 12
        assert waits[-1] - waits[0] > 3.0


# -- plans of several steps --------------------------------------------------------------------------------


async def test_steps_go_one_after_the_other_and_later_ones_see_earlier_results(
    database_url: str,
) -> None:
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    async with house(database_url, provider, types=[type_of("one", "two", "three")]) as core:
        id = await core.admit()
        await core.work()
        assert await core.state(id) is State.SUCCEEDED
        bodies = [orjson.loads(arrival.request.body)["earlier"] for arrival in provider.arrived]
        assert bodies == [
            {},
            {"one": {"reference": "effect-1"}},
            {"one": {"reference": "effect-1"}, "two": {"reference": "effect-2"}},
        ]
        assert len({arrival.key for arrival in provider.arrived}) == 3
        assert core.count(Metric.FLUSHED_ITEMS, verb="begin") == 3, "no begin was refused"


async def test_a_later_step_sees_what_a_look_up_found(database_url: str) -> None:
    """The result of a step that was settled by evidence is a result like any other."""
    lookup = LookupRules("key")
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS, lookup=lookup))
    provider.plays(Play(effect=True, answer=Unknown("timeout")))
    async with house(database_url, provider, types=[type_of("one", "two")]) as core:
        id = await core.admit()
        await core.work()
        end_leases(core.url)
        await core.reconcile()
        assert await core.state(id) is State.RUNNING
        await core.work()
        assert await core.state(id) is State.SUCCEEDED
        assert orjson.loads(provider.arrived[-1].request.body)["earlier"] == {
            "one": {"reference": "effect-1"}
        }
        assert len(provider.effects) == 2


async def test_a_cancel_that_cannot_be_granted_does_not_stop_the_plan(database_url: str) -> None:
    """R10: an effect without a compensation is done, so the operation goes on."""
    provider = ScriptedProvider(profile_of(ProviderClass.HONOURS_KEYS))
    async with house(database_url, provider, types=[type_of("one", "two")]) as core:
        id = await core.admit()

        async def wish() -> None:
            assert await cancel(core, id) is State.RUNNING

        provider.plays(Play(after=wish))
        await core.work()
        assert await core.state(id) is State.SUCCEEDED
        assert (await core.view(id)).cancel_requested
        assert len(provider.effects) == 2


async def test_a_cancel_between_decision_and_begin_is_judged_first(core: House) -> None:
    """R8, R10: the begin sees what came since its move was decided, and decides anew."""
    core.provider.plays(Play(effect=False, answer=NotApplied("http-503")))
    id = await core.admit()
    await core.work()
    end_leases(core.url)
    [claimed] = await core.execution.claim(1)
    query(core.url, "UPDATE work SET stop_cause = 'cancel'")  # as a cancel that could only note it
    await core.execution.run(claimed)
    assert await core.state(id) is State.CANCELLED
    assert core.provider.called == 1


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"state": State.PENDING}, True),
        ({"ending": Ending.FAILED}, False),
        ({"stop_cause": StopCause.CANCEL}, False),
        ({"stop_cause": StopCause.DEADLINE}, True),
        ({"state": State.UNCERTAIN}, False),
        ({"state": State.NEEDS_ATTENTION, "attention": "x"}, False),
    ],
)
async def test_what_a_first_begin_demands_of_the_locked_row(
    changes: dict[str, object], may: bool, core: House
) -> None:
    """PROTOCOL.md, begin; the move was decided in the knowledge of a passed deadline, of nothing else."""
    await core.admit()
    [claimed] = await core.execution.claim(1)
    case = core.turns.case_of(
        claimed,
        core.execution.actor,
        state=State.RUNNING,
        stop_cause=None,
        history=History(),
        now=claimed.claimed_at,
    )
    move = next_move(case)
    assert isinstance(move, BeginStep)
    async with core.database.transaction() as tx:
        row = replace(
            (await leases.lock(tx, [claimed.lease]))[claimed.id],
            **{"state": State.RUNNING, **changes},
        )
    begin = core.turns._cases.begin_of(claimed, move, case)
    start = Start(begin, claimed, core.execution.actor, move, StopCause.DEADLINE, first=True)
    assert may_begin(start, row) is may
    assert may_begin(start, None) is False


async def test_the_database_goes_away_in_a_turn_and_the_lease_ends(core: House) -> None:
    """Nothing is guessed: the claim stays counted, the row is claimed again once the lease is over."""
    id = await core.admit()
    [claimed] = await core.execution.claim(1)
    with psycopg.connect(core.url, autocommit=True) as connection:
        connection.execute("ALTER TABLE attempts RENAME TO attempts_away")
        await core.execution.run(claimed)
        assert core.log.of("unexpected")
        connection.execute("ALTER TABLE attempts_away RENAME TO attempts")
    assert work_of(core, id)["claims"] == 1
    assert core.provider.called == 0
    end_leases(core.url)
    await core.work()
    assert await core.state(id) is State.SUCCEEDED
