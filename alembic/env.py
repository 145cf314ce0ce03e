"""How migrations run: one transaction each, never waiting long for a table (CASES.md K26).

`app.storage.migrations` hands over a connection; the alembic command line brings DATABASE_URL.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from app.storage import migrations
from app.storage.tables import metadata


def run(connection: Connection) -> None:
    """Run what was asked for on one connection, under the timeouts of `migrations`."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=True,
        compare_type=True,
        compare_server_default=False,
    )
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    """Entry: offline writes SQL; online takes the given connection, or makes one."""
    if context.is_offline_mode():
        context.configure(
            dialect_name="postgresql",
            target_metadata=metadata,
            literal_binds=True,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()
        return
    given = context.config.attributes.get("connection")
    if given is not None:
        run(given)
        return
    url = os.environ.get("FENCEPOST_DATABASE_URL") or os.environ["DATABASE_URL"]
    with migrations.connect(url) as connection:
        run(connection)


main()
