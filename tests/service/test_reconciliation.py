"""The end of doubt, on a real database: by evidence, by a re-send under the stored key, or by a human.

PROTOCOL.md, 'What holds, and under what', R3, R5, R7 and its counterexamples; CASES.md B02, B27, B29.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import orjson
import pytest

from app.domain.course import ATTENTION_LOOKUP_SECONDS
from app.domain.identity import OperationId, new_id
from app.domain.lifecycle import Actor, State
from app.domain.outcome import (
    Absent,
    Finding,
    NotApplied,
    Outcome,
    Refused,
    Rejected,
    Unavailable,
    Unknown,
)
from app.domain.policy import Backoff
from app.domain.profile import KeyRules, LookupRules, ProviderClass
from app.storage import claims
from app.telemetry import Metric
from tests.support.core import House, Play, ScriptedProvider, house, profile_of, type_of
from tests.support.factories import age, end_leases, query
from tests.support.races import Gate, session

pytestmark = pytest.mark.anyio
KEYS, LOOKED_UP, NEITHER = (
    ProviderClass.HONOURS_KEYS,
    ProviderClass.LOOKED_UP,
    ProviderClass.NEITHER,
)
LOST = Play(effect=True, answer=Unknown("timeout"))
NEVER = Play(effect=False, answer=Unknown("timeout"))


@pytest.fixture
async def keyed(database_url: str) -> AsyncIterator[House]:
    async with house(database_url, ScriptedProvider(profile_of(KEYS))) as opened:
        yield opened


@pytest.fixture
async def looked_up(database_url: str) -> AsyncIterator[House]:
    async with house(database_url, ScriptedProvider(profile_of(LOOKED_UP))) as opened:
        yield opened


async def doubt(core: House, play: Play = LOST, key: str = "key") -> OperationId:
    """An operation whose first send ended unknown, due for the reconciler."""
    core.provider.plays(play)
    id = await core.admit(key)
    await core.work()
    assert await core.state(id) is State.UNCERTAIN
    end_leases(core.url)
    return id


async def again(core: House) -> None:
    """Another pass of the reconciler, its waits over."""
    end_leases(core.url)
    await core.reconcile()


def outcomes(core: House) -> list[object]:
    return [row[0] for row in query(core.url, "SELECT outcome FROM attempts ORDER BY began_at, id")]


# -- by key ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("play", [LOST, NEVER], ids=["executed", "never arrived"])
async def test_a_key_is_sent_again_and_there_is_one_effect(play: Play, keyed: House) -> None:
    id = await doubt(keyed, play)
    await keyed.reconcile()
    assert await keyed.state(id) is State.SUCCEEDED
    assert outcomes(keyed) == ["unknown", "succeeded"]
    assert len(keyed.provider.effects) == 1
    first, second = keyed.provider.arrived
    assert first == second
    assert keyed.provider.asked == []
    assert keyed.count(Metric.UNCERTAIN_SETTLED, type="test.one", evidence="resend") == 1


async def test_doubt_stays_doubt_for_as_long_as_it_takes(keyed: House) -> None:
    """B27, I5: every answer is unknown; nothing but an answer ends it, and the back-off grows."""
    id = await doubt(keyed)
    keyed.provider.always = LOST
    for _ in range(20):
        await again(keyed)
    assert await keyed.state(id) is State.UNCERTAIN
    assert work_of(keyed)["claims"] == 0
    keyed.provider.always = None
    await again(keyed)
    assert await keyed.state(id) is State.SUCCEEDED
    assert len(keyed.provider.effects) == 1
    assert len({arrival.key for arrival in keyed.provider.arrived}) == 1


def work_of(core: House) -> dict[str, object]:
    [(row,)] = query(core.url, "SELECT to_jsonb(w) FROM work AS w")
    found: dict[str, object] = row
    return found


@pytest.mark.parametrize(
    ("memory_left", "sends"),
    [(1.0, 2), (-1.0, 1)],
    ids=["before the deadline", "after it"],
)
async def test_no_re_send_past_the_providers_memory(
    memory_left: float, sends: int, keyed: House
) -> None:
    """R3, I6, CASES.md B29: memory minus stall and delivery, counted from the first begin."""
    id = await doubt(keyed)
    [(resend,)] = query(
        keyed.url, "SELECT extract(epoch FROM resend_by - first_began_at) FROM steps"
    )
    assert resend == 600 - (1 + 4)
    query(keyed.url, "UPDATE steps SET resend_by = now() + %s * interval '1 s'", memory_left)
    await keyed.reconcile()
    assert keyed.provider.called == sends
    if sends == 2:
        assert await keyed.state(id) is State.SUCCEEDED
        assert query(
            keyed.url,
            "SELECT bool_and(a.send_by <= s.resend_by) FROM attempts AS a JOIN steps AS s"
            " USING (bucket, operation_id) WHERE a.outcome = 'succeeded'",
        ) == [(True,)]
    else:
        assert await keyed.state(id) is State.NEEDS_ATTENTION
        assert (await keyed.view(id)).attention == "resend-deadline-passed"


async def test_past_the_memory_it_is_looked_up_where_it_can_be(database_url: str) -> None:
    """R3: after it only evidence; a provider with a look-up is asked on and on, and no human is needed."""
    profile = profile_of(KEYS, lookup=LookupRules("key"))
    async with house(database_url, ScriptedProvider(profile)) as core:
        id = await doubt(core)
        query(core.url, "UPDATE steps SET resend_by = now() - interval '1 s'")
        core.provider.finds(Unavailable("http-503"), Absent())
        for _ in range(2):
            await again(core)
            assert await core.state(id) is State.UNCERTAIN
        await again(core)
        assert await core.state(id) is State.SUCCEEDED
        assert core.provider.called == 1


async def test_a_burned_key_is_never_sent_again(keyed: House) -> None:
    """R18: without a look-up it takes a human; never on the burned answer alone."""
    id = await doubt(keyed, Play(effect=False, answer=Unknown("http-500", burned=True)))
    await keyed.reconcile()
    assert (await keyed.view(id)).attention == "key-burned"
    assert keyed.provider.called == 1


@pytest.mark.parametrize("answer", [NotApplied("http-429"), NotApplied("gone", final=True)])
async def test_not_applied_of_one_attempt_clears_no_other(answer: Outcome, keyed: House) -> None:
    """Counterexamples 8 and 10: the re-send met a 429, a refused connection; the first may have executed."""
    id = await doubt(keyed)
    keyed.provider.plays(Play(effect=False, answer=answer))
    await keyed.reconcile()
    assert await keyed.state(id) is State.UNCERTAIN
    assert outcomes(keyed) == ["unknown", "not_applied"]
    await again(keyed)
    assert await keyed.state(id) is State.SUCCEEDED
    assert len(keyed.provider.effects) == 1


@pytest.mark.parametrize(
    ("stored", "waited", "ends"),
    [
        (False, False, State.UNCERTAIN),
        (False, True, State.FAILED),
        (True, False, State.FAILED),
    ],
    ids=["unstored, the first may still arrive", "the first cannot arrive any more", "stored"],
)
async def test_a_refused_re_send(
    stored: bool, waited: bool, ends: State, database_url: str
) -> None:
    """R5 and counterexample 9: a refusal ends the step only when it speaks for the first send too."""
    keys = KeyRules("Idempotency-Key", memory_seconds=600.0, stores_rejections=stored)
    async with house(database_url, ScriptedProvider(profile_of(KEYS, keys=keys))) as core:
        id = await doubt(core, NEVER)
        if waited:
            age(core.url, 11)  # window 5, stall 1, delivery 4
        core.provider.plays(Play(effect=False, answer=Rejected("declined")))
        await core.reconcile()
        assert await core.state(id) is ends
        assert outcomes(core) == ["unknown", "rejected"]


# -- by look-up ------------------------------------------------------------------------------------------


async def test_applied_settles_at_any_time(looked_up: House) -> None:
    """R4: also before `settled_at`."""
    id = await doubt(looked_up)
    assert query(looked_up.url, "SELECT bool_and(settled_at > now()) FROM attempts") == [(True,)]
    await looked_up.reconcile()
    view = await looked_up.view(id)
    assert view.state is State.SUCCEEDED
    assert orjson.loads(view.result or b"") == {"references": {"send": "effect-1"}}
    assert looked_up.provider.called == 1
    assert outcomes(looked_up) == ["unknown"], "the ledger keeps what the send told"
    assert looked_up.count(Metric.UNCERTAIN_SETTLED, type="test.one", evidence="finding") == 1


@pytest.mark.parametrize(
    "told",
    [
        Absent(),
        Refused("too-old"),
        Unavailable("http-503", "Bad \x00 text \ud800"),
        ValueError("leaked"),
        asyncio.CancelledError(),
    ],
    ids=lambda told: type(told).__name__,
)
async def test_one_look_up_without_the_effect_settles_nothing(
    told: Finding | BaseException, looked_up: House
) -> None:
    """B27: one `Absent` is no proof, anything else is no evidence; what leaks is Unavailable."""
    id = await doubt(looked_up)
    looked_up.provider.finds(told)
    await looked_up.reconcile()
    row = work_of(looked_up)
    assert (row["state"], row["actor"], row["claims"]) == ("uncertain", "reconciler", 0)
    [(kind, source)] = query(looked_up.url, "SELECT kind, source FROM findings")
    assert source == "lookup"
    assert kind == (
        "unavailable" if isinstance(told, BaseException) else type(told).__name__.lower()
    )
    await again(looked_up)
    assert await looked_up.state(id) is State.SUCCEEDED
    assert looked_up.provider.called == 1


async def test_asking_is_written_down_before_the_provider_is_asked(looked_up: House) -> None:
    """R4: the time that counts is committed before the look-up's first byte; no transaction is open then."""
    id = await doubt(looked_up)
    seen: list[list[tuple[object, ...]]] = []
    ask = looked_up.provider.look_up

    async def look_up(request: object, key: object) -> Finding:
        seen.append(query(looked_up.url, "SELECT kind, asked_at <= now() FROM findings"))
        seen.append(
            query(
                looked_up.url,
                "SELECT state FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'house' AND state <> 'idle'",
            )
        )
        return await ask(request, key)  # type: ignore[arg-type]

    looked_up.provider.look_up = look_up  # type: ignore[method-assign]
    await looked_up.reconcile()
    assert seen == [[(None, True)], []]
    assert await looked_up.state(id) is State.SUCCEEDED


