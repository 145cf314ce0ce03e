"""Operators resolve and retry: evidence, R6, idempotency, the audit row in the same commit (CONTRACT 23)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import psycopg
import pytest

from app.bootstrap import Core
from app.domain.lifecycle import State
from app.domain.operation import OperationView
from app.service.execution import Execution
from app.service.reconciliation import Reconciliation
from app.service.resolution import (
    Accepted,
    NotFound,
    Operators,
    Refusal,
    Request,
    Resolve,
    Verdict,
)
from app.storage import views
from tests.service.test_settling import LONG, doubtful, posts, turn
from tests.support.recovery import TENANT, admit, core_of, elapse, environment, rows, view_of
from tests.support.simulator import SimulatorThread

pytestmark = pytest.mark.anyio


@pytest.fixture
def simulator() -> Iterator[SimulatorThread]:
    with SimulatorThread() as running:
        yield running


@pytest.fixture
async def core(database_url: str, simulator: SimulatorThread) -> AsyncIterator[Core]:
    """A provider with neither keys nor look-up: only a human can find out."""
    environ = environment(
        database_url, simulator.url, PAYMENTS_HONOUR_KEYS="false", PAYMENTS_LOOK_UP="false"
    )
    async with core_of(environ) as made:
        yield made


def operators(core: Core) -> Operators:
    profiles = {name: one.profile for name, one in core.plugins.adapters.items()}
    return Operators(core.database, core.plugins.registry, profiles, core.notifier, core.telemetry)


def request(view: OperationView, key: str = "k", **given: object) -> Request:
    return replace(Request(view.id, TENANT, "op-key", key, "seen at the provider"), **given)


def resolve(verdict: Verdict, **given: object) -> Resolve:
    return replace(Resolve("charge", verdict, "ticket 1"), **given)


async def stuck(core: Core, simulator: SimulatorThread, key: str, effect: str) -> OperationView:
    await doubtful(core, simulator, key, effect=effect)
    await turn(core, Reconciliation)
    [(operation,)] = rows(core.database.url, "SELECT state FROM work")
    assert operation == "needs_attention"
    async with core.database.transaction() as tx:
        [view] = await views.page(tx, tenant=TENANT, narrowed=views.Filter(), after=None, limit=1)
    return view


async def test_applied_is_always_allowed_and_ends_it(
    core: Core, simulator: SimulatorThread
) -> None:
    view = await stuck(core, simulator, "applied", "after")
    answer = await operators(core).resolve(
        request(view), resolve(Verdict.APPLIED, reference="ch_1", result={"charge": "ch_1"})
    )
    assert isinstance(answer, Accepted)
    await turn(core, Execution)
    assert (await view_of(core, view)).state is State.SUCCEEDED
    assert posts(simulator, "applied") == 1
    assert rows(core.database.url, "SELECT action, by, reason, evidence FROM operator_actions") == [
        ("resolve", "op-key", "seen at the provider", "ticket 1")
    ]


@pytest.mark.parametrize("verdict", [Verdict.ABSENT, Verdict.REJECTED])
async def test_r6_too_early_is_refused_with_the_time_left(
    core: Core, simulator: SimulatorThread, verdict: Verdict
) -> None:
    """Counterexample 11: bytes may still arrive, so absence cannot be known."""
    view = await stuck(core, simulator, "early", "before")
    answer = await operators(core).resolve(request(view), resolve(verdict))
    assert isinstance(answer, Refusal)
    assert answer.code == "attempt-not-settled"
    assert answer.retry_after_seconds is not None
    assert 0 < answer.retry_after_seconds < LONG
    assert rows(core.database.url, "SELECT count(*) FROM operator_actions") == [(0,)]
    assert rows(core.database.url, "SELECT count(*) FROM findings") == [(0,)]


async def test_absent_sends_once_more(core: Core, simulator: SimulatorThread) -> None:
    view = await stuck(core, simulator, "absent", "before")
    elapse(core.database.url, LONG)
    answer = await operators(core).resolve(request(view), resolve(Verdict.ABSENT))
    assert isinstance(answer, Accepted)
    assert answer.view.state is State.RUNNING
    await turn(core, Execution)
    assert (await view_of(core, view)).state is State.SUCCEEDED
    assert len(simulator.effects(reference="absent")) == 1


async def test_rejected_ends_failed(core: Core, simulator: SimulatorThread) -> None:
    view = await stuck(core, simulator, "rejected", "before")
    elapse(core.database.url, LONG)
    assert isinstance(
        await operators(core).resolve(request(view), resolve(Verdict.REJECTED)), Accepted
    )
    await turn(core, Execution)
    view = await view_of(core, view)
    assert view.state is State.FAILED
    assert b"rejected-by-operator" in (view.error or b"")
    assert posts(simulator, "rejected") == 1


async def test_done_once_is_done_once(core: Core, simulator: SimulatorThread) -> None:
    view = await stuck(core, simulator, "once", "after")
    acting = operators(core)
    what = resolve(Verdict.APPLIED, reference="ch_1")
    assert isinstance(await acting.resolve(request(view), what), Accepted)
    again = await acting.resolve(request(view), what)
    assert isinstance(again, Accepted)
    assert again.repeated
    other = await acting.resolve(request(view), resolve(Verdict.ABSENT))
    assert isinstance(other, Refusal)
    assert other.code == "idempotency-key-reused"
    assert rows(core.database.url, "SELECT count(*) FROM operator_actions") == [(1,)]


async def test_an_old_version_is_refused(core: Core, simulator: SimulatorThread) -> None:
    view = await stuck(core, simulator, "stale", "after")
    answer = await operators(core).resolve(
        request(view, version=view.version - 1), resolve(Verdict.APPLIED)
    )
    assert isinstance(answer, Refusal)
    assert answer.code == "version-mismatch"


async def test_another_tenants_operation_is_not_there(
    core: Core, simulator: SimulatorThread
) -> None:
    view = await stuck(core, simulator, "other", "after")
    answer = await operators(core).resolve(
        request(view, tenant="somebody"), resolve(Verdict.APPLIED)
    )
    assert isinstance(answer, NotFound)
    assert rows(core.database.url, "SELECT count(*) FROM operator_actions") == [(0,)]


async def test_retry_is_refused_in_doubt(core: Core, simulator: SimulatorThread) -> None:
    view = await stuck(core, simulator, "doubt", "after")
    elapse(core.database.url, LONG)
    answer = await operators(core).retry(request(view))
    assert isinstance(answer, Refusal)
    assert answer.code == "in-doubt"


async def test_retry_lets_poison_go_on(core: Core, simulator: SimulatorThread) -> None:
    view = await admit(core, "poison")
    with_claims = "UPDATE work SET claims = 99 RETURNING claims"
    with psycopg.connect(core.database.url, autocommit=True) as connection:
        connection.execute(with_claims)
    await turn(core, Execution)
    view = await view_of(core, view)
    assert view.attention == "claims-exhausted"
    answer = await operators(core).retry(request(view, version=view.version))
    assert isinstance(answer, Accepted)
    await turn(core, Execution)
    assert (await view_of(core, view)).state is State.SUCCEEDED
    assert len(simulator.effects(reference="poison")) == 1


async def test_a_resolve_fences_out_whoever_holds_the_lease(
    core: Core, simulator: SimulatorThread
) -> None:
    """R8: a reconciler that is asking while the operator decides records nothing any more."""
    view = await stuck(core, simulator, "fenced", "after")
    elapse(core.database.url, 2 * 3600)
    [claimed] = await Reconciliation(core.turns()).claim(10)
    answer = await operators(core).resolve(request(view), resolve(Verdict.APPLIED))
    assert isinstance(answer, Accepted)
    await Reconciliation(core.turns()).run(claimed)
    assert (await view_of(core, view)).state is State.RUNNING
    await turn(core, Execution)
    assert (await view_of(core, view)).state is State.SUCCEEDED


async def test_a_done_operation_never_changes(core: Core, simulator: SimulatorThread) -> None:
    view = await admit(core, "done")
    await turn(core, Execution)
    answer = await operators(core).resolve(request(view), resolve(Verdict.REJECTED))
    assert isinstance(answer, Refusal)
    assert answer.code == "operation-done"
