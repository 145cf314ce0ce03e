"""The development tenant's API key: made at the first start, the same at every later one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from app.bootstrap import open_database
from app.cli.up.folder import DataFolder
from app.service import credentials
from app.service.credentials import SCOPES, Verifier
from app.settings import Settings
from app.storage.database import Database

TENANT = "dev"


def development_key(settings: Settings, folder: DataFolder) -> str:
    """The key in the folder if the database still honours it, else a new one, kept there.

    Raises:
        StoreUnavailable: the database went away.
    """

    async def run() -> str:
        database = open_database(settings, "up", pool_size=2)
        await database.open()
        try:
            return await _kept_or_new(database, settings.environment, folder)
        finally:
            await database.close()

    return asyncio.run(run())


async def _kept_or_new(database: Database, environment: str, folder: DataFolder) -> str:
    kept = ""
    with suppress(FileNotFoundError):
        kept = folder.key.read_text().strip()
    caller = await Verifier(database, environment).verify(kept) if kept else None
    if caller is not None and caller.tenant == TENANT and caller.scopes >= set(SCOPES):
        return kept
    issued = await credentials.issue(
        database,
        environment=environment,
        tenant=TENANT,
        scopes=SCOPES,
        name="fencepost up",
        expires_in_seconds=None,
    )
    folder.write_private(folder.key, f"{issued.secret}\n")
    return issued.secret