async def test_look_ups_wait_for_what_the_provider_asked(database_url: str) -> None:
    """B32 for look-ups: an Unavailable with Retry-After is a floor, also before `settled_at`."""
    provider = ScriptedProvider(profile_of(LOOKED_UP))
    async with house(database_url, provider, types=[type_of(backoff=Backoff(1, 1))]) as core:
        await doubt(core)
        provider.finds(Unavailable("http-429", retry_after_seconds=50.0))
        await core.reconcile()
        [(wait,)] = query(core.url, "SELECT extract(epoch FROM due_at - now()) FROM work")
        assert 49 < wait <= 51


# -- by a human ------------------------------------------------------------------------------------------


async def test_without_keys_and_look_up_a_human_is_asked_at_once(database_url: str) -> None:
    async with house(database_url, ScriptedProvider(profile_of(NEITHER))) as core:
        core.provider.plays(LOST)
        id = await core.admit()
        await core.work()
        await core.reconcile()  # nothing is aged: the worker made it due
        assert (await core.view(id)).attention == "no-evidence-possible"
        for _ in range(3):
            end_leases(core.url)
            await core.reconcile()
            await core.work()
        assert await core.state(id) is State.NEEDS_ATTENTION
        assert core.provider.called == 1
        assert (
            core.count(Metric.ATTENTION_RAISED, type="test.one", reason="no-evidence-possible") == 1
        )


