"""`fencepost ops`: across tenants, with the ledger; cancel as an operator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from app.domain.identity import IdempotencyKey, OperationId
from app.domain.operation import OperationView
from app.service.admission import Admitted, Draft
from tests.cli.conftest import Run
from tests.support.postgres import ask
from tests.support.recovery import core_of, environment, recover, rows
from tests.support.simulator import SimulatorThread


@pytest.fixture
def simulator() -> Iterator[SimulatorThread]:
    with SimulatorThread() as running:
        yield running


def admitted(url: str, *, tenant: str = "acme", key: str, source: str = "tok_ok") -> OperationView:
    """One operation, as the API admits it."""

    async def admit() -> OperationView:
        async with core_of(environment(url, "http://127.0.0.1:1")) as core:
            input = {"amount": 100, "currency": "eur", "source": source}
            members = {"type": "payments.charge", "input": input}
            answer = await core.admission().submit(Draft(tenant, IdempotencyKey(key), members, {}))
            assert isinstance(answer, Admitted), answer
            return answer.view

    return asyncio.run(admit())


def worked(url: str, simulator: SimulatorThread) -> None:
    """Worker and reconciler run until nothing is due."""

    async def work() -> None:
        async with core_of(environment(url, simulator.url)) as core:
            await recover(core, url)

    asyncio.run(work())


def test_list_is_newest_first_over_all_tenants(fencepost: Run, database_url: str) -> None:
    ids = [
        str(admitted(database_url, tenant=tenant, key=str(number)).id)
        for number, tenant in enumerate(["acme", "bold", "acme"])
    ]
    listed = fencepost("ops", "list", "--json").json
    assert [each["id"] for each in listed] == ids[::-1]
    assert [each["tenant"] for each in listed] == ["acme", "bold", "acme"]
    table = fencepost("ops", "list").out.splitlines()
    assert table[0].split()[:4] == ["ID", "TENANT", "TYPE", "STATE"]
    assert [line.split()[0] for line in table[1:]] == ids[::-1]


def test_list_filters(fencepost: Run, database_url: str, simulator: SimulatorThread) -> None:
    failed = str(admitted(database_url, key="1", source="tok_declined").id)
    worked(database_url, simulator)
    bold = str(admitted(database_url, tenant="bold", key="2").id)
    acme = str(admitted(database_url, key="3").id)

    def ids(*arguments: str) -> list[str]:
        return [each["id"] for each in fencepost("ops", "list", "--json", *arguments).json]

    assert ids("--state", "failed") == [failed]
    assert ids("--state", "pending") == [acme, bold]
    assert ids("--state", "pending", "--tenant", "bold") == [bold]
    assert ids("--tenant", "acme") == [acme, failed]
    assert ids("--limit", "1") == [acme]
    assert ids("--state", "pending", "--limit", "1") == [acme]
    assert ids("--type", "payments.charge") == [acme, bold, failed]
    assert ids("--type", "payments.refund") == []
    assert ids("--type", "payments.refund", "--state", "pending") == []
    assert ids("--state", "running") == []


def test_show_as_json(fencepost: Run, database_url: str, simulator: SimulatorThread) -> None:
    """The operation as the API shows it, plus generation and the whole ledger."""
    view = admitted(database_url, key="k")
    before = fencepost("ops", "show", str(view.id), "--json").json
    assert (before["state"], before["generation"], before["attempts"]) == ("pending", 0, [])
    worked(database_url, simulator)
    shown = fencepost("ops", "show", str(view.id), "--json").json
    assert shown["id"] == str(view.id)
    assert (shown["state"], shown["done"], shown["generation"]) == ("succeeded", True, 1)
    assert shown["result"]["amount"] == 100
    assert shown["steps"][0]["state"] == "succeeded"
    assert shown["links"]["self"] == f"/v1/operations/{view.id}"
    (attempt,) = shown["attempts"]
    assert {"id", "step", "began_at", "send_by", "outcome", "code", "recorded_at"} <= set(attempt)
    assert (attempt["step"], attempt["outcome"], attempt["code"]) == ("charge", "succeeded", None)
    assert attempt["began_at"] < attempt["send_by"]
    stored = rows(database_url, "SELECT id::text, generation FROM attempts")
    assert [(attempt["id"], attempt["generation"])] == stored


def test_show_for_a_person(fencepost: Run, database_url: str, simulator: SimulatorThread) -> None:
    view = admitted(database_url, key="k", source="tok_declined")
    assert "No attempt was begun." in fencepost("ops", "show", str(view.id)).out
    worked(database_url, simulator)
    out = fencepost("ops", "show", str(view.id)).out
    assert "rejected" in out
    assert "card_declined" in out
    assert "failed" in out


def test_show_of_nothing_is_status_1(fencepost: Run) -> None:
    ran = fencepost("ops", "show", str(OperationId.new(7)))
    assert (ran.status, ran.out) == (1, "")
    assert "no operation" in ran.err


def test_cancel_at_once(fencepost: Run, database_url: str) -> None:
    view = admitted(database_url, key="k")
    ran = fencepost("ops", "cancel", str(view.id), "--reason", "wrong customer")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == f"{view.id}: is cancelled.\n"
    by, reason = rows(database_url, "SELECT by, reason FROM operator_actions")[0]
    assert "@" in by
    assert reason == "wrong customer"
    again = fencepost("ops", "cancel", str(view.id), "--json").json
    assert (again["state"], again["cancel_requested"]) == ("cancelled", True)
    assert ask(database_url, "SELECT count(*) FROM operator_actions") == 1


def test_cancel_of_something_begun_is_a_wish(
    fencepost: Run, database_url: str, simulator: SimulatorThread
) -> None:
    view = admitted(database_url, key="k", source="tok_500_burn")

    async def one_turn() -> None:
        async with core_of(environment(database_url, simulator.url)) as core:
            await recover(core, database_url, passes=1)

    asyncio.run(one_turn())
    ran = fencepost("ops", "cancel", str(view.id))
    assert ran.status == 0
    assert "asked to stop; it is still uncertain" in ran.out
    assert fencepost("ops", "show", str(view.id), "--json").json["cancel_requested"] is True


def test_cancel_of_nothing_is_status_1(fencepost: Run) -> None:
    ran = fencepost("ops", "cancel", str(OperationId.new(7)))
    assert (ran.status, ran.out) == (1, "")


def test_cancel_is_refused_on_a_copied_database(fencepost: Run, database_url: str) -> None:
    """A copy may be looked at, but nothing acts on it (R16)."""
    view = admitted(database_url, key="k")
    rows(database_url, "UPDATE installation SET timeline = timeline + 1 RETURNING 1")
    assert fencepost("ops", "show", str(view.id)).status == 0
    ran = fencepost("ops", "cancel", str(view.id))
    assert (ran.status, ran.out) == (1, "")
    assert "adopted" in ran.err
    assert ask(database_url, "SELECT state FROM work") == "pending"
