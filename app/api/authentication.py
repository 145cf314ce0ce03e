"""Who asks, and whether they may: before anything else is looked at (CONTRACT.md 2, 21)."""

from __future__ import annotations

import re

from starlette.requests import Request

from app.api.answers import JSON
from app.api.headers import accepts, lines_of
from app.api.problems import Refusal, Slug
from app.api.services import services_of
from app.service.credentials import Caller

READ = "operations:read"
WRITE = "operations:write"
OPERATOR = "operator"

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


async def caller_of(request: Request, scope: str) -> Caller:
    """The caller, if it may use `scope` and can be answered in JSON.

    Raises:
        Refusal: 401 (the same for every reason), 403, or 406.
        StoreUnavailable: nobody can say who it is.
    """
    caller = await _authenticated(request)
    if scope not in caller.scopes:
        raise Refusal(Slug.INSUFFICIENT_SCOPE, f"This needs a key with the scope {scope}.")
    if accepts(request.scope, JSON) is None:
        raise Refusal(Slug.NOT_ACCEPTABLE, "This route answers in application/json only.")
    request.scope["fencepost.caller"] = caller.key_id  # for the access log; the id is no secret
    return caller


async def _authenticated(request: Request) -> Caller:
    lines = lines_of(request.scope, b"authorization")
    if len(lines) == 1:
        bearer = _BEARER.fullmatch(lines[0].decode("latin-1").strip(" \t"))
        caller = await services_of(request).verifier.verify(bearer[1] if bearer else "")
        if caller is not None:
            return caller
    raise Refusal(
        Slug.UNAUTHENTICATED,
        "Send exactly one Authorization header with a valid Bearer key.",
        headers={"WWW-Authenticate": "Bearer"},
    )
