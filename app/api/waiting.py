"""Holding an answer back until an operation changes, while the client is there (CONTRACT.md 9, 12).

Nothing is held meanwhile but memory. A client that hangs up ends its wait at once: otherwise everybody who
polls and leaves would be carried for the whole time asked for.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from app.api.services import services_of
from app.domain.operation import OperationView
from app.service.clock import elapsed
from app.service.watching import Watch


async def until_done(request: Request, view: OperationView, seconds: float) -> OperationView:
    """The operation once it is done, or as it is after `seconds`.

    Raises:
        ClientDisconnect: nobody waits for the answer any more.
    """
    hub, ends_at = services_of(request).hub, elapsed() + seconds
    while not view.done:
        with hub.watching(view.id) as watch:
            watch.noticed = True  # `view` was read before this watch began
            changed = await _while_connected(request, watch, view.version, ends_at - elapsed())
        if changed is None:
            return view
        view = changed
    return view


async def until_changed(
    request: Request, watch: Watch, view: OperationView, seconds: float
) -> OperationView:
    """The operation once it is another version than `view`, or `view` after `seconds`.

    `watch` began before `view` was read.

    Raises:
        ClientDisconnect: nobody waits for the answer any more.
    """
    return await _while_connected(request, watch, view.version, seconds) or view


async def _while_connected(
    request: Request, watch: Watch, version: int, seconds: float
) -> OperationView | None:
    change = asyncio.ensure_future(watch.change_from(version, seconds))
    hang_up = asyncio.ensure_future(_hang_up(request))
    try:
        await asyncio.wait({change, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if change.done():
            return change.result()
        raise ClientDisconnect
    finally:
        change.cancel()
        hang_up.cancel()


async def _hang_up(request: Request) -> None:
    """Return when the client is gone. Whatever else arrives (a body nobody asked for) is left aside."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
