"""`POST /v1/operations`: admit, or answer for what holds the key (CONTRACT.md 1 to 7, 9, 10).

The order of refusals is fixed: who asks (401, 403), the key's syntax (400), media type (415), size (413),
JSON (400), the request's words (422). All of them come before the key is bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import JsonResponse
from app.api.authentication import READ, WRITE, caller_of
from app.api.bodies import read_json
from app.api.headers import Preferences, lines_of, preferences, semantic_headers
from app.api.links import link
from app.api.problems import Refusal, Slug, field_errors
from app.api.representation import body_of, headers_of, path_of, reference_to
from app.api.services import services_of
from app.api.waiting import until_done
from app.domain.identity import OperationId, parse_idempotency_key
from app.domain.operation import OperationView
from app.domain.request import FieldError
from app.service.admission import (
    Admission,
    Admitted,
    Draft,
    Gone,
    Invalid,
    Mismatched,
    NotUnderstood,
    Replayed,
    TypeUnknown,
)
from app.service.credentials import Caller

VERSION_RETRY_SECONDS = 5


async def post(request: Request) -> Response:
    """Create an operation, or get the one that this request created before."""
    services = services_of(request)
    caller = await caller_of(request, WRITE)
    key = parse_idempotency_key(lines_of(request.scope, b"idempotency-key"))
    members = _members(await read_json(request, services.settings.max_body_bytes))
    draft = Draft(caller.tenant, key, members, semantic_headers(request.scope))
    return await _answer(request, caller, await services.admission.submit(draft))


def _members(body: object) -> Mapping[str, object]:
    """The body's members, where it has a type to judge the others by."""
    if not isinstance(body, dict):
        raise _invalid("", "object_type", "The body must be an object.")
    if "type" not in body:
        raise _invalid("/type", "missing", "Field required")
    if not isinstance(body["type"], str):
        raise _invalid("/type", "string_type", "Input should be a valid string")
    return body


def _invalid(pointer: str, code: str, detail: str) -> Refusal:
    errors = field_errors([FieldError(pointer, code, detail)])
    return Refusal(Slug.INVALID_INPUT, "The request does not hold.", errors=errors)


async def _answer(request: Request, caller: Caller, admission: Admission) -> Response:
    match admission:
        case Admitted(view):
            return await _operation(request, view, replayed=False)
        case Replayed(view):
            return await _operation(request, view, replayed=True)
        case Gone(view):
            raise Refusal(
                Slug.KEY_EXPIRED,
                "The operation of this key is over, and its result is no longer kept.",
                key_bound=True,
                operation=reference_to(request, view),
            )
        case Mismatched(holder):
            raise Refusal(
                Slug.KEY_REUSED,
                "This key was used for another request of the same type.",
                key_bound=True,
                operation=_holder(request, caller, holder),
            )
        case Invalid(errors, key_bound):
            raise Refusal(
                Slug.INVALID_INPUT,
                "The request does not hold; see `errors`.",
                key_bound=key_bound,
                errors=field_errors(errors),
            )
        case TypeUnknown():
            errors = (FieldError("/type", "unknown_type", "There is no such operation type"),)
            raise Refusal(
                Slug.UNKNOWN_TYPE,
                "There is no operation type of this name here.",
                errors=field_errors(errors),
            )
        case NotUnderstood(holder):
            raise Refusal(
                Slug.VERSION_UNKNOWN,
                "The key's operation was admitted by a release this process does not know.",
                key_bound=True,
                operation=_holder(request, caller, holder),
                headers={"Retry-After": str(VERSION_RETRY_SECONDS)},
            )
        case _:
            assert_never(admission)


def _holder(request: Request, caller: Caller, holder: OperationId) -> dict[str, object] | None:
    """The operation that holds the key, for a caller who may read it."""
    if READ not in caller.scopes:
        return None
    return {"id": str(holder), "href": link(request, f"/v1/operations/{holder}")}


async def _operation(request: Request, view: OperationView, *, replayed: bool) -> Response:
    wanted = preferences(request.scope)
    waits = _bounded(wanted, services_of(request).settings.max_wait_seconds)
    if waits and not view.done:
        view = await until_done(request, view, waits)
    headers = {**headers_of(view), "Location": link(request, path_of(view))}
    if replayed:
        headers["Idempotent-Replayed"] = "true"
    applied = _applied(wanted, waits, done=view.done)
    if applied:
        headers["Preference-Applied"] = applied
    return JsonResponse(body_of(request, view), 200 if view.done else 202, headers)


def _bounded(wanted: Preferences, max_wait_seconds: float) -> float | None:
    """For how long to wait; None where nobody asked for it."""
    return None if wanted.wait_seconds is None else min(wanted.wait_seconds, max_wait_seconds)


def _applied(wanted: Preferences, waits: float | None, *, done: bool) -> str:
    """What of `Prefer` was honoured, with the wait as it was bounded (RFC 7240, 3)."""
    applied = ["respond-async"] if wanted.respond_async and not done else []
    if waits is not None:
        applied.append(f"wait={int(waits)}")
    return ", ".join(applied)
