"""Every route, once: what serves it, and what `/openapi.json` and `/docs` say of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from app.api import (
    documents,
    health,
    listing,
    operation_types,
    operations,
    operators,
    pages,
    submission,
)
from app.api.answers import JSON
from app.api.authentication import OPERATOR, READ, WRITE
from app.api.documents import Answer, Described, Parameter
from app.api.middleware import ROUTE
from app.api.pages import HTML

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Served:
    """One route: its description, and the function that answers."""

    described: Described
    endpoint: Endpoint


_ID = Parameter("id", "path", "The operation's id", required=True)
_KEY = Parameter(
    "Idempotency-Key",
    "header",
    "1 to 255 bytes of printable ASCII without spaces, bare or as a quoted string",
    required=True,
)
_LOOK_UP_KEY = Parameter(
    "Idempotency-Key",
    "header",
    "Look up the operation that holds this key; needs `type`",
)
_WAIT = Parameter("Prefer", "header", "`wait=N`: hold the answer back for up to N seconds")
_NONE_MATCH = Parameter("If-None-Match", "header", "304 while the `ETag` is still this one")
_MATCH = Parameter("If-Match", "header", "The `ETag` the act was decided on, or `*`", required=True)
_FILTERS = (
    Parameter("type", "query", "Only this operation type"),
    Parameter("state", "query", "Only operations in this state"),
    Parameter("created_after", "query", "Only later ones; RFC 3339"),
    Parameter("created_before", "query", "Only earlier ones; RFC 3339"),
    Parameter("metadata.K", "query", "Only where the metadata member K has this value; repeatable"),
    Parameter("limit", "query", "1 to 100; 20 where it is left out"),
    Parameter("cursor", "query", "Where to go on, from `next`"),
)

SERVED: tuple[Served, ...] = (
    Served(
        Described(
            "POST",
            "/v1/operations",
            "Admit an operation, or answer for the one that already holds the key. The 202 leaves only after "
            "the operation is committed; a repeat gets the same operation, marked `Idempotent-Replayed`.",
            (
                Answer(202, "Admitted, or under way", "operation"),
                Answer(200, "The operation is done", "operation"),
            ),
            (400, 401, 403, 406, 410, 413, 415, 422, 503),
            scope=WRITE,
            parameters=(_KEY, _WAIT),
            body="operation_request",
        ),
        submission.post,
    ),
    Served(
        Described(
            "GET",
            "/v1/operations",
            "Operations, newest first; or, with an `Idempotency-Key`, the one that holds it.",
            (Answer(200, "One page", "operations"),),
            (400, 401, 403, 406, 503),
            scope=READ,
            parameters=(*_FILTERS, _LOOK_UP_KEY),
        ),
        listing.get,
    ),
    Served(
        Described(
            "GET",
            "/v1/operations/{id}",
            "One operation. With `Prefer: wait=N` the answer waits until it differs from `If-None-Match`, or "
            "from what it was on arrival.",
            (
                Answer(200, "The operation", "operation"),
                Answer(304, "Still what `If-None-Match` names"),
            ),
            (401, 403, 404, 406, 503),
            scope=READ,
            parameters=(_ID, _WAIT, _NONE_MATCH),
        ),
        operations.get,
    ),
    Served(
        Described(
            "POST",
            "/v1/operations/{id}/cancel",
            "Ask for cancellation. At once where nothing was begun; else noted, and the truth wins.",
            (
                Answer(200, "The operation is done, cancelled or otherwise", "operation"),
                Answer(202, "Noted; the operation goes on for now", "operation"),
            ),
            (400, 401, 403, 404, 406, 413, 415, 422, 503),
            scope=WRITE,
            parameters=(_ID,),
            body="cancel_request",
        ),
        operations.cancel,
    ),
    Served(
        Described(
            "POST",
            "/v1/operations/{id}/resolve",
            "Settle a doubt by hand. `applied` is always allowed; `absent` and `rejected` only once nothing "
            "that was sent can still arrive.",
            (Answer(200, "The operation goes on", "operation"),),
            (400, 401, 403, 404, 406, 409, 412, 413, 415, 422, 428, 503),
            scope=OPERATOR,
            parameters=(_ID, _KEY, _MATCH),
            body="resolve_request",
        ),
        operators.resolve,
    ),
    Served(
        Described(
            "POST",
            "/v1/operations/{id}/retry",
            "Let an operation that needs attention go on, with nothing in doubt.",
            (Answer(200, "The operation goes on", "operation"),),
            (400, 401, 403, 404, 406, 409, 412, 413, 415, 422, 428, 503),
            scope=OPERATOR,
            parameters=(_ID, _KEY, _MATCH),
            body="retry_request",
        ),
        operators.retry,
    ),
    Served(
        Described(
            "GET",
            "/v1/operation-types",
            "The operation types: JSON Schemas, steps, and every window of time in seconds.",
            (Answer(200, "All types, or the one of `type`", "operation_types"),),
            (401, 403, 406, 503),
            scope=READ,
            parameters=(Parameter("type", "query", "Only this one"),),
        ),
        operation_types.get,
    ),
    Served(
        Described(
            "GET",
            "/problems/{slug}",
            "What a problem type means and what to do.",
            (Answer(200, "For people, or as JSON", media_types=(JSON, HTML)),),
            (404, 406),
            parameters=(Parameter("slug", "path", "A problem's `code`", required=True),),
        ),
        pages.problem,
    ),
    Served(
        Described(
            "GET",
            "/livez",
            "The process is alive.",
            (Answer(200, "It is", "status"),),
        ),
        health.livez,
    ),
    Served(
        Described(
            "GET",
            "/readyz",
            "The process can serve: database reachable, schema and stamp as expected.",
            (Answer(200, "It can", "status"),),
            (503,),
        ),
        health.readyz,
    ),
    Served(
        Described(
            "GET",
            "/metrics",
            "Prometheus metrics, of all processes that share a folder.",
            (Answer(200, "Text format", media_types=("text/plain",)),),
            (404,),
        ),
        health.metrics,
    ),
    Served(
        Described(
            "GET",
            "/openapi.json",
            "This description, as OpenAPI 3.1.",
            (Answer(200, "The document", media_types=(JSON,)),),
        ),
        documents.get,
    ),
    Served(
        Described(
            "GET",
            "/docs",
            "This description, as a page.",
            (Answer(200, "The page", media_types=(HTML,)),),
        ),
        pages.documentation,
    ),
)


def routes() -> list[BaseRoute]:
    """The routes as Starlette serves them; a GET route answers HEAD too."""
    return [
        Route(served.described.path, _named(served), methods=[served.described.method])
        for served in SERVED
    ]


def _named(served: Served) -> Endpoint:
    """The endpoint, saying under which template it was reached: what logs and metrics show of a path."""

    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE] = served.described.path
        return await served.endpoint(request)

    return endpoint