async def test_look_ups_go_on_while_a_human_is_asked(database_url: str) -> None:
    """PROTOCOL.md, claim: `needs_attention` is the reconciler's, for look-ups only."""
    profile = profile_of(KEYS, lookup=LookupRules("key"))
    async with house(database_url, ScriptedProvider(profile)) as core:
        id = await doubt(core)
        query(
            core.url,
            "UPDATE work SET state = 'needs_attention', attention = 'claims-exhausted'",
        )
        core.provider.finds(Absent())
        await core.reconcile()
        assert await core.state(id) is State.NEEDS_ATTENTION
        assert core.provider.called == 1, "no send from needs_attention"
        [(wait,)] = query(core.url, "SELECT extract(epoch FROM due_at - now()) FROM work")
        assert ATTENTION_LOOKUP_SECONDS - 5 < wait <= 2 * ATTENTION_LOOKUP_SECONDS
        await again(core)
        assert await core.state(id) is State.SUCCEEDED


async def test_a_suspect_operation_is_left_to_a_human(keyed: House) -> None:
    """R16: after a restore nothing is begun on the strength of what the copy does not know."""
    id = await keyed.admit()
    query(keyed.url, "UPDATE work SET suspect = true")
    await keyed.work()
    assert (await keyed.view(id)).attention == "suspect-after-restore"
    assert keyed.provider.called == 0


