"""Migrations: up, down, up; what they make is what the tables say; short waits for tables in use (K26)."""

from __future__ import annotations

import threading

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from app.domain.errors import StoreUnavailable
from app.storage import migrations
from app.storage.tables import metadata


def tables_of(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
    return {name for (name,) in rows}


def stamp_of(url: str) -> tuple[object, ...]:
    with psycopg.connect(url) as connection:
        [row] = connection.execute(
            "SELECT stamp, epoch, system_identifier, timeline FROM installation"
        ).fetchall()
    return row


def test_up_down_up(empty_database_url: str) -> None:
    migrations.upgrade(empty_database_url)
    assert migrations.current(empty_database_url) == migrations.head()
    assert set(metadata.tables) <= tables_of(empty_database_url)
    migrations.upgrade(empty_database_url, "base")
    assert migrations.current(empty_database_url) is None
    assert tables_of(empty_database_url) == {"alembic_version"}
    migrations.upgrade(empty_database_url)
    assert migrations.current(empty_database_url) == migrations.head()


def test_what_migrations_make_is_what_the_tables_say(database_url: str) -> None:
    with migrations.connect(database_url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_the_stamp_is_written_once(empty_database_url: str) -> None:
    """DESIGN.md I11: the first migration writes it; no later run and no other setting changes it."""
    migrations.upgrade(empty_database_url, stamp="ours")
    first = stamp_of(empty_database_url)
    assert first[:2] == ("ours", 1)
    migrations.upgrade(empty_database_url, stamp="theirs")
    assert stamp_of(empty_database_url) == first


def test_without_a_setting_the_stamp_is_drawn(empty_database_url: str) -> None:
    migrations.upgrade(empty_database_url)
    assert len(str(stamp_of(empty_database_url)[0])) == 36


def test_two_migrators_at_once(empty_database_url: str) -> None:
    errors: list[BaseException] = []

    def migrate() -> None:
        try:
            migrations.upgrade(empty_database_url)
        except BaseException as error:
            errors.append(error)

    both = [threading.Thread(target=migrate) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert errors == []
    assert migrations.current(empty_database_url) == migrations.head()


@pytest.mark.slow
def test_a_table_in_use_is_waited_for_in_short_tries(database_url: str) -> None:
    """K26: each try gives up soon, so nothing queues behind it; the first free moment is used."""
    told: list[str] = []
    with psycopg.connect(database_url) as reader:
        reader.execute("SELECT count(*) FROM operations")

        def say(line: str) -> None:
            told.append(line)
            reader.rollback()  # the reader goes when the first try was given up

        migrations.upgrade(database_url, "base", say=say)
    assert len(told) == 1
    assert "in use" in told[0]
    assert migrations.current(database_url) is None


@pytest.mark.slow
def test_a_table_that_stays_in_use_is_a_clear_error(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "TRIES", 1)
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT", "50ms")
    with psycopg.connect(database_url) as reader:
        reader.execute("SELECT count(*) FROM operations")
        with pytest.raises(StoreUnavailable, match="nothing was changed"):
            migrations.upgrade(database_url, "base")
    assert migrations.current(database_url) == migrations.head()


def test_the_sql_for_a_person_runs(empty_database_url: str) -> None:
    """`fencepost migrate --sql` on an empty database gives the same tables."""
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(migrations.sql().encode())
    assert set(metadata.tables) <= tables_of(empty_database_url)
    assert migrations.current(empty_database_url) == migrations.head()


def test_a_database_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        migrations.current("postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=2")


def test_every_table_of_an_operation_begins_its_key_with_the_bucket() -> None:
    """DESIGN.md, 5: Citus distributes by it, and a unique index without it is illegal there."""
    per_operation = [table for table in metadata.tables.values() if "bucket" in table.c]
    assert len(per_operation) == 7
    for table in per_operation:
        assert next(iter(table.primary_key.columns)).name == "bucket"
        for index in table.indexes:
            assert not index.unique or "bucket" in index.columns
        for constraint in table.constraints:
            if isinstance(constraint, sa.UniqueConstraint):
                assert "bucket" in constraint.columns


def test_one_migrator_waits_for_another_however_long_it_takes(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit is for tables that others use, not for the other migrator."""
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT", "50ms")
    errors: list[BaseException] = []

    def migrate() -> None:
        try:
            migrations.upgrade(empty_database_url)
        except BaseException as error:
            errors.append(error)

    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'"
        " AND datname = current_database() AND now() - query_start > interval '0.2 s'"
    )
    with psycopg.connect(empty_database_url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [migrations._ONE_MIGRATOR])
        second = threading.Thread(target=migrate)
        second.start()
        while second.is_alive() and other.execute(waits).fetchone() == (0,):
            second.join(0.01)
        assert errors == []
        assert migrations.current(empty_database_url) is None
    second.join(60)
    assert errors == []
    assert migrations.current(empty_database_url) == migrations.head()


def test_a_migration_that_fails_half_way_leaves_nothing(empty_database_url: str) -> None:
    """One transaction each: there is no half-applied state to start from."""
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE work (in_the_way int)")  # made after most other tables
        with pytest.raises(sa.exc.ProgrammingError):
            migrations.upgrade(empty_database_url)
        assert tables_of(empty_database_url) <= {"work", "alembic_version"}
        assert migrations.current(empty_database_url) is None
        connection.execute("DROP TABLE work")
    migrations.upgrade(empty_database_url)
    assert migrations.current(empty_database_url) == migrations.head()
