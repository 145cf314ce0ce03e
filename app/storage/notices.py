"""Notices: NOTIFY as a hint, LISTEN on one connection per process (CASES.md K24).

A notice never carries more than ids and is never relied on: everybody who listens also polls. It is a
statement of its own, after the commit it speaks of, because NOTIFY inside a writing transaction makes all
commits of the database queue behind each other (BENCH.md, trap 2).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum

import sqlalchemy as sa

from app.domain.errors import InvalidInput
from app.domain.identity import OperationId
from app.storage.database import Database, Statement, store_errors


class Channel(StrEnum):
    """What there is to hear."""

    WORK = "fencepost_work"
    """Operations may have become due."""
    CHANGED = "fencepost_changed"
    """The operations named, or some where none is named, have changed visibly."""


PAYLOAD_BYTES = 7000
_NOTIFY = Statement(
    "notices.notify",
    sa.select(
        sa.func.pg_notify(
            sa.bindparam("channel", type_=sa.Text()), sa.bindparam("payload", type_=sa.Text())
        )
    ),
)


async def notify(database: Database, channel: Channel, ids: Sequence[OperationId] = ()) -> None:
    """Send one notice; the ids go along while they fit in 7 kB, else nothing does.

    Raises:
        StoreUnavailable: the database is away. Nothing is lost: whoever waits polls.
    """
    payload = " ".join(operation.uuid.hex for operation in ids)
    if len(payload) > PAYLOAD_BYTES:
        payload = ""
    async with database.transaction() as tx:
        await tx.fetch(_NOTIFY, channel=channel.value, payload=payload)


async def listen(
    database: Database, channels: Sequence[Channel]
) -> AsyncIterator[tuple[Channel, tuple[OperationId, ...]]]:
    """Notices as they come, on a connection of its own, for as long as it lives.

    Raises:
        StoreUnavailable: the connection could not be made or was lost; the caller connects again and
            treats the gap as "anything may have changed".
    """
    connection = await database.dedicated()
    try:
        with store_errors():
            for channel in channels:
                await connection.execute(f"LISTEN {channel.value}".encode())
            async for notice in connection.notifies():
                yield Channel(notice.channel), _ids(notice.payload)
    finally:
        await connection.close()


def _ids(payload: str) -> tuple[OperationId, ...]:
    try:
        return tuple(
            OperationId.parse(f"op_{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")
            for text in payload.split()
        )
    except InvalidInput:
        return ()
