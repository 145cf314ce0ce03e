"""`resolve` and `retry`: what operators do to one operation (CONTRACT.md 23, PROTOCOL.md R6)."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import JsonResponse
from app.api.authentication import OPERATOR, caller_of
from app.api.bodies import read_json
from app.api.headers import joined, lines_of
from app.api.operations import not_found, operation_id
from app.api.problems import Refusal, Slug, field_errors
from app.api.representation import body_of, headers_of
from app.api.services import services_of
from app.domain.identity import Direction, parse_idempotency_key
from app.domain.request import FieldError, field_errors_of, unstorable_fields
from app.service import resolution
from app.service.resolution import Accepted, Answer, NotFound, Resolve, Verdict

_ETAG = re.compile(r'"v([1-9][0-9]{0,17})"')
_Text = Annotated[str, Field(min_length=1, max_length=4000)]
_Body = TypeVar("_Body", bound=BaseModel)


class RetryBody(BaseModel):
    """Why the operation may go on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    reason: Annotated[str, Field(min_length=1, max_length=1000)]


class ResolveBody(RetryBody):
    """A verdict on one step, with its evidence."""

    step: Annotated[str, Field(min_length=1, max_length=100)]
    item: Annotated[int, Field(ge=0, le=100_000)] = 0
    compensation: bool = False
    verdict: Annotated[Verdict, Field(alias="as", strict=False)]
    reference: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    result: dict[str, Any] | None = None
    evidence: _Text


async def resolve(request: Request) -> Response:
    """Settle a doubt by hand: 200 with the operation as it goes on."""
    asked, body = await _asked(request, ResolveBody)
    what = Resolve(
        step=body.step,
        item=body.item,
        direction=Direction.COMPENSATION if body.compensation else Direction.FORWARD,
        verdict=body.verdict,
        evidence=body.evidence,
        reference=body.reference,
        result=body.result,
    )
    return _answer(request, await services_of(request).operators.resolve(asked, what))


async def retry(request: Request) -> Response:
    """Let an operation that needs attention go on: 200 with the operation."""
    asked, _ = await _asked(request, RetryBody)
    return _answer(request, await services_of(request).operators.retry(asked))


async def _asked(request: Request, model: type[_Body]) -> tuple[resolution.Request, _Body]:
    """Who asks for what, in the order of CONTRACT.md 2: caller, key, precondition, body."""
    caller = await caller_of(request, OPERATOR)
    id = operation_id(request)
    key = parse_idempotency_key(lines_of(request.scope, b"idempotency-key"))
    version = _expected_version(request)
    members = await read_json(request, services_of(request).settings.max_body_bytes)
    if not isinstance(members, dict):
        raise _invalid((FieldError("", "object_type", "The body must be an object."),))
    if unstorable := unstorable_fields(members):
        raise _invalid(unstorable)
    try:
        body = model.model_validate(members)
    except ValidationError as error:
        raise _invalid(field_errors_of(error)) from None
    reason = getattr(body, "reason", "")
    asked = resolution.Request(
        operation=id,
        tenant=caller.tenant,
        by=f"key:{caller.key_id}",
        key=key.value,
        reason=reason,
        version=version,
    )
    return asked, body


def _expected_version(request: Request) -> int | None:
    """The version of `If-Match`; None for `*`. A validator that was never ours matches no version: 0."""
    given = joined(request.scope, b"if-match")
    if given is None:
        raise Refusal(Slug.IF_MATCH_MISSING, "Send the ETag of the operation as If-Match.")
    if given.strip() == "*":
        return None
    match = _ETAG.fullmatch(given.strip())
    return int(match[1]) if match else 0


def _invalid(errors: tuple[FieldError, ...]) -> Refusal:
    return Refusal(Slug.INVALID_INPUT, "The request does not hold.", errors=field_errors(errors))


def _answer(request: Request, answer: Answer) -> Response:
    match answer:
        case Accepted(view, repeated):
            headers = dict(headers_of(view))
            if repeated:
                headers["Idempotent-Replayed"] = "true"
            return JsonResponse(body_of(request, view), 200, headers)
        case NotFound():
            raise not_found()
        case resolution.Refusal(code, detail, wait):
            raise Refusal(
                Slug(code),
                detail,
                headers={} if wait is None else {"Retry-After": str(math.ceil(wait))},
            )
