"""`fencepost migrate` and `installation show`."""

from __future__ import annotations

from app.storage.migrations import head
from app.storage.revisions import revisions
from tests.cli.conftest import Run
from tests.support.postgres import ask


def test_migrate_makes_the_schema_and_the_stamp(bare: Run, empty_database_url: str) -> None:
    ran = bare("migrate", DATABASE_URL=empty_database_url, FENCEPOST_INSTALLATION="blue")
    assert (ran.status, ran.out) == (0, f"The schema is at {head()}.\n")
    assert ask(empty_database_url, "SELECT stamp FROM installation") == "blue"
    again = bare("migrate", DATABASE_URL=empty_database_url, FENCEPOST_INSTALLATION="green")
    assert (again.status, again.out) == (0, ran.out)
    assert ask(empty_database_url, "SELECT stamp FROM installation") == "blue"


def test_migrate_goes_down_and_up(fencepost: Run, database_url: str) -> None:
    down = fencepost("migrate", "--to", "base")
    assert (down.status, down.out) == (0, "The schema is at nothing.\n")
    assert ask(database_url, "SELECT to_regclass('operations')") is None
    up = fencepost("migrate", "--to", revisions()[0])
    assert (up.status, up.out) == (0, f"The schema is at {revisions()[0]}.\n")
    assert fencepost("migrate").status == 0
    assert ask(database_url, "SELECT to_regclass('operations')") == "operations"


def test_migrate_to_nowhere_is_refused(fencepost: Run) -> None:
    ran = fencepost("migrate", "--to", "9999")
    assert (ran.status, ran.out) == (1, "")
    assert head() in ran.err


def test_sql_needs_no_database_and_makes_the_schema(bare: Run, empty_database_url: str) -> None:
    ran = bare("migrate", "--sql")
    assert (ran.status, ran.err) == (0, "")
    ask(empty_database_url, ran.out)
    assert ask(empty_database_url, "SELECT version_num FROM alembic_version") == head()


def test_revisions_are_in_order() -> None:
    known = revisions()
    assert known[-1] == head()
    assert len(set(known)) == len(known)


def test_show(fencepost: Run, database_url: str) -> None:
    shown = fencepost("installation", "show", "--json").json
    assert shown["installation"] == ask(database_url, "SELECT stamp FROM installation")
    assert (shown["epoch"], shown["fits"], shown["trouble"]) == (1, True, None)
    assert shown["revision"] == head()
    assert shown["system_identifier"] == shown["cluster"]["system_identifier"]
    assert shown["system_identifier"] == str(
        ask(database_url, "SELECT system_identifier FROM pg_control_system()")
    )
    assert shown["installation"] in fencepost("installation", "show").out


def test_show_tells_what_does_not_fit(fencepost: Run, database_url: str) -> None:
    ran = fencepost("installation", "show", "--json", FENCEPOST_INSTALLATION="another")
    assert ran.status == 0
    assert ran.json["fits"] is False
    assert "another" in ran.json["trouble"]
    ask(database_url, "UPDATE installation SET system_identifier = 1")
    assert "adopted" in fencepost("installation", "show").out


def test_show_without_a_stamp_is_refused(fencepost: Run, database_url: str) -> None:
    ask(database_url, "DELETE FROM installation")
    ran = fencepost("installation", "show")
    assert (ran.status, ran.out) == (1, "")
    assert "no stamp" in ran.err
