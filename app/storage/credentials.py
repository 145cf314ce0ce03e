"""API keys: only a SHA-256 digest of the secret is stored (CONTRACT.md 21)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from app.storage.database import Row, Statement, Transaction, seconds
from app.storage.tables import api_keys, tenants


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as stored. `usable`: neither revoked nor expired, by the database's clock."""

    id: str
    tenant: str
    name: str
    secret_digest: bytes
    scopes: frozenset[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    usable: bool


_usable = sa.and_(
    api_keys.c.revoked_at.is_(None),
    sa.or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > sa.func.now()),
).label("usable")
_key_id = sa.bindparam("id", type_=sa.Text())
_FIND = Statement("credentials.find", sa.select(api_keys, _usable).where(api_keys.c.id == _key_id))
_ALL = Statement(
    "credentials.all",
    sa.select(api_keys, _usable).order_by(api_keys.c.created_at, api_keys.c.id),
)
_tenant = sa.bindparam("tenant", type_=sa.Text())
_ADD_TENANT = Statement(
    "credentials.add_tenant",
    pg.insert(tenants)
    .values(id=_tenant, created_at=sa.func.now())
    .on_conflict_do_nothing(index_elements=["id"]),
)
_ADD = Statement(
    "credentials.add",
    pg.insert(api_keys)
    .values(
        id=_key_id,
        tenant=_tenant,
        name=sa.bindparam("name", type_=sa.Text()),
        secret_digest=sa.bindparam("secret_digest", type_=sa.LargeBinary()),
        scopes=sa.bindparam("scopes", type_=pg.ARRAY(sa.Text())),
        created_at=sa.func.now(),
        expires_at=sa.func.now() + seconds(sa.bindparam("expires_in_seconds", type_=sa.Double())),
    )
    .returning(api_keys, _usable),
)
_REVOKE = Statement(
    "credentials.revoke",
    sa.update(api_keys)
    .values(revoked_at=sa.func.coalesce(api_keys.c.revoked_at, sa.func.now()))
    .where(api_keys.c.id == _key_id)
    .returning(api_keys, _usable),
)


def _api_key(row: Row) -> ApiKey:
    return ApiKey(
        id=row["id"],
        tenant=row["tenant"],
        name=row["name"],
        secret_digest=row["secret_digest"],
        scopes=frozenset(row["scopes"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        usable=row["usable"],
    )


async def find(tx: Transaction, key_id: str) -> ApiKey | None:
    """The key of that id, usable or not, or None."""
    rows = await tx.fetch(_FIND, id=key_id)
    return _api_key(rows[0]) if rows else None


async def every(tx: Transaction) -> list[ApiKey]:
    """All keys, oldest first, revoked ones included."""
    return [_api_key(row) for row in await tx.fetch(_ALL)]


async def add(
    tx: Transaction,
    *,
    key_id: str,
    tenant: str,
    name: str,
    secret_digest: bytes,
    scopes: Sequence[str],
    expires_in_seconds: float | None,
) -> ApiKey:
    """Store a new key, and its tenant where it is new."""
    await tx.execute(_ADD_TENANT, tenant=tenant)
    rows = await tx.fetch(
        _ADD,
        id=key_id,
        tenant=tenant,
        name=name,
        secret_digest=secret_digest,
        scopes=list(scopes),
        expires_in_seconds=expires_in_seconds,
    )
    return _api_key(rows[0])


async def revoke(tx: Transaction, key_id: str) -> ApiKey | None:
    """Revoke a key for good; None where there is none. A second time changes nothing."""
    rows = await tx.fetch(_REVOKE, id=key_id)
    return _api_key(rows[0]) if rows else None
