"""Every verb that takes a lease, called with one that is superseded: not one row changes (DESIGN.md I3, R8).

The verbs are found by walking `app.storage`; a new one is called as soon as it exists, and fails here until
this page knows how to make its arguments. CASES.md B01, K1.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

import app.storage
from app.domain.identity import Direction, DownstreamKey, OperationId, new_id
from app.domain.lifecycle import Actor, State
from app.domain.operation import Lease, Trust
from app.domain.outcome import Absent, Succeeded
from app.domain.plan import EffectRequest
from app.storage import leases
from app.storage.attempts import Answer
from app.storage.database import Database, Statement, Transaction
from app.storage.findings import Found, LookUp
from app.storage.leases import Locked, Release
from app.storage.operations import Finish
from app.storage.steps import Begin
from tests.support.factories import Inserted, Leased, Sent, Told, insert, query, snapshot, supersede
from tests.support.races import session

pytestmark = pytest.mark.anyio

Verb = Callable[..., Awaitable[object]]


def _mentions_lease(hint: object, seen: frozenset[object] = frozenset()) -> bool:
    """Whether values of this type carry a lease, directly or within."""
    if hint is Lease:
        return True
    if hint in seen:
        return False
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return any(_mentions_lease(inner, seen | {hint}) for inner in hints.values())
    return any(_mentions_lease(inner, seen) for inner in typing.get_args(hint))


def _modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages(app.storage.__path__, "app.storage."):
        yield importlib.import_module(info.name)


def _fenced_verbs() -> dict[str, Verb]:
    """Every public async function of the package with a lease somewhere in its parameters."""
    found: dict[str, Verb] = {}
    for module in _modules():
        for name, verb in inspect.getmembers(module, inspect.isfunction):
            if verb.__module__ != module.__name__ or name.startswith("_"):
                continue
            if not (inspect.iscoroutinefunction(verb) or inspect.isasyncgenfunction(verb)):
                continue
            hints = typing.get_type_hints(verb)
            if any(_mentions_lease(hint) for name, hint in hints.items() if name != "return"):
                found[f"{module.__name__.removeprefix('app.storage.')}.{name}"] = verb
    return found


VERBS = _fenced_verbs()

READERS = frozenset(
    {
        "leases.lock",  # locks, and says what it locked
        "attempts.recorded_before",
        "findings.found_before",
        "steps.begun_before",
        "operations.finished_before",
    }
)
"""Those that change nothing even under a good lease."""

NEEDS_NO_LEASE = frozenset({"attempts.add_late_answers"})
"""R7: the one write without a fence; tests/storage/test_late_answers.py says what it may change."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """One running operation with an open attempt and a look-up under way."""

    row: Inserted
    attempt: Sent
    asked: Told


def scene_of(url: str) -> Scene:
    attempt, asked = Sent(), Told(None, asked_ago=1.0)
    row = insert(
        url, state=State.RUNNING, leased=Leased(generation=3), attempts=[attempt], findings=[asked]
    )
    return Scene(row, attempt, asked)


def _begin(lease: Lease) -> Begin:
    return Begin(
        lease=lease,
        attempt_id=new_id(),
        step="next",
        item=0,
        direction=Direction.FORWARD,
        provider="test",
        key=DownstreamKey("k"),
        key_ordinal=0,
        request=EffectRequest("POST", "/", b""),
        send_window_seconds=5,
        in_transit_seconds=5,
        lag_seconds=0,
        resend_seconds=60,
        restarts_window=True,
    )


def _makers(scene: Scene, lease: Lease) -> dict[object, object]:
    """One value of each type that carries a lease."""
    return {
        Lease: lease,
        Begin: _begin(lease),
        Answer: Answer(lease, scene.attempt.id, Succeeded("r", {"a": 1})),
        LookUp: LookUp(lease, new_id(), "send", 0, Direction.FORWARD),
        Found: Found(lease, scene.asked.id, Absent()),
        Release: Release(lease, State.RUNNING, Actor.WORKER, 0.0),
        Finish: Finish(lease, State.SUCCEEDED, result=b"{}", result_version=1),
    }


NUMBERS = {"lease_seconds": 30.0, "limit": 10}


def _arguments(
    name: str, verb: Verb, scene: Scene, lease: Lease, locked: dict[OperationId, Locked]
) -> dict[str, object]:
    """The verb's arguments after the transaction, made from its annotations."""
    makers = _makers(scene, lease)
    hints = typing.get_type_hints(verb)
    arguments: dict[str, object] = {}
    for parameter in list(inspect.signature(verb).parameters.values())[1:]:
        hint = hints[parameter.name]
        inner = typing.get_args(hint)
        if parameter.name in NUMBERS:
            arguments[parameter.name] = NUMBERS[parameter.name]
        elif hint in makers:
            arguments[parameter.name] = makers[hint]
        elif typing.get_origin(hint) is collections.abc.Mapping and Locked in inner:
            arguments[parameter.name] = locked
        elif len(inner) == 1 and inner[0] in makers:
            arguments[parameter.name] = [makers[inner[0]]]
        elif len(inner) == 1 and typing.get_origin(inner[0]) is tuple:
            _, carrier = typing.get_args(inner[0])
            arguments[parameter.name] = [(new_id(), makers[carrier])]
        elif parameter.default is not inspect.Parameter.empty:
            continue
        else:
            pytest.fail(f"{name}: this test does not know how to make {parameter.name}: {hint}")
    return arguments


