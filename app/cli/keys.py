"""`fencepost keys`: API keys."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.durations import parse_duration
from app.cli.failing import Refused
from app.cli.options import AsJson
from app.cli.output import columns, json, line, moment, note


def _scopes(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def create(
    tenant: Annotated[str, typer.Option("--tenant", metavar="T", help="Whose operations.")],
    scopes: Annotated[
        str,
        typer.Option(
            "--scopes",
            metavar="S,S",
            help="What it may do: operations:read, operations:write, operator; separated by commas.",
        ),
    ],
    name: Annotated[str, typer.Option("--name", metavar="N", help="For your own lists.")] = "",
    expires_in: Annotated[
        float | None,
        typer.Option(
            "--expires-in",
            metavar="DURATION",
            parser=_duration,
            help="Such as 90d, 12h, 30m or 45s; without it the key does not expire.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key. The secret is shown once and cannot be had again.

    Example: `fencepost keys create --tenant acme --scopes operations:read,operations:write`
    """
    from app.cli.session import with_database
    from app.service import credentials

    issued = with_database(
        lambda settings, database: credentials.issue(
            database,
            environment=settings.environment,
            tenant=tenant,
            scopes=_scopes(scopes),
            name=name,
            expires_in_seconds=expires_in,
        )
    )
    key = issued.key
    if as_json:
        json(
            {
                "id": key.id,
                "key": issued.secret,
                "tenant": key.tenant,
                "scopes": key.scopes,
                "expires_at": key.expires_at,
            }
        )
        return
    line(issued.secret)
    until = f"until {moment(key.expires_at)}" if key.expires_at else "until revoked"
    note(
        f"Key {key.id} of tenant {key.tenant} for {', '.join(sorted(key.scopes))}, {until}. "
        "It is shown this once."
    )


def list_keys(as_json: AsJson = False) -> None:
    """List all keys of all tenants, without their secrets."""
    from app.cli.session import with_database
    from app.service import credentials

    keys = with_database(lambda _settings, database: credentials.every(database))
    if as_json:
        json(
            [
                {
                    "id": key.id,
                    "tenant": key.tenant,
                    "name": key.name,
                    "scopes": key.scopes,
                    "created_at": key.created_at,
                    "expires_at": key.expires_at,
                    "revoked_at": key.revoked_at,
                    "usable": key.usable,
                }
                for key in keys
            ]
        )
        return
    columns(
        ("id", "tenant", "name", "scopes", "created", "expires", "state"),
        [
            (
                key.id,
                key.tenant,
                key.name,
                ",".join(sorted(key.scopes)),
                key.created_at,
                key.expires_at,
                "usable" if key.usable else "revoked" if key.revoked_at else "expired",
            )
            for key in keys
        ],
    )


def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `fencepost keys list` shows it.")],
) -> None:
    """Revoke a key for good; every API process refuses it within 5 seconds."""
    from app.cli.session import with_database
    from app.service import credentials

    if key_id.startswith("fp_"):
        # Somebody pasted the key itself: its id is all that is needed, and all that may be shown.
        key_id = key_id.split("_")[2] if key_id.count("_") >= 3 else ""
    key = with_database(lambda _settings, database: credentials.revoke(database, key_id))
    if key is None:
        raise Refused("There is no key of that id: see `fencepost keys list`.")
    line(f"Key {key.id} of tenant {key.tenant} is revoked.")
