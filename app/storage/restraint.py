"""The shared rows of restraint: one per provider, and one per process that shares a concurrency cap.

A provider's row is locked after any `work` row and in the order of names, so that flushes of several
processes cannot wait for each other in a ring. While all is well it is only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.domain.restraint import BreakerState, Standing
from app.storage.database import Row, Statement, Transaction, arrays, batch, seconds
from app.storage.tables import Instant, Uuid, provider_shares, providers

_names = batch("p", name=sa.Text())
_REGISTER = Statement(
    "restraint.register",
    pg.insert(providers)
    .from_select(
        ["name", "breaker_state", "breaker_changed_at", "failures", "openings"],
        sa.select(
            _names.c.name,
            sa.literal(BreakerState.CLOSED.value),
            sa.func.now(),
            sa.literal(0),
            sa.literal(0),
        ).order_by(_names.c.name),
    )
    .on_conflict_do_nothing(index_elements=["name"]),
)
_READ = Statement(
    "restraint.read",
    sa.select(providers, sa.func.now().label("now")).join(
        _names, providers.c.name == _names.c.name
    ),
)
_LOCK = Statement(
    "restraint.lock",
    sa.select(providers, sa.func.now().label("now"))
    .join(_names, providers.c.name == _names.c.name)
    .order_by(providers.c.name)
    .with_for_update(of=providers),
)
_row = batch(
    "p",
    name=sa.Text(),
    breaker=sa.Text(),
    failures=sa.Integer(),
    openings=sa.Integer(),
    open_until=Instant,
    tokens=sa.Double(),
    tokens_at=Instant,
)
_WRITE = Statement(
    "restraint.write",
    sa.update(providers)
    .values(
        breaker_state=_row.c.breaker,
        breaker_changed_at=sa.case(
            (providers.c.breaker_state != _row.c.breaker, sa.func.now()),
            else_=providers.c.breaker_changed_at,
        ),
        failures=_row.c.failures,
        openings=_row.c.openings,
        breaker_open_until=_row.c.open_until,
        tokens=_row.c.tokens,
        tokens_at=_row.c.tokens_at,
    )
    .where(providers.c.name == _row.c.name),
)


async def register(tx: Transaction, names: Sequence[str]) -> None:
    """Make the rows of these providers where there are none."""
    await tx.execute(_REGISTER, **arrays("p", {"name": sorted(names)}))


async def read(tx: Transaction, names: Sequence[str]) -> dict[str, Standing]:
    """These providers' rows, not locked: good enough to see that all is well."""
    rows = await tx.fetch(_READ, **arrays("p", {"name": list(names)}))
    return {row["name"]: _standing(row) for row in rows}


async def lock(
    tx: Transaction, names: Sequence[str]
) -> tuple[dict[str, Standing], datetime | None]:
    """These providers' rows, locked in order of names, and the database's now."""
    rows = await tx.fetch(_LOCK, **arrays("p", {"name": sorted(names)}))
    return {row["name"]: _standing(row) for row in rows}, rows[0]["now"] if rows else None


async def write(tx: Transaction, standings: Mapping[str, Standing]) -> None:
    """Write rows that this transaction has locked."""
    if not standings:
        return
    names = list(standings)
    rows = [standings[name] for name in names]
    await tx.execute(
        _WRITE,
        **arrays(
            "p",
            {
                "name": names,
                "breaker": [row.breaker.value for row in rows],
                "failures": [row.failures for row in rows],
                "openings": [row.openings for row in rows],
                "open_until": [row.open_until for row in rows],
                "tokens": [row.tokens for row in rows],
                "tokens_at": [row.tokens_at for row in rows],
            },
        ),
    )


def _standing(row: Row) -> Standing:
    return Standing(
        breaker=BreakerState(row["breaker_state"]),
        failures=row["failures"],
        openings=row["openings"],
        open_until=row["breaker_open_until"],
        tokens=row["tokens"],
        tokens_at=row["tokens_at"],
    )


_provider = sa.bindparam("provider", type_=sa.Text())
_holder = sa.bindparam("holder", type_=Uuid)
_FORGET = Statement(
    "restraint.forget_shares",
    sa.delete(provider_shares).where(
        provider_shares.c.provider == _provider, provider_shares.c.expires_at <= sa.func.now()
    ),
)
_OTHERS = Statement(
    "restraint.others",
    sa.select(
        sa.func.count().label("holders"),
        sa.func.coalesce(sa.func.sum(provider_shares.c.share), 0).label("share"),
    ).where(provider_shares.c.provider == _provider, provider_shares.c.holder != _holder),
)
_SHARE = Statement(
    "restraint.share",
    pg.insert(provider_shares)
    .values(
        provider=_provider,
        holder=_holder,
        share=sa.bindparam("share", type_=sa.Integer()),
        expires_at=sa.func.now() + seconds(sa.bindparam("ttl_seconds", type_=sa.Double())),
    )
    .on_conflict_do_update(
        index_elements=["provider", "holder"],
        set_={
            "share": sa.literal_column("excluded.share"),
            "expires_at": sa.literal_column("excluded.expires_at"),
        },
    ),
)


async def share(
    tx: Transaction, provider: str, *, holder: UUID, cap: int, ttl_seconds: float
) -> int:
    """This process's part of a concurrency cap, for so long: an even part, of what the others left.

    The sum over living processes never passes the cap: a new one takes what is free, and gets its even part
    once the others have come down to theirs. A dead one's part is free when its time is over.
    """
    await register(tx, [provider])
    await lock(tx, [provider])
    await tx.execute(_FORGET, provider=provider)
    [others] = await tx.fetch(_OTHERS, provider=provider, holder=holder)
    even = max(cap // (others["holders"] + 1), 1)
    part: int = max(min(even, cap - others["share"]), 0)
    await tx.execute(_SHARE, provider=provider, holder=holder, share=part, ttl_seconds=ttl_seconds)
    return part
