"""The installation's stamp, and what a copy of the database cannot carry (DESIGN.md I11, PROTOCOL.md R16)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from app.storage.database import Statement, Transaction
from app.storage.tables import installation


@dataclass(frozen=True, slots=True)
class Stamp:
    """The stored stamp beside what the cluster says of itself now."""

    stamp: str
    epoch: int
    created_at: datetime
    system_identifier: int
    timeline: int
    cluster_system_identifier: int
    cluster_timeline: int
    in_recovery: bool


# The timeline of the write-ahead log's current file; a standby has none of its own to write.
_timeline = sa.case(
    (
        ~sa.func.pg_is_in_recovery(),
        sa.cast(
            sa.cast(
                sa.func.concat(
                    "x", sa.func.substr(sa.func.pg_walfile_name(sa.func.pg_current_wal_lsn()), 1, 8)
                ),
                sa.dialects.postgresql.BIT(32),
            ),
            sa.Integer(),
        ),
    ),
    else_=0,
)
_READ = Statement(
    "installation.read",
    sa.select(
        installation,
        sa.select(sa.column("system_identifier"))
        .select_from(sa.func.pg_control_system())
        .scalar_subquery()
        .label("cluster_system_identifier"),
        _timeline.label("cluster_timeline"),
        sa.func.pg_is_in_recovery().label("in_recovery"),
    ),
)


IDENTITY = Statement(
    "installation.identity",
    sa.select(
        installation.c.stamp,
        installation.c.epoch,
        sa.select(sa.column("system_identifier"))
        .select_from(sa.func.pg_control_system())
        .scalar_subquery()
        .label("system_identifier"),
        _timeline.label("timeline"),
    ),
)
"""What every new connection must answer as the first one did."""


def identity_of(stamp: Stamp) -> dict[str, object]:
    """What `IDENTITY` answers on the cluster this stamp was read from."""
    return {
        "stamp": stamp.stamp,
        "epoch": stamp.epoch,
        "system_identifier": stamp.cluster_system_identifier,
        "timeline": stamp.cluster_timeline,
    }


async def read(tx: Transaction) -> Stamp | None:
    """The stamp, or None where the database was never migrated to hold one."""
    rows = await tx.fetch(_READ)
    if not rows:
        return None
    row = rows[0]
    return Stamp(
        stamp=row["stamp"],
        epoch=row["epoch"],
        created_at=row["created_at"],
        system_identifier=row["system_identifier"],
        timeline=row["timeline"],
        cluster_system_identifier=row["cluster_system_identifier"],
        cluster_timeline=row["cluster_timeline"],
        in_recovery=row["in_recovery"],
    )


_REVISION = Statement("installation.revision", sa.text("SELECT version_num FROM alembic_version"))
_HAS_SCHEMA = Statement(
    "installation.has_schema", sa.text("SELECT to_regclass('alembic_version') IS NOT NULL AS there")
)


async def revision(tx: Transaction) -> str | None:
    """The schema's revision, or None where the database was never migrated."""
    if not (await tx.fetch(_HAS_SCHEMA))[0]["there"]:
        return None
    rows = await tx.fetch(_REVISION)
    return rows[0]["version_num"] if rows else None


_CLOCK = Statement("installation.clock", sa.select(sa.func.clock_timestamp().label("now")))


async def clock(tx: Transaction) -> datetime:
    """The database's clock, the only one that judges leases and due times (I9)."""
    now: datetime = (await tx.fetch(_CLOCK))[0]["now"]
    return now
