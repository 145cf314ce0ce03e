"""The one renderer of errors, the framework's own included (CONTRACT.md 18).

A problem never repeats what a header, a query or a body said: any of them may hold a secret (CASES.md B51).
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Match, Route

from app.api.answers import PROBLEM_JSON, JsonResponse
from app.api.links import link
from app.api.problems import PROBLEMS, Refusal, Slug
from app.domain.errors import CommitUnknown, InvalidInput, StoreUnavailable
from app.domain.text import bounded_text
from app.service.admission import HolderUnreadable, KeyBound
from app.telemetry import Event, Metric

STORE_RETRY_SECONDS = 2
_INSTANCE_LIMIT = 200


def problem(request: Request, refusal: Refusal, **extra: object) -> JsonResponse:
    """The answer to `request` that `refusal` says; `extra` members come last."""
    kind = PROBLEMS[refusal.slug]
    status = refusal.status or kind.status
    body: dict[str, object] = {
        "type": link(request, f"/problems/{refusal.slug}"),
        "title": kind.title,
        "status": status,
        "detail": refusal.detail,
        "instance": _instance(request),
        "code": refusal.slug.value,
        "retryable": kind.retryable,
        "key_bound": refusal.key_bound,
    }
    if refusal.operation is not None:
        body["operation"] = dict(refusal.operation)
    if refusal.errors:
        body["errors"] = [dict(error) for error in refusal.errors]
    body.update(extra)
    headers = {"Cache-Control": "no-store", **refusal.headers}
    return JsonResponse(body, status, headers, media_type=PROBLEM_JSON)


def _instance(request: Request) -> str:
    """The path that was asked for, without its query, bounded."""
    return bounded_text(quote(request.scope["path"], safe="/"), _INSTANCE_LIMIT)


def unhandled(request: Request, request_id: str) -> JsonResponse:
    """The answer to an error nobody expected: nothing of its inside, and the id that the log has too."""
    refusal = Refusal(
        Slug.INTERNAL_ERROR,
        "An unexpected error; the log knows it under the request id.",
        key_bound="unknown" if request.method == "POST" else False,
    )
    return problem(request, refusal, request_id=request_id)


def handle_errors(app: FastAPI) -> None:
    """Register the renderer for everything that is answered by raising."""

    async def refused(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, Refusal)
        return problem(request, error)

    async def invalid(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, InvalidInput)
        return problem(request, Refusal(Slug(error.code), error.detail))

    async def store(request: Request, error: Exception) -> JsonResponse:
        return _store(request, error)

    async def framework(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, HTTPException)
        return _framework(app, request, error)

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(InvalidInput, invalid)
    app.add_exception_handler(StoreUnavailable, store)
    app.add_exception_handler(HTTPException, framework)


def _store(request: Request, error: Exception) -> JsonResponse:
    telemetry = request.app.state.services.telemetry
    telemetry.count(Metric.STORE_ERRORS, where="api")
    telemetry.event(Event.STORE_UNAVAILABLE, "warning", verb="request", detail=str(error))
    if request.method == "POST":
        detail, key_bound = _what_stands(error)
    else:
        detail, key_bound = "The database is out of reach or too slow.", False
    headers = {"Retry-After": str(STORE_RETRY_SECONDS)}
    refusal = Refusal(Slug.STORE_UNAVAILABLE, detail, key_bound=key_bound, headers=headers)
    return problem(request, refusal)


def _what_stands(error: Exception) -> tuple[str, KeyBound]:
    match error:
        case CommitUnknown():
            detail = "The database went away at the commit: whether this was done is not known yet."
            return detail, "unknown"
        case HolderUnreadable():
            return "The key is bound; the database went away before the answer was read.", True
        case _:
            return "The database is out of reach or too slow. Nothing was done.", False


_FRAMEWORK_SLUGS: Mapping[int, Slug] = {
    404: Slug.NOT_FOUND,
    405: Slug.METHOD_NOT_ALLOWED,
}


def _framework(app: FastAPI, request: Request, error: HTTPException) -> JsonResponse:
    slug = _FRAMEWORK_SLUGS.get(error.status_code)
    if slug is None:
        slug = Slug.BAD_REQUEST if error.status_code < 500 else Slug.INTERNAL_ERROR
    detail = PROBLEMS[slug].meaning
    headers = dict(error.headers or {})
    if slug is Slug.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed(app, request))
    if slug in (Slug.BAD_REQUEST, Slug.INTERNAL_ERROR):
        detail = f"{HTTPStatus(error.status_code).phrase}."
    return problem(request, Refusal(slug, detail, headers=headers, status=error.status_code))


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """Every method of this path; the framework names those of one of its routes only."""
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)
