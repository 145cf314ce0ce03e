"""What is watched: counts and ages over live operations, read when metrics are scraped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from app.domain.lifecycle import State
from app.storage.database import Statement, Transaction, arrays, batch, seconds
from app.storage.tables import work


@dataclass(frozen=True, slots=True)
class Standing:
    """Live operations of one state; ages in seconds by the database's clock, 0 where there is none."""

    state: State
    operations: int
    due: int
    oldest_due_seconds: float
    oldest_seconds: float


def _age(instant: sa.ColumnElement[object]) -> sa.ColumnElement[float]:
    return sa.func.coalesce(
        sa.func.greatest(sa.func.extract("epoch", sa.func.now() - sa.func.min(instant)), 0), 0
    ).cast(sa.Double())


_is_due = sa.and_(work.c.due_at <= sa.func.now(), work.c.due_at > sa.literal_column("'-infinity'"))
_STANDINGS = Statement(
    "reports.standings",
    sa.select(
        work.c.state,
        sa.func.count().label("operations"),
        sa.func.count().filter(_is_due).label("due"),
        _age(sa.case((_is_due, work.c.due_at))).label("oldest_due_seconds"),
        _age(sa.func.coalesce(work.c.uncertain_since, work.c.changed_at)).label("oldest_seconds"),
    ).group_by(work.c.state),
)


async def standings(tx: Transaction) -> list[Standing]:
    """Live operations by state, with how many are due and how old the oldest is."""
    return [
        Standing(
            state=State(row["state"]),
            operations=row["operations"],
            due=row["due"],
            oldest_due_seconds=row["oldest_due_seconds"],
            oldest_seconds=row["oldest_seconds"],
        )
        for row in await tx.fetch(_STANDINGS)
    ]


_known = batch("k", type=sa.Text(), type_version=sa.Integer())
_UNKNOWN = Statement(
    "reports.unknown_types",
    sa.select(work.c.type, work.c.type_version, sa.func.count().label("operations"))
    .where(
        sa.tuple_(work.c.type, work.c.type_version).not_in(
            sa.select(_known.c.type, _known.c.type_version)
        )
    )
    .group_by(work.c.type, work.c.type_version),
)


async def unknown_types(
    tx: Transaction, known: Sequence[tuple[str, int]]
) -> list[tuple[str, int, int]]:
    """Live operations of types and versions this code does not know: (type, version, operations) (I12)."""
    rows = await tx.fetch(
        _UNKNOWN,
        **arrays(
            "k",
            {"type": [name for name, _ in known], "type_version": [number for _, number in known]},
        ),
    )
    return [(row["type"], row["type_version"], row["operations"]) for row in rows]


_patience = batch("p", type=sa.Text(), type_version=sa.Integer(), after_seconds=sa.Double())
_OVERDUE = Statement(
    "reports.overdue_doubt",
    sa.select(work.c.type, sa.func.count().label("operations"))
    .join(
        _patience,
        sa.and_(work.c.type == _patience.c.type, work.c.type_version == _patience.c.type_version),
    )
    .where(
        work.c.state == State.UNCERTAIN.value,
        work.c.uncertain_since < sa.func.now() - seconds(_patience.c.after_seconds),
    )
    .group_by(work.c.type),
)


async def overdue_doubt(
    tx: Transaction, patience: Mapping[tuple[str, int], float]
) -> dict[str, int]:
    """By type, the operations uncertain for longer than these seconds by (type, version)."""
    rows = await tx.fetch(
        _OVERDUE,
        **arrays(
            "p",
            {
                "type": [name for name, _ in patience],
                "type_version": [number for _, number in patience],
                "after_seconds": list(patience.values()),
            },
        ),
    )
    return {row["type"]: row["operations"] for row in rows}


# An old snapshot makes every claim walk the dead rows it keeps alive (BENCH.md, trap 3).
_OLDEST_SNAPSHOT = Statement(
    "reports.oldest_snapshot",
    sa.text(
        "SELECT coalesce(max(extract(epoch FROM now() - xact_start)), 0)::float8 AS age"
        " FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()"
    ),
)


async def oldest_snapshot_seconds(tx: Transaction) -> float:
    """Age in seconds of the oldest snapshot that somebody else holds open; 0 where nobody does."""
    age: float = (await tx.fetch(_OLDEST_SNAPSHOT))[0]["age"]
    return age
