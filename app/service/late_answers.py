"""Late answers: what a provider said is kept as a finding when its attempt cannot record it (R7)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from app.domain.identity import new_id
from app.domain.outcome import kind_of
from app.service.group_commit import GroupCommit
from app.storage import attempts
from app.storage.database import Database
from app.telemetry import Event, Metric, Telemetry

KEEP_SECONDS = 86_400.0
"""For so long an answer is offered to a database that is away, before it is given up."""


class LateAnswers:
    """One process's queue. Whoever derives the step's verdict later acts on what it wrote."""

    def __init__(self, database: Database, telemetry: Telemetry) -> None:
        self._database = database
        self._telemetry = telemetry
        self._group: GroupCommit[tuple[UUID, attempts.Answer], None] = GroupCommit(
            "late", self._flush, telemetry, patience_seconds=KEEP_SECONDS, keep_trying=True
        )

    async def keep(self, answer: attempts.Answer, provider: str = "unknown") -> None:
        """Store an answer once, however long the database is away."""
        await self._group.submit((new_id(), answer))
        self._telemetry.count(Metric.LATE_EVIDENCE, provider=provider)
        self._telemetry.event(
            Event.LATE_EVIDENCE,
            "warning",
            operation=str(answer.lease.operation),
            outcome=kind_of(answer.outcome).value,
        )

    async def drain(self) -> None:
        """Return when nothing is left to keep."""
        await self._group.drain()

    async def _flush(self, batch: Sequence[tuple[UUID, attempts.Answer]]) -> Sequence[None]:
        async with self._database.transaction() as tx:
            await attempts.add_late_answers(tx, batch)
        return [None] * len(batch)
