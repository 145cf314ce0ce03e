"""`fencepost doctor`: every finding, and the exit status it leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from app.service import doctor
from app.storage import inspection
from tests.cli.conftest import Ran, Run
from tests.cli.test_ops import admitted
from tests.support.postgres import ask
from tests.support.simulator import SimulatorThread


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with SimulatorThread() as running:
        yield running.url


@pytest.fixture
def examined(fencepost: Run, provider: str) -> Run:
    """`fencepost doctor --json`, with a provider that answers."""

    def run(**variables: str) -> Ran:
        return fencepost("doctor", "--json", **{"FENCEPOST_PAYMENTS_URL": provider, **variables})

    return run


def findings(ran: Ran) -> dict[str, tuple[str, str]]:
    """What was found, by the check's name."""
    return {each["name"]: (each["health"], each["seen"]) for each in ran.json["checks"]}


def advice(ran: Ran, name: str) -> str:
    """What to do about a check."""
    (found,) = [each["advice"] for each in ran.json["checks"] if each["name"] == name]
    assert isinstance(found, str)
    return found


def test_all_is_well(examined: Run) -> None:
    ran = examined()
    assert (ran.status, ran.err) == (0, "")
    assert ran.json["healthy"] is True
    found = findings(ran)
    assert {health for health, _ in found.values()} == {"ok"}
    assert set(found) == {
        "variables", "settings", "plug-ins", "database", "clock", "schema", "stamp", "snapshots",
        "work", "provider payments",
    }  # fmt: skip


def test_the_table(fencepost: Run, provider: str) -> None:
    ran = fencepost(
        "doctor", FENCEPOST_PAYMENTS_URL=provider, FENCEPOST_LEASE_SECOND="3", Fencepost_x="1"
    )
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0].split() == ["CHECK", "HEALTH", "SEEN"]
    assert lines[1].split()[:2] == ["variables", "warn"]
    assert "FENCEPOST_LEASE_SECOND, Fencepost_x" in lines[1]
    assert lines[-1].startswith("warn variables: ")


def test_variables_that_are_read_are_no_finding(examined: Run) -> None:
    ran = examined(
        FENCEPOST_LEASE_SECONDS="20",
        FENCEPOST_PAYMENTS_CONCURRENCY="3",
        FENCEPOST_SIMULATOR_DATA="x",
    )
    assert findings(ran)["variables"][0] == "ok"


def test_two_database_addresses(examined: Run, database_url: str) -> None:
    ran = examined(DATABASE_URL="postgresql://elsewhere/x", FENCEPOST_DATABASE_URL=database_url)
    assert ran.status == 0
    assert findings(ran)["variables"][0] == "warn"
    assert findings(ran)["database"][0] == "ok"


def test_settings_that_do_not_hold(examined: Run) -> None:
    ran = examined(FENCEPOST_LEASE_SECONDS="-1")
    assert ran.status == 1
    health, seen = findings(ran)["settings"]
    assert (health, "FENCEPOST_LEASE_SECONDS" in seen) == ("fail", True)


def test_plugins_that_do_not_hold(examined: Run) -> None:
    """The database is looked at all the same."""
    ran = examined(FENCEPOST_PAYMENTS_TIMEOUT_SECONDS="none")
    assert ran.status == 1
    assert findings(ran)["plug-ins"][0] == "fail"
    assert findings(ran)["stamp"][0] == "ok"


def test_database_down(examined: Run) -> None:
    ran = examined(DATABASE_URL="postgresql://u:s3cret-word@127.0.0.1:1/x")
    assert ran.status == 3
    health, seen = findings(ran)["database"]
    assert (health, "Connection refused" in seen) == ("fail", True)
    assert "s3cret" not in ran.out + ran.err
    assert findings(ran)["provider payments"][0] == "ok"
    assert "schema" not in findings(ran)


def test_provider_down(examined: Run) -> None:
    ran = examined(FENCEPOST_PAYMENTS_URL="http://127.0.0.1:1")
    assert ran.status == 3
    assert findings(ran)["provider payments"][0] == "fail"
    assert "FENCEPOST_PAYMENTS_URL" in advice(ran, "provider payments")
    assert findings(ran)["stamp"][0] == "ok"