async def _call(
    database: Database,
    name: str,
    scene: Scene,
    lease: Lease,
    forged: dict[OperationId, Locked] | None = None,
) -> object:
    async with database.transaction() as tx:
        locked = await leases.lock(tx, [lease]) if forged is None else forged
        return await VERBS[name](tx, **_arguments(name, VERBS[name], scene, lease, locked))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with session(database_url) as opened:
        yield opened


def test_the_walk_finds_the_verbs() -> None:
    """The walk itself works: what is known to be fenced is found."""
    assert set(VERBS) >= {
        "leases.lock",
        "leases.renew",
        "leases.release",
        "steps.begin",
        "attempts.record",
        "findings.ask",
        "findings.find",
        "operations.finish",
        "attempts.add_late_answers",
    }
    assert set(VERBS) >= READERS | NEEDS_NO_LEASE, "these are gone: take them off the lists"
    for verb in VERBS.values():
        first = next(iter(typing.get_type_hints(verb).values()))
        assert first is Transaction, verb


@pytest.mark.parametrize("name", sorted(set(VERBS) - READERS - NEEDS_NO_LEASE))
async def test_under_a_good_lease_it_writes(
    name: str, database_url: str, database: Database
) -> None:
    """The other tests would prove nothing about a call that never changes anything."""
    scene = scene_of(database_url)
    before = snapshot(database_url)
    await _call(database, name, scene, scene.row.held)
    assert snapshot(database_url) != before


def older_generation(url: str, scene: Scene) -> Lease:
    held = scene.row.held
    return Lease(held.operation, held.owner_token, held.generation - 1, Trust(0))


def newer_generation(url: str, scene: Scene) -> Lease:
    held = scene.row.held
    return Lease(held.operation, held.owner_token, held.generation + 1, Trust(0))


def other_token(url: str, scene: Scene) -> Lease:
    held = scene.row.held
    return Lease(held.operation, uuid4(), held.generation, Trust(0))


def claimed_again(url: str, scene: Scene) -> Lease:
    supersede(url, scene.row.id)
    return scene.row.held


def released(url: str, scene: Scene) -> Lease:
    query(
        url,
        "UPDATE work SET lease_owner_token = NULL, lease_expires_at = NULL, due_at = now()"
        " WHERE operation_id = %s",
        scene.row.id.uuid,
    )
    return scene.row.held


def row_gone(url: str, scene: Scene) -> Lease:
    query(url, "DELETE FROM work WHERE operation_id = %s", scene.row.id.uuid)
    query(
        url,
        "UPDATE operations SET state = 'cancelled', error = '{}', version = 9, completed_at = now(),"
        " idempotency_expires_at = now() WHERE id = %s",
        scene.row.id.uuid,
    )
    return scene.row.held


def other_operation(url: str, scene: Scene) -> Lease:
    """A token and a generation that are good, for another row."""
    other = insert(url, state=State.RUNNING, leased=Leased(generation=3))
    return Lease(scene.row.id, other.held.owner_token, other.held.generation, Trust(0))


