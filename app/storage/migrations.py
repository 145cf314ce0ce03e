"""Schema changes: up, down, what is there and what should be. Alembic does the work.

Each migration takes its locks with a short `lock_timeout`, so that it never queues traffic behind itself,
and is tried again when it did not get them (CASES.md K26).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.pool import NullPool

from app.domain.errors import SchemaMismatch, StoreUnavailable

LOCK_TIMEOUT = "2s"
STATEMENT_TIMEOUT = "10min"
TRIES = 30
_ONE_MIGRATOR = 0x46504D47  # an arbitrary number of our own, for pg_advisory_lock


def sqlalchemy_url(url: str) -> sa.URL:
    """`postgresql://...` as SQLAlchemy wants it, with psycopg 3 named as the driver."""
    parsed = sa.make_url(url.replace("postgres://", "postgresql://", 1))
    return parsed.set(drivername="postgresql+psycopg")


@contextmanager
def connect(url: str) -> Iterator[sa.Connection]:
    """A connection with the migrations' timeouts set for its session."""
    engine = sa.create_engine(sqlalchemy_url(url), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            connection.execute(sa.text(f"SET lock_timeout = '{LOCK_TIMEOUT}'"))
            connection.execute(sa.text(f"SET statement_timeout = '{STATEMENT_TIMEOUT}'"))
            connection.commit()
            yield connection
    except sa.exc.OperationalError as error:
        raise StoreUnavailable(f"The database cannot be reached: {error.orig}") from error
    finally:
        engine.dispose()


def _config(connection: sa.Connection | None = None, output: StringIO | None = None) -> Config:
    root = Path(__file__).resolve().parents[2]
    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(root / "alembic").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head() -> str:
    """The revision this code was written for."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise SchemaMismatch("No migrations were found beside the program.")
    return revision


def current(url: str) -> str | None:
    """The revision the database is at, or None where it was never migrated."""
    with connect(url) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def upgrade(
    url: str,
    revision: str = "head",
    *,
    stamp: str = "",
    say: Callable[[str], None] = lambda _line: None,
) -> None:
    """Bring the schema to `revision`, up or down, and write the installation's stamp where none is.

    `stamp`: what FENCEPOST_INSTALLATION says; empty draws a random one (DESIGN.md I11).

    Raises:
        StoreUnavailable: the database cannot be reached, or a table stayed locked over all tries.
    """
    with connect(url) as connection:
        # Waiting for another migrator holds up nobody else, so it may take as long as the other needs.
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        connection.execute(sa.text("SELECT pg_advisory_lock(:n)"), {"n": _ONE_MIGRATOR})
        connection.commit()
        for number in range(1, TRIES + 1):
            try:
                _run(connection, revision, stamp)
                return
            except sa.exc.OperationalError as error:
                connection.rollback()
                if getattr(error.orig, "sqlstate", None) not in ("55P03", "40P01"):
                    raise
                say(f"A table is in use; trying again ({number} of {TRIES}).")
                time.sleep(min(0.1 * number, 1.0))
        raise StoreUnavailable(f"A table stayed locked over {TRIES} tries; nothing was changed.")


def _run(connection: sa.Connection, revision: str, stamp: str) -> None:
    config = _config(connection)
    here = MigrationContext.configure(connection).get_current_revision()
    connection.rollback()
    if revision == "base" or _is_below(revision, here):
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)
        connection.commit()
        if MigrationContext.configure(connection).get_current_revision() is not None:
            _write_stamp(connection, stamp)
    connection.commit()


def _is_below(revision: str, here: str | None) -> bool:
    if revision == "head" or here is None or revision == here:
        return False
    script = ScriptDirectory.from_config(_config())
    return any(older.revision == revision for older in script.iterate_revisions(here, "base"))


def _write_stamp(connection: sa.Connection, stamp: str) -> None:
    """The stamp is written once, at the first migration, and never changed by a later one."""
    connection.execute(
        sa.text(
            "INSERT INTO installation"
            " (singleton, stamp, system_identifier, timeline, epoch, created_at)"
            " SELECT true, coalesce(nullif(:stamp, ''), gen_random_uuid()::text),"
            "  (SELECT system_identifier FROM pg_control_system()),"
            "  ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int,"
            "  1, now()"
            " ON CONFLICT DO NOTHING"
        ),
        {"stamp": stamp},
    )


def sql(revision: str = "head") -> str:
    """The statements an empty database needs to get to `revision`, for a person to run."""
    output = StringIO()
    command.upgrade(_config(output=output), revision, sql=True)
    return output.getvalue()
