"""Who is who: keys, scopes, fingerprints, buckets, operation ids and derived downstream keys.

Key syntax is CONTRACT.md 1; the scope is tenant + type + key (6); the fingerprint is SHA-256 over the
RFC 8785 form of the validated request (7); the downstream key follows PROTOCOL.md R15.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import rfc8785
import uuid_utils.compat

from app.domain.errors import IdempotencyKeyMalformed, IdempotencyKeyMissing, InvalidInput

MAX_KEY_LENGTH = 255
FINGERPRINT_VERSION = 1
"""The fingerprint algorithm new operations are admitted under; the number is stored beside each one."""

_BARE_KEY = re.compile(r"[!-~]{1,255}")
_QUOTED_KEY = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_OPERATION_ID = re.compile(
    r"op_([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})"
)


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """One canonical key: 1 to 255 bytes of printable ASCII without spaces, case-sensitive."""

    value: str

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key, 32 bytes: what the unique index and the tombstone know of it."""
        return hashlib.sha256(self.value.encode("ascii")).digest()

    def __repr__(self) -> str:
        return f"IdempotencyKey(digest={self.digest.hex()[:12]})"


def parse_idempotency_key(lines: Sequence[bytes]) -> IdempotencyKey:
    """The one key of a request, from its `Idempotency-Key` header lines (CONTRACT.md 1).

    Bare and as a quoted structured-field string (RFC 8941, 3.3.3) are the same key. Optional white space
    around a field value is not part of it (RFC 9110, 5.5).

    Raises:
        IdempotencyKeyMissing: there is no such line.
        IdempotencyKeyMalformed: several lines, a list, parameters, empty, blanks, control or non-ASCII
            bytes, a space inside, unbalanced quotes, or longer than 255 bytes.
    """
    if not lines:
        raise IdempotencyKeyMissing("The request needs an Idempotency-Key header.")
    if len(lines) > 1:
        raise IdempotencyKeyMalformed("The request has more than one Idempotency-Key header line.")
    try:
        text = lines[0].strip(b" \t").decode("ascii")
    except UnicodeDecodeError:
        raise IdempotencyKeyMalformed("The Idempotency-Key has a byte outside ASCII.") from None
    if text.startswith('"'):
        quoted = _QUOTED_KEY.fullmatch(text)
        if quoted is None:
            raise IdempotencyKeyMalformed(
                "The quoted Idempotency-Key is not one string without parameters."
            )
        text = re.sub(r"\\(.)", r"\1", quoted.group(1))
    elif '"' in text or "," in text or ";" in text:
        raise IdempotencyKeyMalformed(
            "A bare Idempotency-Key has no quotes, commas or semicolons; quote the key to use them."
        )
    if not text:
        raise IdempotencyKeyMalformed("The Idempotency-Key is empty.")
    if len(text) > MAX_KEY_LENGTH:
        raise IdempotencyKeyMalformed(f"The Idempotency-Key is longer than {MAX_KEY_LENGTH} bytes.")
    if _BARE_KEY.fullmatch(text) is None:
        raise IdempotencyKeyMalformed(
            "The Idempotency-Key may hold printable ASCII without spaces, and nothing else."
        )
    return IdempotencyKey(text)


@dataclass(frozen=True, slots=True)
class Scope:
    """The identity of an operation: one per (tenant, type, key) for the whole tombstone horizon (I1)."""

    tenant: str
    type: str
    key: IdempotencyKey

    @property
    def bucket(self) -> int:
        """0 to 255: first byte of SHA-256(tenant NUL type NUL key). Citus' distribution column."""
        text = b"\0".join(
            (self.tenant.encode(), self.type.encode(), self.key.value.encode("ascii"))
        )
        return hashlib.sha256(text).digest()[0]


@dataclass(frozen=True, slots=True, order=True)
class OperationId:
    """A UUIDv7 whose last byte is the operation's bucket; `op_` and the UUID on the wire."""

    uuid: UUID

    @property
    def bucket(self) -> int:
        """0 to 255, the bucket every row of this operation is stored under."""
        return self.uuid.bytes[-1]

    def __str__(self) -> str:
        return f"op_{self.uuid}"

    @classmethod
    def new(cls, bucket: int) -> OperationId:
        """A fresh id in `bucket`, ordered by time of making."""
        drawn = uuid_utils.compat.uuid7()
        return cls(UUID(bytes=drawn.bytes[:15] + bytes((bucket,))))

    @classmethod
    def parse(cls, text: str) -> OperationId:
        """The id as it stands on the wire.

        Raises:
            InvalidInput: not `op_` and a UUIDv7 in lower case.
        """
        match = _OPERATION_ID.fullmatch(text)
        if match is None:
            raise InvalidInput("An operation id is op_ and a UUID.")
        return cls(UUID(match.group(1)))


def new_id() -> UUID:
    """A UUIDv7 for rows other than operations: attempts, findings, actions, claim tokens (R17)."""
    return UUID(bytes=uuid_utils.compat.uuid7().bytes)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """SHA-256 (32 bytes) of a request's meaning, and the version of the algorithm that made it."""

    digest: bytes
    version: int


def fingerprint(meaning: Mapping[str, object], version: int = FINGERPRINT_VERSION) -> Fingerprint:
    """The fingerprint of a request's meaning: the JSON object `meaning` in RFC 8785 form, SHA-256.

    `meaning` holds the validated request without members that equal their default, plus the type's
    declared semantic headers (CONTRACT.md 7). NFC and NFD forms differ; nothing is normalised.

    Raises:
        InvalidInput: an algorithm version this code does not know, or a value JSON cannot carry.
    """
    if version != FINGERPRINT_VERSION:
        raise InvalidInput(f"Fingerprint version {version} is not known here.")
    try:
        return Fingerprint(hashlib.sha256(rfc8785.dumps(_plain(meaning))).digest(), version)
    except rfc8785.CanonicalizationError as error:
        raise InvalidInput(f"The request has no canonical JSON form: {error}") from None


def _plain(value: object) -> Any:  # rfc8785 exports no name for what it takes
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InvalidInput(f"A value of type {type(value).__name__} has no JSON form.")


class Direction(StrEnum):
    """Which way an effect runs: the step itself, or its compensation."""

    FORWARD = "forward"
    COMPENSATION = "compensation"


@dataclass(frozen=True, slots=True)
class DownstreamKey:
    """The key a provider sees, and the reference to look up by: 36 characters, a v4-shaped UUID."""

    value: str

    @classmethod
    def derive(
        cls,
        *,
        installation: str,
        tenant: str,
        type: str,
        key_digest: bytes,
        step: str,
        item: int,
        direction: Direction,
        ordinal: int = 0,
    ) -> DownstreamKey:
        """SHA-256 over the length-prefixed parts, as a UUID with version and variant bits of v4.

        Neither the operation's id, nor a generation, nor an attempt number is a part (R15, I10): a client's
        retry after a restore that lost the operation derives the same key. `ordinal` rises only when a
        key is proved burned (R18).
        """
        parts = (
            installation.encode(),
            tenant.encode(),
            type.encode(),
            key_digest,
            step.encode(),
            str(item).encode(),
            direction.value.encode(),
            str(ordinal).encode(),
        )
        hashed = hashlib.sha256()
        for part in parts:
            hashed.update(len(part).to_bytes(8, "big"))
            hashed.update(part)
        return cls(str(UUID(bytes=hashed.digest()[:16], version=4)))
