"""The command `fencepost up`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from app.cli.failing import Refused


def up(
    port: Annotated[
        int,
        typer.Option("--port", metavar="P", min=0, max=65535, help="The API's; 0: a free one."),
    ] = 8000,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="Where everything is kept; default .fencepost here."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=0, max=64, help="Worker processes.")
    ] = 1,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Delete what an earlier start left in DIR, after asking."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Start everything in one, for trying and for development.

    PostgreSQL (embedded, unless DATABASE_URL names one), migrations, a development tenant and its API key,
    the API, workers, a reconciler and a simulated payment provider. Prints addresses, the key and a curl to
    paste. Ctrl-C stops all of it; what was accepted survives, and the next start on DIR goes on with it.
    """
    from app.cli.up.signals import interruptible

    interruptible()
    _refuse_production(os.environ)
    from app.cli.up.folder import open_folder

    folder = open_folder(data, os.environ)
    with folder.owned():
        if fresh and folder.has_data:
            if not yes and not _confirmed(folder.path):
                raise Refused("Nothing was deleted and nothing was started.")
            folder.empty()
        from app.cli.up.run import run

        run(folder, port, workers)


def _refuse_production(environ: Mapping[str, str]) -> None:
    if environ.get("FENCEPOST_ENVIRONMENT", "").strip().lower() == "production":
        raise Refused("`fencepost up` is for development; FENCEPOST_ENVIRONMENT says production.")


def _confirmed(path: Path) -> bool:
    if not sys.stdin.isatty():
        raise Refused("--fresh asks before it deletes: run it in a terminal, or add --yes.")
    return typer.confirm(f"Delete the database, ledger, key and logs in {path}?", err=True)
