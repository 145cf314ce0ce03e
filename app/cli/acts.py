"""`fencepost ops resolve` and `retry`: acts on one operation, each with its reason (CONTRACT.md 23)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.failing import Refused
from app.cli.ops import OperationArgument, not_found, parsed, representation, who
from app.cli.options import AsJson
from app.cli.output import json, line
from app.service.resolution import Verdict

if TYPE_CHECKING:
    from app.service.resolution import Answer, Operators, Request

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept with the act.")]


def resolve(
    operation: OperationArgument,
    step: Annotated[str, typer.Option("--step", metavar="S", help="The step in doubt.")],
    verdict: Annotated[Verdict, typer.Option("--as", help="What you found out.")],
    evidence: Annotated[
        str, typer.Option("--evidence", metavar="TEXT", help="What shows it, such as a ticket.")
    ],
    reason: Reason,
    item: Annotated[
        int, typer.Option("--item", metavar="N", min=0, help="Where the step fans out.")
    ] = 0,
    compensation: Annotated[
        bool, typer.Option("--compensation", help="The step's compensation is meant.")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="R", help="The provider's, where it was applied."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Settle a doubt by hand, with evidence.

    `applied` is always allowed; `absent` and `rejected` only once nothing that was sent can still arrive.
    """
    from app.domain.identity import Direction
    from app.service.resolution import Resolve

    what = Resolve(
        step=step,
        verdict=verdict,
        evidence=evidence,
        item=item,
        direction=Direction.COMPENSATION if compensation else Direction.FORWARD,
        reference=reference,
    )
    _act(operation, reason, lambda operators, asked: operators.resolve(asked, what), as_json)


def retry(operation: OperationArgument, reason: Reason, as_json: AsJson = False) -> None:
    """Let an operation that needs attention go on, with nothing in doubt."""
    _act(operation, reason, lambda operators, asked: operators.retry(asked), as_json)


def _act(
    operation: str,
    reason: str,
    act: Callable[[Operators, Request], Awaitable[Answer]],
    as_json: bool,
) -> None:
    import asyncio

    from app.cli.session import require_database
    from app.domain.identity import new_id
    from app.service import resolution

    asked = resolution.Request(
        operation=parsed(operation), tenant=None, by=who(), key=str(new_id()), reason=reason
    )
    require_database()
    match asyncio.run(_run(act, asked)):
        case resolution.Accepted(view):
            if as_json:
                json(representation().of(view))
            else:
                line(f"{view.id}: goes on, {view.state.value}.")
        case resolution.NotFound():
            raise not_found(operation)
        case resolution.Refusal(code, detail):
            raise Refused(f"{code}: {detail}")


async def _run(act: Callable[[Operators, Request], Awaitable[Answer]], asked: Request) -> Answer:
    import os

    from app.bootstrap import open_core
    from app.settings import load_settings

    quiet = load_settings().model_copy(update={"log_level": "error"})
    core = await open_core(quiet, os.environ, "operator", patience_seconds=0)
    try:
        answer = await act(core.operators(), asked)
        await core.notifier.drain()
        return answer
    finally:
        await core.close()
