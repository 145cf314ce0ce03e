"""What surrounds every request, as plain ASGI: id, access log, metrics, the last resort for errors, CORS.

No middleware base class is used: one that runs the application in a task of its own cancels what it started
when a client hangs up (CASES.md B35).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import unhandled
from app.api.headers import lines_of
from app.domain.identity import new_id
from app.service.clock import elapsed
from app.telemetry import Event, Metric, Telemetry

REQUEST_ID = "X-Request-Id"
CLIENT_CLOSED = 499
"""The status that is logged and counted where a client hung up before the answer; it is never sent."""

ROUTE = "fencepost.route"
"""Where in the ASGI scope the template of the route is noted, once there is one."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_UNMATCHED = "unmatched"
_FRAMES = 8


class Observed:
    """Gives each request an id, says how it ended, and answers what nobody caught with a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = str(new_id())
        telemetry: Telemetry = scope["app"].state.services.telemetry
        started, status = elapsed(), CLIENT_CLOSED

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_CLOSED
        except Exception as error:
            self._say(telemetry, scope, request_id, error)
            if status != CLIENT_CLOSED:  # the answer has begun: only the connection's end can tell
                raise
            await unhandled(Request(scope), request_id)(scope, receive, send_with_id)
        finally:
            _count(telemetry, scope, status, request_id, elapsed() - started)

    def _say(self, telemetry: Telemetry, scope: Scope, request_id: str, error: Exception) -> None:
        """Where it happened. Not the error's own words: a driver repeats parameters in them (B51)."""
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        telemetry.event(
            Event.UNHANDLED_REQUEST,
            "error",
            request_id=request_id,
            route=_route(scope),
            error=type(error).__name__,
            where=[f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
        )


def _route(scope: Scope) -> str:
    """The route's template: a raw path has no bound, and may hold anything."""
    route = scope.get(ROUTE, _UNMATCHED)
    assert isinstance(route, str)
    return route


def _count(
    telemetry: Telemetry, scope: Scope, status: int, request_id: str, seconds: float
) -> None:
    method = scope["method"] if scope["method"] in _METHODS else "other"
    route = _route(scope)
    telemetry.count(Metric.HTTP_REQUESTS, route=route, method=method, status=str(status))
    telemetry.event(
        Event.ANSWERED,
        request_id=request_id,
        route=route,
        method=method,
        status=status,
        seconds=round(seconds, 6),
        caller=scope.get("fencepost.caller"),
    )


class Cors:
    """CORS for the origins of the setting; others pass as if it were not there (CONTRACT.md 20)."""

    exposed = (
        "Location, Retry-After, Idempotent-Replayed, Idempotency-Expires, ETag, Preference-Applied, "
        f"{REQUEST_ID}"
    )
    allowed_headers = (
        "Authorization, Content-Type, Content-Encoding, Idempotency-Key, Prefer, If-Match, If-None-Match, "
        "Last-Event-ID"
    )

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        origin = self._origin(scope) if scope["type"] == "http" else None
        if origin is None:
            await self._app(scope, receive, send)
            return
        is_preflight = lines_of(scope, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and is_preflight:
            await self._preflight(origin)(scope, receive, send)
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Access-Control-Allow-Origin"] = origin
                headers["Access-Control-Expose-Headers"] = self.exposed
                headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_with_cors)

    def _origin(self, scope: Scope) -> str | None:
        """The asking origin, where it is one that may."""
        for line in lines_of(scope, b"origin"):
            origin = line.decode("latin-1")
            if origin in self._origins:
                return origin
            if "*" in self._origins:
                return "*"
        return None

    def _preflight(self, origin: str) -> Response:
        headers = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": self.allowed_headers,
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        }
        return Response(status_code=204, headers=headers)