def test_never_migrated(examined: Run, empty_database_url: str) -> None:
    ran = examined(DATABASE_URL=empty_database_url)
    assert ran.status == 1
    assert findings(ran)["schema"][0] == "fail"
    assert "fencepost migrate" in advice(ran, "schema")
    assert "work" not in findings(ran)


def test_another_schema(examined: Run, database_url: str) -> None:
    ask(database_url, "UPDATE alembic_version SET version_num = '0000'")
    ran = examined()
    assert ran.status == 1
    assert "0000" in findings(ran)["schema"][1]


@pytest.mark.parametrize("column", ["timeline", "system_identifier"])
def test_a_copied_database(examined: Run, database_url: str, column: str) -> None:
    ask(database_url, f"UPDATE installation SET {column} = {column} - 1")
    ran = examined()
    assert ran.status == 1
    assert findings(ran)["stamp"][0] == "fail"


def test_another_installation(examined: Run) -> None:
    ran = examined(FENCEPOST_INSTALLATION="another")
    assert ran.status == 1
    assert "another" in findings(ran)["stamp"][1]


def test_types_nobody_here_knows(examined: Run, database_url: str) -> None:
    admitted(database_url, key="k")
    ask(database_url, "UPDATE work SET type = 'gone.type', type_version = 3")
    ran = examined()
    assert ran.status == 0
    assert findings(ran)["types"] == (
        "warn",
        "Live operations of types that are not loaded here: gone.type version 3 (1).",
    )


def test_work_nobody_does(examined: Run, database_url: str) -> None:
    admitted(database_url, key="k")
    assert findings(examined())["work"] == ("ok", "1 live operations, none overdue.")
    ask(database_url, "UPDATE work SET due_at = now() - interval '5 minutes'")
    ran = examined()
    assert ran.status == 0
    health, seen = findings(ran)["work"]
    assert (health, "due for 30" in seen) == ("warn", True)


def test_work_that_needs_a_human(examined: Run, database_url: str) -> None:
    admitted(database_url, key="k")
    ask(
        database_url,
        "UPDATE work SET state = 'needs_attention', attention = 'test', actor = 'reconciler',"
        " due_at = now() + interval '1 hour'",
    )
    ran = examined()
    assert findings(ran)["work"] == ("warn", "1 operations need attention.")
    assert "needs_attention" in advice(ran, "work")


def test_an_old_snapshot(examined: Run, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLD_SNAPSHOT_SECONDS", 0.0)
    with psycopg.connect(database_url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1 FROM work")
        assert findings(examined())["snapshots"][0] == "warn"


@pytest.mark.parametrize(("off", "health"), [(0.0, "ok"), (5.0, "warn"), (-5.0, "warn")])
def test_clocks_that_differ(
    examined: Run, monkeypatch: pytest.MonkeyPatch, off: float, health: str
) -> None:
    told = inspection.server

    async def skewed(tx: Any) -> inspection.Server:
        server = await told(tx)
        now: datetime = server.now + timedelta(seconds=off)
        return inspection.Server(server.version_number, server.version, now)

    monkeypatch.setattr(doctor.inspection, "server", skewed)
    ran = examined()
    assert ran.status == 0
    assert findings(ran)["clock"][0] == health


def test_an_old_server(examined: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told = inspection.server

    async def old(tx: Any) -> inspection.Server:
        return inspection.Server(140_012, "14.12", (await told(tx)).now)

    monkeypatch.setattr(doctor.inspection, "server", old)
    ran = examined()
    assert ran.status == 1
    assert findings(ran)["database"][0] == "fail"
    assert "15" in advice(ran, "database")


def test_a_probe_that_raises_or_hangs() -> None:
    """Whatever an adapter does, the doctor says something about it, and in time."""

    class Profile:
        name = "odd"
        timeout_seconds = -0.99

    class Raises:
        profile = Profile()

        async def probe(self) -> None:
            raise RuntimeError("s3cret")

    class Hangs(Raises):
        async def probe(self) -> None:
            await asyncio.Event().wait()

    adapters: Any = {"hangs": Hangs(), "raises": Raises()}
    hangs, raises = asyncio.run(doctor.check_providers(adapters))
    assert "in time" in hangs.seen
    assert raises.seen == "Its probe failed: RuntimeError."
    assert hangs.out_of_reach
    assert raises.health is doctor.Health.FAIL
