"""May this process act on this database? Schema and stamp are compared before any role starts (R16)."""

from __future__ import annotations

import asyncio

from app.domain.errors import SchemaMismatch, StampMismatch, StoreUnavailable
from app.service.clock import elapsed
from app.storage import installation, migrations
from app.storage.database import Database
from app.storage.installation import Stamp


async def verify(database: Database, expected_stamp: str) -> Stamp:
    """The stamp, where schema and stamp fit; `expected_stamp` is FENCEPOST_INSTALLATION, may be empty.

    Raises:
        SchemaMismatch: not migrated, or to another revision than this code's.
        StampMismatch: another installation's, a copied or restored cluster, a promoted or a read-only one.
        StoreUnavailable: the database cannot be reached.
    """
    async with database.transaction() as tx:
        revision = await installation.revision(tx)
        head = migrations.head()
        if revision != head:
            raise SchemaMismatch(
                f"The schema is at {revision or 'nothing'}, this program needs {head}: "
                "run `fencepost migrate`."
            )
        stamp = await installation.read(tx)
    if stamp is None:
        raise StampMismatch("The database carries no stamp: run `fencepost migrate`.")
    if (trouble := mismatch(stamp, expected_stamp)) is not None:
        raise StampMismatch(trouble)
    return stamp


def mismatch(stamp: Stamp, expected_stamp: str) -> str | None:
    """What does not fit between a stamp and where it was found, in a sentence; None where all fits."""
    if stamp.in_recovery:
        return "This server is a standby in recovery: operations need the primary."
    if expected_stamp and stamp.stamp != expected_stamp:
        return (
            f"The database is stamped {stamp.stamp!r}, FENCEPOST_INSTALLATION says {expected_stamp!r}: "
            "a copy must not act on the world. Point the setting or the address elsewhere, or adopt it."
        )
    if stamp.system_identifier != stamp.cluster_system_identifier:
        return (
            "The database was stamped on another PostgreSQL cluster: it is a restored copy and must be "
            "adopted before it may act on the world."
        )
    if stamp.timeline != stamp.cluster_timeline:
        return (
            f"The cluster is on timeline {stamp.cluster_timeline}, the stamp on {stamp.timeline}: it was "
            "restored or promoted and must be adopted before it may act on the world."
        )
    return None


def insist(database: Database, stamp: Stamp) -> None:
    """Let `database` use only connections to the cluster this stamp was read from."""
    database.insist_on(installation.IDENTITY, installation.identity_of(stamp))


async def wait_until_verified(
    database: Database, expected_stamp: str, *, patience_seconds: float
) -> Stamp:
    """`verify`, trying again while the database is out of reach (a start before the database is up).

    Raises:
        StoreUnavailable: still out of reach after `patience_seconds`. Others as `verify`, at once.
    """
    gives_up_at = elapsed() + patience_seconds
    while True:
        try:
            return await verify(database, expected_stamp)
        except StoreUnavailable:
            if elapsed() >= gives_up_at:
                raise
            await asyncio.sleep(0.5)


class EpochChanged(StampMismatch):
    """The database was adopted while this process ran: it must exit (R16)."""


async def watch_epoch(
    database: Database, epoch: int, *, interval_seconds: float, expected_stamp: str = ""
) -> None:
    """Never returns; looks every so often whether this is still the database it started on.

    Raises:
        EpochChanged: it was adopted, restored, promoted or exchanged meanwhile.
    """
    while True:
        await asyncio.sleep(interval_seconds)
        try:
            async with database.transaction() as tx:
                stamp = await installation.read(tx)
        except StoreUnavailable:
            continue
        if stamp is None or stamp.epoch != epoch:
            raise EpochChanged("The database was adopted by another installation; leaving.")
        if (trouble := mismatch(stamp, expected_stamp)) is not None:
            raise EpochChanged(f"{trouble} Leaving.")
