"""Every doubt ends by evidence: counted absence, fresh keys, look-ups that lag, lie or are down.

PROTOCOL.md R3, R4, R18; CASES.md B27, B29. Time passes by moving every instant in the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from app.bootstrap import Core
from app.domain.lifecycle import State
from app.domain.operation import OperationView
from app.service.execution import Execution
from app.service.reconciliation import Reconciliation
from tests.support.recovery import admit, core_of, elapse, environment, rows, view_of
from tests.support.simulator import SimulatorThread

pytestmark = pytest.mark.anyio
LONG = 3600.0
"""More than any settle time of the settings used here, less than the retry horizon."""


@pytest.fixture
def simulator() -> Iterator[SimulatorThread]:
    with SimulatorThread() as running:
        yield running


async def turn(core: Core, role: type[Execution] | type[Reconciliation]) -> int:
    """One pass of one role over what is due; how many operations it claimed."""
    turns = core.turns()
    acting = role(turns)
    claimed = await acting.claim(50)
    for one in claimed:
        await acting.run(one)
    await turns.drain()
    return len(claimed)


async def doubtful(
    core: Core, simulator: SimulatorThread, key: str, **fault: object
) -> OperationView:
    """A charge whose one send was cut off, and which is therefore uncertain."""
    simulator.fault(match={"method": "POST", "reference": key}, drop=True, **fault)
    view = await admit(core, key)
    await turn(core, Execution)
    view = await view_of(core, view)
    assert view.state is State.UNCERTAIN
    return view


def posts(simulator: SimulatorThread, reference: str) -> int:
    """How many sends reached the provider."""
    return sum(1 for call in simulator.calls(reference=reference) if call["method"] == "POST")


class TestLookedUp:
    """The class without keys: never a second send before two counted absences."""

    @pytest.fixture
    def environ(self, database_url: str, simulator: SimulatorThread) -> dict[str, str]:
        return environment(database_url, simulator.url, PAYMENTS_HONOUR_KEYS="false")

    async def test_two_counted_absences_allow_one_more_send(
        self, environ: dict[str, str], database_url: str, simulator: SimulatorThread
    ) -> None:
        async with core_of(environ) as core:
            view = await doubtful(core, simulator, "twice", effect="before")
            elapse(database_url, 5)
            await turn(core, Reconciliation)  # too early: this Absent does not count (R4)
            assert (await view_of(core, view)).state is State.UNCERTAIN
            elapse(database_url, LONG)
            await turn(core, Reconciliation)  # the first that counts
            assert (await view_of(core, view)).state is State.UNCERTAIN
            assert posts(simulator, "twice") == 1
            elapse(database_url, 60)
            await turn(core, Reconciliation)  # the second
            assert (await view_of(core, view)).state is State.RUNNING
            await turn(core, Execution)
            assert (await view_of(core, view)).state is State.SUCCEEDED
        assert len(simulator.effects(reference="twice")) == 1

    async def test_applied_settles_at_any_time(
        self, environ: dict[str, str], database_url: str, simulator: SimulatorThread
    ) -> None:
        async with core_of(environ) as core:
            view = await doubtful(core, simulator, "there", effect="after")
            elapse(database_url, 5)
            await turn(core, Reconciliation)
            assert (await view_of(core, view)).state is State.SUCCEEDED
        assert posts(simulator, "there") == 1

    async def test_b27_neither_age_nor_one_lie_ends_doubt(
        self, environ: dict[str, str], database_url: str, simulator: SimulatorThread
    ) -> None:
        """CASES.md B27: down for longer than every limit, then one lying absence, then the truth."""
        async with core_of(environ) as core:
            view = await doubtful(core, simulator, "lied", effect="after")
            simulator.control(lookup="down")
            for _ in range(3):
                elapse(database_url, LONG)
                await turn(core, Reconciliation)
            simulator.control(lookup="lying_absent")
            elapse(database_url, LONG)
            await turn(core, Reconciliation)
            assert (await view_of(core, view)).state is State.UNCERTAIN
            simulator.control(lookup="ok")
            elapse(database_url, LONG)
            await turn(core, Reconciliation)
            assert (await view_of(core, view)).state is State.SUCCEEDED
        assert len(simulator.effects(reference="lied")) == 1
        assert posts(simulator, "lied") == 1

    async def test_a_new_attempt_voids_earlier_absences(
        self, environ: dict[str, str], database_url: str, simulator: SimulatorThread
    ) -> None:
        """Counterexample 7: after the second send was lost as well, absence is counted from the start."""
        async with core_of(environ) as core:
            view = await doubtful(core, simulator, "again", effect="before")
            for _ in range(2):
                elapse(database_url, LONG)
                await turn(core, Reconciliation)
            simulator.fault(
                match={"method": "POST", "reference": "again"}, effect="after", drop=True
            )
            await turn(core, Execution)
            assert (await view_of(core, view)).state is State.UNCERTAIN
            simulator.control(lookup="lying_absent")
            elapse(database_url, LONG)
            await turn(core, Reconciliation)
            assert (await view_of(core, view)).state is State.UNCERTAIN
            simulator.control(lookup="ok")
            elapse(database_url, LONG)
            await turn(core, Reconciliation)
            assert (await view_of(core, view)).state is State.SUCCEEDED
        assert len(simulator.effects(reference="again")) == 1


class TestHonoursKeys:
    """The class with keys: re-sent under the key while its memory lasts, then as one that is looked up."""

    async def test_b29_past_the_memory_nothing_is_sent_on_the_strength_of_the_key(
        self, database_url: str, simulator: SimulatorThread
    ) -> None:
        """CASES.md B29 with a look-up: the effect is found, never made again."""
        environ = environment(database_url, simulator.url)
        async with core_of(environ) as core:
            view = await doubtful(core, simulator, "forgot", effect="after")
            simulator.control(lookup="down")
            elapse(database_url, 86_400)
            simulator.forget_keys()
            await turn(core, Reconciliation)
            assert posts(simulator, "forgot") == 1
            simulator.control(lookup="ok")
            elapse(database_url, LONG)
            await turn(core, Reconciliation)
            assert (await view_of(core, view)).state is State.SUCCEEDED
        assert len(simulator.effects(reference="forgot")) == 1

    async def test_b29_without_a_look_up_a_human_is_asked(
        self, database_url: str, simulator: SimulatorThread
    ) -> None:
        environ = environment(database_url, simulator.url, PAYMENTS_LOOK_UP="false")
        async with core_of(environ) as core:
            view = await doubtful(core, simulator, "nobody", effect="after")
            elapse(database_url, 86_400)
            simulator.forget_keys()
            await turn(core, Reconciliation)
            view = await view_of(core, view)
            assert view.state is State.NEEDS_ATTENTION
            assert view.attention == "resend-deadline-passed"
        assert posts(simulator, "nobody") == 1

    async def test_burned_key_goes_on_under_a_fresh_one_after_counted_absence(
        self, database_url: str, simulator: SimulatorThread
    ) -> None:
        """R18: the stored 500 comes back; only two counted absences allow the next key."""
        environ = environment(database_url, simulator.url)
        async with core_of(environ) as core:
            view = await admit(core, "burned", source="tok_500_burn")
            await turn(core, Execution)
            elapse(database_url, 5)
            await turn(core, Reconciliation)  # the re-send brings the stored answer back
            assert posts(simulator, "burned") == 2
            for _ in range(2):
                elapse(database_url, LONG)
                assert (await view_of(core, view)).state is State.UNCERTAIN
                await turn(core, Reconciliation)
            assert posts(simulator, "burned") == 2
            await turn(core, Execution)
            assert (await view_of(core, view)).state is State.SUCCEEDED
        assert len(simulator.effects(reference="burned")) == 1
        [(ordinal, burned, key)] = rows(
            database_url, "SELECT key_ordinal, burned_keys, downstream_key FROM steps"
        )
        assert ordinal == 1
        assert len(burned) == 1
        assert key not in burned

    async def test_burned_key_with_the_look_up_down_waits(
        self, database_url: str, simulator: SimulatorThread
    ) -> None:
        environ = environment(database_url, simulator.url, PAYMENTS_LOOK_UP="false")
        async with core_of(environ) as core:
            view = await admit(core, "stuck", source="tok_500_burn")
            await turn(core, Execution)
            for _ in range(2):
                elapse(database_url, 5)
                await turn(core, Reconciliation)
            view = await view_of(core, view)
            assert view.state is State.NEEDS_ATTENTION
            assert view.attention == "key-burned"
        assert len(simulator.effects(reference="stuck")) == 0


async def test_neither_is_never_sent_twice(database_url: str, simulator: SimulatorThread) -> None:
    """The class with neither: doubt goes to a human at once, and stays there."""
    environ = environment(
        database_url, simulator.url, PAYMENTS_HONOUR_KEYS="false", PAYMENTS_LOOK_UP="false"
    )
    async with core_of(environ) as core:
        view = await doubtful(core, simulator, "neither", effect="after")
        for _ in range(3):
            elapse(database_url, LONG)
            await turn(core, Reconciliation)
        view = await view_of(core, view)
        assert view.state is State.NEEDS_ATTENTION
        assert view.attention == "no-evidence-possible"
    assert posts(simulator, "neither") == 1


async def test_r15_a_hit_older_than_the_operation_is_no_evidence(
    database_url: str, simulator: SimulatorThread
) -> None:
    """R15: an effect from before the operation (minus its retry horizon) does not settle it."""
    async with core_of(environment(database_url, simulator.url)) as core:
        view = await doubtful(core, simulator, "older", effect="after")
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("UPDATE operations SET created_at = now() + interval '2 days'")
        elapse(database_url, 86_400)
        simulator.forget_keys()
        await turn(core, Reconciliation)
        assert (await view_of(core, view)).state is not State.SUCCEEDED
        assert rows(database_url, "SELECT kind, code FROM findings") == [
            ("refused", "older-than-operation")
        ]
    assert posts(simulator, "older") == 1
