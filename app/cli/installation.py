"""`fencepost migrate` and `fencepost installation`: the schema, and whose database this is."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.options import AsJson
from app.cli.output import json, line, note, pairs


def migrate(
    to: Annotated[
        str, typer.Option("--to", metavar="REV", help="A revision, `head` or `base` (drops all).")
    ] = "head",
    sql: Annotated[
        bool,
        typer.Option("--sql", help="Print the statements for an empty database; change nothing."),
    ] = False,
) -> None:
    """Bring the schema of DATABASE_URL up to what this program needs.

    Safe to run again, and beside a running service: a migration waits for no table longer than two seconds,
    and is tried again. The first one stamps the database (FENCEPOST_INSTALLATION, else a random stamp).
    """
    from app.service import schema
    from app.settings import load_settings

    if sql:
        line(schema.statements(to).rstrip())
        return
    settings = load_settings()
    revision = schema.migrate(
        settings.database_url.get_secret_value(), to, stamp=settings.installation, say=note
    )
    line(f"The schema is at {revision or 'nothing'}.")


def show(as_json: AsJson = False) -> None:
    """Show the environment stamp, and whether it fits where it was found."""
    from app.cli.failing import Refused
    from app.cli.session import with_database
    from app.service import schema

    standing = with_database(
        lambda settings, database: schema.standing(database, settings.installation)
    )
    if standing is None:
        raise Refused("The database carries no stamp: run `fencepost migrate`.")
    stamp = standing.stamp
    shown = {
        "installation": stamp.stamp,
        "epoch": stamp.epoch,
        "created_at": stamp.created_at,
        "revision": standing.revision,
        "system_identifier": str(stamp.system_identifier),  # beyond what JSON numbers carry
        "timeline": stamp.timeline,
        "cluster": {
            "system_identifier": str(stamp.cluster_system_identifier),
            "timeline": stamp.cluster_timeline,
            "in_recovery": stamp.in_recovery,
        },
        "fits": standing.trouble is None,
        "trouble": standing.trouble,
    }
    if as_json:
        json(shown)
        return
    pairs(
        [
            ("installation", stamp.stamp),
            ("epoch", stamp.epoch),
            ("created", stamp.created_at),
            ("schema", standing.revision),
            ("stamped on cluster", f"{stamp.system_identifier}, timeline {stamp.timeline}"),
            (
                "found on cluster",
                f"{stamp.cluster_system_identifier}, timeline {stamp.cluster_timeline}",
            ),
            ("fits", standing.trouble or "yes"),
        ]
    )
