"""The schema and the stamp, from an operator's side: bring them up, look at them, insist on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.domain.errors import ConfigurationError, InvalidInput, SchemaMismatch, StoreUnavailable
from app.service.installation import mismatch
from app.storage import installation, migrations
from app.storage.database import Database
from app.storage.installation import Stamp
from app.storage.revisions import revisions


async def reach(database: Database) -> None:
    """Return once the database has answered; the pool would keep trying where this tells why not.

    Raises:
        StoreUnavailable: it cannot be reached.
        ConfigurationError: its address cannot be understood.
    """
    try:
        connection = await database.dedicated()
    except StoreUnavailable:
        raise
    except Exception as error:
        # What the driver says of an address it cannot read may quote the password in it.
        raise ConfigurationError(
            "DATABASE_URL cannot be understood: postgresql://user:password@host:port/database."
        ) from error
    await connection.close()


async def require_head(database: Database) -> None:
    """Return where the schema is the one this program was written for.

    Raises:
        SchemaMismatch: it is not; says what to run.
        StoreUnavailable: the database went away.
    """
    async with database.transaction() as tx:
        revision = await installation.revision(tx)
    if (trouble := revision_trouble(revision)) is not None:
        raise SchemaMismatch(trouble)


def revision_trouble(revision: str | None) -> str | None:
    """What is wrong with a schema at `revision`, in a sentence; None where nothing is."""
    head = migrations.head()
    if revision == head:
        return None
    return (
        f"The schema is at {revision or 'nothing'}, this program needs {head}: "
        "run `fencepost migrate`."
    )


def migrate(url: str, revision: str, *, stamp: str, say: Callable[[str], None]) -> str | None:
    """Bring the schema to `revision` (`head`, `base`, or one there is); the revision it is at then.

    `stamp`: FENCEPOST_INSTALLATION, written where there is none yet. `say` takes lines about waiting.

    Raises:
        InvalidInput: there is no such revision.
        StoreUnavailable: the database cannot be reached, or a table stayed in use; nothing was changed.
    """
    _check(revision)
    migrations.upgrade(url, revision, stamp=stamp, say=say)
    return migrations.current(url)


def statements(revision: str) -> str:
    """The SQL that brings an empty database to `revision`. Needs no database.

    Raises:
        InvalidInput: there is no such revision.
    """
    _check(revision)
    return migrations.sql(revision)


def _check(revision: str) -> None:
    known = revisions()
    if revision not in ("head", "base", *known):
        raise InvalidInput(
            f"There is no revision {revision!r}: it is head, base or one of {', '.join(known)}."
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """The stamp as stored, and what does not fit about it; `trouble` None where all fits."""

    revision: str | None
    stamp: Stamp
    trouble: str | None


async def standing(database: Database, expected_stamp: str) -> Standing | None:
    """The installation this database belongs to, or None where it was never stamped.

    `expected_stamp`: FENCEPOST_INSTALLATION, may be empty. Call it on a migrated database.

    Raises:
        StoreUnavailable: the database went away.
    """
    async with database.transaction() as tx:
        revision = await installation.revision(tx)
        stamp = await installation.read(tx)
    if stamp is None:
        return None
    return Standing(revision, stamp, mismatch(stamp, expected_stamp))
