"""Is this process fit to serve: database reachable, schema at head, stamp as expected (/readyz)."""

from __future__ import annotations

from app.service.fresh import Fresh
from app.service.installation import verify
from app.storage.database import Database
from app.storage.installation import Stamp

MAX_AGE_SECONDS = 1.0


class Readiness:
    """Looks at the database when asked; callers within a second share one look."""

    def __init__(self, database: Database, expected_stamp: str) -> None:
        self._fresh: Fresh[Stamp] = Fresh(lambda: verify(database, expected_stamp), MAX_AGE_SECONDS)

    async def check(self) -> None:
        """Return where everything fits.

        Raises:
            SchemaMismatch, StampMismatch, StoreUnavailable: what does not; see `installation.verify`.
        """
        await self._fresh.get()