SUPERSEDED = (
    older_generation,
    newer_generation,
    other_token,
    claimed_again,
    released,
    row_gone,
    other_operation,
)


def _forge(lease: Lease) -> dict[OperationId, Locked]:
    """What a caller would hold who believes it locked the row under this very lease."""
    return {
        lease.operation: Locked(
            operation=lease.operation,
            owner_token=lease.owner_token,
            generation=lease.generation,
            state=State.RUNNING,
            actor=Actor.WORKER,
            ending=None,
            stop_cause=None,
            attention=None,
            deadline=None,
            due_at=datetime.now(UTC),
            uncertain_since=None,
            version=1,
            suspect=False,
            now=datetime.now(UTC),
        )
    }


@pytest.mark.parametrize("name", sorted(set(VERBS) - NEEDS_NO_LEASE))
async def test_a_superseded_lease_changes_nothing(
    name: str, database_url: str, database: Database
) -> None:
    """With what `lock` gives, and with a forged `locked`: the statements themselves repeat the fence."""
    for make in SUPERSEDED:
        scene = scene_of(database_url)
        lease = make(database_url, scene)
        before = snapshot(database_url)
        for forged in (None, _forge(lease)):
            told = await _call(database, name, scene, lease, forged)
            assert not told, f"{make.__name__}: nobody may be told that it worked"
            assert snapshot(database_url) == before, make.__name__


@pytest.mark.parametrize("name", sorted(set(VERBS) - NEEDS_NO_LEASE - READERS))
async def test_a_lost_neighbour_does_not_come_along(
    name: str, database_url: str, database: Database
) -> None:
    """`locked` by another lease of the same operation is no permission for this one."""
    scene = scene_of(database_url)
    stale = older_generation(database_url, scene)
    before = snapshot(database_url)
    async with database.transaction() as tx:
        locked = await leases.lock(tx, [stale, scene.row.held])
        assert set(locked) == {scene.row.id}
        await VERBS[name](tx, **_arguments(name, VERBS[name], scene, stale, locked))
    assert snapshot(database_url) == before


async def test_an_ended_lease_begins_nothing(database_url: str, database: Database) -> None:
    """R1: what begins something new needs a lease that has not ended, also where nobody took it yet."""
    row = insert(database_url, leased=Leased(expires_in=-0.001))
    async with database.transaction() as tx:
        assert set(await leases.lock(tx, [row.held])) == {row.id}
        assert await leases.lock(tx, [row.held], unexpired=True) == {}


UNFENCED = {
    "operations.admit": "makes the row; the insert decides (K8)",
    "claims.claim": "is what gives leases",
    "attempts.insert_late": "R7: evidence only, under the row's lock",
    "attempts.wake": "R7: makes due, changes no state, under the row's lock",
    "cancellation.cancel_at_once": "a client's verb, under the row's lock (R8, R10)",
    "cancellation.delete_cancelled": "a client's verb, under the row's lock (R8, R10)",
    "cancellation.note_cancel": "a client's verb, under the row's lock (R8, R10)",
    "resolution.add_evidence": "an operator's verb, under the row's lock (R6, R8)",
    "resolution.go_on": "an operator's verb, under the row's lock; fences the holder out (R8)",
}
"""Statements that write rows of an operation without a lease, and why they may."""

_WRITES = re.compile(
    r"\b(?:INSERT INTO|UPDATE|DELETE FROM) (?:operations|work|steps|attempts|findings)\b"
)
_FENCE = (
    re.compile(r"\bwork\.lease_owner_token = \w+\.owner_token\b"),
    re.compile(r"\bwork\.lease_generation = \w+\.generation\b"),
)


def test_every_writing_statement_carries_the_fence() -> None:
    """Also those that no call reaches under a lost lease; who writes without one is named, with a reason."""
    unfenced = {
        found.name
        for module in _modules()
        for found in vars(module).values()
        if isinstance(found, Statement)
        and _WRITES.search(found.sql)
        and not all(fence.search(found.sql) for fence in _FENCE)
    }
    assert unfenced == set(UNFENCED)