# -- takeover --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(ProviderClass))
async def test_a_worker_that_died_in_its_send(kind: ProviderClass, database_url: str) -> None:
    """'Lease ends with an open attempt': judged by the next claim, parked, settled by its class."""
    provider = ScriptedProvider(profile_of(kind))
    async with house(database_url, provider) as core:
        gate = Gate()
        provider.plays(Play(after=gate.enter))
        id = await core.admit()
        [claimed] = await core.execution.claim(1)
        turn = asyncio.create_task(core.execution.run(claimed))
        await gate.reached()
        end_leases(core.url)
        await core.work()
        assert await core.state(id) is State.UNCERTAIN
        assert outcomes(core) == [None]
        await again(core)
        expected = State.NEEDS_ATTENTION if kind is NEITHER else State.SUCCEEDED
        assert await core.state(id) is expected
        assert len(provider.effects) == 1
        assert provider.called == (2 if kind is KEYS else 1)
        gate.open()
        await turn


async def test_two_recoverers_one_call_each(database_url: str) -> None:
    """CASES.md B02: five operations of a dead worker, two recoverers at once, one call for each row won."""
    provider = ScriptedProvider(profile_of(KEYS))
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(house(database_url, provider)) for _ in range(2)
        ]
        provider.always = LOST
        ids = [await first.admit(f"k-{n}") for n in range(5)]
        await first.work()
        provider.always = None
        end_leases(database_url)
        generations = dict(query(database_url, "SELECT operation_id, lease_generation FROM work"))
        barrier = asyncio.Barrier(2)

        async def recover(core: House) -> list[OperationId]:
            await barrier.wait()
            claimed = await core.reconciliation.claim(3)
            await barrier.wait()  # both have what they won before either acts
            await asyncio.gather(*(core.reconciliation.run(one) for one in claimed))
            assert all(one.lease.generation == generations[one.id.uuid] + 1 for one in claimed)
            return [one.id for one in claimed]

        won, also_won = await asyncio.gather(recover(first), recover(second))
        assert sorted(won + also_won) == sorted(ids), "each has exactly one new owner"
        assert provider.called == 5 + 5
        assert len(provider.effects) == 5
        assert {await first.state(id) for id in ids} == {State.SUCCEEDED}


async def test_a_claim_that_is_not_committed_yet_is_no_permission(database_url: str) -> None:
    """B02: while another claims the same rows this one neither waits for them nor works on them."""
    provider = ScriptedProvider(profile_of(KEYS))
    async with house(database_url, provider) as core, session(database_url) as rival:
        for n in range(5):
            await doubt(core, key=f"k-{n}")
        async with rival.transaction() as tx:
            rows = await claims.claim(
                tx,
                actor=Actor.RECONCILER,
                owner_token=new_id(),
                lease_seconds=30.0,
                limit=5,
                known=core.registry.type_versions(),
            )
            assert len(rows) == 5
            assert await core.reconcile() == []
        assert await core.reconcile() == []
        assert core.provider.called == 5
