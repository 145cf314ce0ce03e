"""API keys: issued once, verified at every request, revoked within five seconds (CONTRACT.md 21).

A key reads `fp_<environment>_<id>_<secret>`. The secret has more than 192 random bits, is shown once, and
only its SHA-256 digest is stored: with that much chance in it, a slow hash would protect nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.errors import CommitUnknown, InvalidInput
from app.domain.text import is_storable
from app.service.fresh import Fresh
from app.storage import credentials
from app.storage.credentials import ApiKey
from app.storage.database import Database

SCOPES = ("operations:read", "operations:write", "operator")
"""What a key may be allowed to do; CONTRACT.md, Resources, says which route needs which."""

MAX_AGE_SECONDS = 4.0
"""How old what we know of a key may be. Revocation counts within 5 s; one is left for the read itself."""

KNOWN_KEYS = 10_000
"""So many keys are remembered at once; the ones not asked for longest go first."""

_ALPHABET = string.ascii_letters + string.digits
_SECRET_LENGTH = 40  # of 62 characters: 238 bits
_ID_BYTES = 8
_PRESENTED = re.compile(
    rf"fp_([a-z]+)_([0-9a-f]{{{2 * _ID_BYTES}}})_([A-Za-z0-9]{{{_SECRET_LENGTH}}})"
)
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NOBODY = bytes(32)
"""Compared with where there is no digest: no SHA-256 of a secret is known to be all zeros."""


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key: what is stored, and the whole text a client presents. The text cannot be had again."""

    key: ApiKey
    secret: str

    def __repr__(self) -> str:
        return f"IssuedKey(id={self.key.id!r})"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the key's id, its tenant, and what it may do."""

    key_id: str
    tenant: str
    scopes: frozenset[str]


async def issue(
    database: Database,
    *,
    environment: str,
    tenant: str,
    scopes: Sequence[str],
    name: str,
    expires_in_seconds: float | None,
) -> IssuedKey:
    """Make a key for `tenant`, which comes into being with its first key.

    Raises:
        InvalidInput: a tenant, name, scope or time to live that does not hold; says which.
        StoreUnavailable: no key was made, as far as can be known; one nobody was shown opens nothing.
    """
    _check(tenant, scopes, name, expires_in_seconds)
    key_id = secrets.token_hex(_ID_BYTES)
    secret = "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_LENGTH))
    async with database.transaction() as tx:
        key = await credentials.add(
            tx,
            key_id=key_id,
            tenant=tenant,
            name=name,
            secret_digest=_digest(secret),
            scopes=sorted(set(scopes)),
            expires_in_seconds=expires_in_seconds,
        )
    return IssuedKey(key, f"fp_{environment}_{key_id}_{secret}")


def _check(tenant: str, scopes: Sequence[str], name: str, expires_in_seconds: float | None) -> None:
    if _TENANT.fullmatch(tenant) is None:
        raise InvalidInput("A tenant is 1 to 100 letters, digits, '.', '_' and '-'.")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise InvalidInput(f"A key has one or more of the scopes {', '.join(SCOPES)}.")
    if len(name) > 200 or not is_storable(name):
        raise InvalidInput("A key's name is storable text of at most 200 characters.")
    if expires_in_seconds is not None and not 0 < expires_in_seconds <= 100 * 366 * 86_400:
        raise InvalidInput("A key expires after more than 0 seconds and at most 100 years.")


async def every(database: Database) -> list[ApiKey]:
    """All keys of all tenants, oldest first, revoked ones included; none shows its secret.

    Raises:
        StoreUnavailable: the database is away.
    """
    async with database.transaction() as tx:
        return await credentials.every(tx)


async def revoke(database: Database, key_id: str) -> ApiKey | None:
    """End a key for good; None where there is none of that id. API processes follow within 5 s.

    Raises:
        StoreUnavailable: nothing was changed, or nobody knows: revoke again, it changes nothing twice.
    """
    if not is_storable(key_id):
        return None
    try:
        return await _revoke(database, key_id)
    except CommitUnknown:
        return await _revoke(database, key_id)


async def _revoke(database: Database, key_id: str) -> ApiKey | None:
    async with database.transaction() as tx:
        return await credentials.revoke(tx, key_id)


class Verifier:
    """Tells who presents a key. One per process; remembers for a few seconds what it read."""

    def __init__(
        self,
        database: Database,
        environment: str,
        *,
        max_age_seconds: float = MAX_AGE_SECONDS,
        known_keys: int = KNOWN_KEYS,
    ) -> None:
        self._database = database
        self._environment = environment
        self._max_age_seconds = max_age_seconds
        self._known_keys = known_keys
        self._known: OrderedDict[str, Fresh[ApiKey | None]] = OrderedDict()

    async def verify(self, presented: str) -> Caller | None:
        """Who it is; None for a malformed, unknown, expired or revoked key, or a wrong secret.

        All refusals of a well-formed key cost the same read and the same comparison, whether its id exists
        or not, and unknown ids are remembered like known ones: time tells nothing (CASES.md B51).

        Raises:
            StoreUnavailable: nobody can say who it is.
        """
        match = _PRESENTED.fullmatch(presented)
        if match is None or match[1] != self._environment:
            hmac.compare_digest(_digest(presented[:200]), _NOBODY)
            return None
        key = await self._read_of(match[2]).get()
        expected = _NOBODY if key is None else key.secret_digest
        same = hmac.compare_digest(_digest(match[3]), expected)
        if not same or key is None or not key.usable:
            return None
        return Caller(key.id, key.tenant, key.scopes)

    def _read_of(self, key_id: str) -> Fresh[ApiKey | None]:
        known = self._known.get(key_id)
        if known is None:
            known = self._known[key_id] = Fresh(lambda: self._find(key_id), self._max_age_seconds)
            if len(self._known) > self._known_keys:
                self._known.popitem(last=False)
        self._known.move_to_end(key_id)
        return known

    async def _find(self, key_id: str) -> ApiKey | None:
        async with self._database.transaction() as tx:
            return await credentials.find(tx, key_id)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
