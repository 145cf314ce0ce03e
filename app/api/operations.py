"""`/v1/operations/{id}`: poll, long poll, cancel (CONTRACT.md 12, 13, 17)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import JsonResponse
from app.api.authentication import READ, WRITE, caller_of
from app.api.bodies import check_media_type, read_bytes, read_json
from app.api.headers import lines_of, matches_etag, preferences
from app.api.problems import Refusal, Slug, field_errors
from app.api.representation import body_of, etag, headers_of
from app.api.services import services_of
from app.api.waiting import until_changed
from app.domain.errors import InvalidInput
from app.domain.identity import OperationId
from app.domain.operation import OperationView
from app.domain.request import FieldError
from app.domain.text import is_storable

MAX_REASON = 1000


def operation_id(request: Request) -> OperationId:
    """The id in the path.

    Raises:
        Refusal: 404, the same as for an id that does not exist.
    """
    try:
        return OperationId.parse(request.path_params["id"])
    except InvalidInput:
        raise not_found() from None


def not_found() -> Refusal:
    """One answer for ids that are malformed, unknown, or another tenant's (CONTRACT.md 13)."""
    return Refusal(Slug.OPERATION_NOT_FOUND, "There is no such operation.")


async def get(request: Request) -> Response:
    """One operation; with `Prefer: wait=N` once it changed, or after N seconds."""
    services = services_of(request)
    caller = await caller_of(request, READ)
    id = operation_id(request)
    waits = preferences(request.scope).wait_seconds
    if waits is None:
        view = await services.reading.one(id, caller.tenant)
        return _shown(request, view)
    waits = min(waits, int(services.settings.max_wait_seconds))
    with services.hub.watching(id) as watch:
        view = await services.reading.one(id, caller.tenant)
        if view is None:
            raise not_found()
        # Done is for ever, and what the client has not seen yet is worth telling now.
        if not view.done and matches_etag(request.scope, etag(view)) is not False:
            view = await until_changed(request, watch, view, waits)
    return _shown(request, view, {"Preference-Applied": f"wait={waits}"})


def _shown(
    request: Request, view: OperationView | None, more: dict[str, str] | None = None
) -> Response:
    if view is None:
        raise not_found()
    headers = {**headers_of(view), **(more or {})}
    if matches_etag(request.scope, etag(view)):
        return Response(status_code=304, headers=headers)
    return JsonResponse(body_of(request, view), headers=headers)


async def cancel(request: Request) -> Response:
    """Ask for cancellation: 200 where the operation is done then, 202 where the wish is noted."""
    caller = await caller_of(request, WRITE)
    id = operation_id(request)
    reason = await _reason(request)
    view = await services_of(request).cancel(
        id, tenant=caller.tenant, by=f"key:{caller.key_id}", reason=reason
    )
    if view is None:
        raise not_found()
    return JsonResponse(body_of(request, view), 200 if view.done else 202, headers_of(view))


async def _reason(request: Request) -> str | None:
    """The reason of `{"reason"}`; None for no body."""
    limit = services_of(request).settings.max_body_bytes
    if not lines_of(request.scope, b"content-type"):
        if await read_bytes(request, limit):
            check_media_type(request)
        return None
    body = await read_json(request, limit)
    if not isinstance(body, dict):
        raise _invalid("", "object_type", "The body must be an object.")
    if set(body) - {"reason"}:
        raise _invalid("", "extra_forbidden", "The body may have the member reason, and no other.")
    reason = body.get("reason")
    if reason is None:
        return None
    if not isinstance(reason, str) or len(reason) > MAX_REASON or not is_storable(reason):
        detail = f"Storable text of at most {MAX_REASON} characters."
        raise _invalid("/reason", "string_type", detail)
    return reason


def _invalid(pointer: str, code: str, detail: str) -> Refusal:
    errors = field_errors([FieldError(pointer, code, detail)])
    return Refusal(Slug.INVALID_INPUT, "The request does not hold.", errors=errors)
