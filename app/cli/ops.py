"""`fencepost ops`: operations of every tenant, from the terminal."""

from __future__ import annotations

import getpass
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.failing import Refused
from app.cli.options import AsJson
from app.cli.output import columns, json, line, pairs, printable
from app.domain.lifecycle import State

if TYPE_CHECKING:
    from app.cli.representation import Representation
    from app.domain.identity import OperationId
    from app.domain.operation import OperationView
    from app.service.operator import Inspected
    from app.settings import Settings

OperationArgument = Annotated[str, typer.Argument(metavar="ID", help="op_ and a UUID.")]


def list_operations(
    state: Annotated[State | None, typer.Option("--state", help="Only these.")] = None,
    type: Annotated[
        str | None, typer.Option("--type", metavar="T", help="Such as payments.charge.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="T", help="Without it: all tenants.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List operations, newest first.

    Example: `fencepost ops list --state needs_attention`
    """
    from app.cli.session import with_database
    from app.service import operator

    views = with_database(
        lambda _settings, database: operator.newest(
            database, tenant=tenant, type=type, state=state, limit=limit
        )
    )
    if as_json:
        shown = representation()
        json([{"tenant": view.tenant, **shown.of(view)} for view in views])
        return
    columns(
        ("id", "tenant", "type", "state", "created", "updated", "attempts", "attention"),
        [
            (
                view.id,
                view.tenant,
                view.type,
                view.state,
                view.created_at,
                view.updated_at,
                len(view.attempts),
                view.attention,
            )
            for view in views
        ],
    )


def show(operation: OperationArgument, as_json: AsJson = False) -> None:
    """Show one operation with its generation and every attempt of its ledger."""
    from app.cli.session import with_database
    from app.service import operator

    wanted = parsed(operation)
    found = with_database(lambda _settings, database: operator.show(database, wanted))
    if found is None:
        raise not_found(operation)
    if as_json:
        shown = representation().of(found.view)
        json({**shown, "generation": found.generation, "attempts": found.attempts})
        return
    _tell(found)


def _tell(found: Inspected) -> None:
    view = found.view
    pairs(
        [
            ("id", view.id),
            ("tenant", view.tenant),
            ("type", f"{view.type} version {view.type_version}"),
            ("state", view.state),
            ("attention", view.attention),
            ("created", view.created_at),
            ("updated", view.updated_at),
            ("completed", view.completed_at),
            ("key kept until", view.idempotency_expires_at),
            ("cancel requested", view.cancel_requested),
            ("generation", found.generation),
            ("metadata", ", ".join(f"{k}={v}" for k, v in view.metadata.items())),
            ("result", _text(view.result)),
            ("error", _text(view.error)),
        ]
    )
    line()
    if not found.attempts:
        line("No attempt was begun.")
        return
    columns(
        ("attempt", "step", "item", "began", "send by", "recorded", "outcome", "code", "reference"),
        [
            (
                each.id,
                each.step if each.direction.value == "forward" else f"{each.step} (back)",
                each.item,
                each.began_at,
                each.send_by,
                each.recorded_at,
                each.outcome or "open",
                each.code,
                each.provider_reference,
            )
            for each in found.attempts
        ],
    )


def _text(payload: bytes | None) -> str:
    return "" if payload is None else printable(payload.decode("utf-8", "replace"))


def cancel(
    operation: OperationArgument,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Kept in the timeline.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask for cancellation: at once where nothing was begun, else as a wish; the truth wins.

    On an operation that is done it changes nothing.
    """
    import asyncio

    from app.cli.session import require_database
    from app.settings import load_settings

    wanted = parsed(operation)
    require_database()
    view = asyncio.run(_cancel(load_settings(), wanted, reason))
    if view is None:
        raise not_found(operation)
    if as_json:
        json(representation().of(view))
        return
    ending = "is" if view.done else "asked to stop; it is still"
    line(f"{view.id}: {ending} {view.state.value}.")


async def _cancel(
    settings: Settings, operation: OperationId, reason: str | None
) -> OperationView | None:
    import os

    from app.bootstrap import open_core
    from app.service.cancellation import cancel

    quiet = settings.model_copy(update={"log_level": "error"})
    core = await open_core(quiet, os.environ, "operator", patience_seconds=0)
    try:
        view = await cancel(
            core.database, core.notifier, operation, tenant=None, by=who(), reason=reason
        )
        await core.notifier.drain()
        return view
    finally:
        await core.close()


def who() -> str:
    """Who acts, for the audit row: the user and machine of this terminal."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"operator@{socket.gethostname()}"


def parsed(operation: str) -> OperationId:
    """The id of the command line; raises a usage error where it is none."""
    from app.domain.errors import InvalidInput
    from app.domain.identity import OperationId

    try:
        return OperationId.parse(operation)
    except InvalidInput as error:
        raise typer.BadParameter(error.detail, param_hint="ID") from None


def not_found(operation: str) -> Refused:
    """What is said of an id nobody knows."""
    return Refused(f"There is no operation {operation}.")


def representation() -> Representation:
    """How the API shows an operation."""
    from app.cli.representation import Representation

    return Representation()
