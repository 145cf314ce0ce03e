"""`GET /v1/operations`: a page of operations, or the one that holds a key (CONTRACT.md 15).

The cursor is opaque: the last item's creation time in microseconds and its id, which is the list's total
order at the clock's full precision (CASES.md K28).
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from urllib.parse import urlencode
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import JsonResponse
from app.api.authentication import READ, caller_of
from app.api.headers import lines_of
from app.api.links import link
from app.api.problems import Refusal, Slug
from app.api.representation import body_of
from app.api.services import services_of
from app.domain.identity import parse_idempotency_key
from app.domain.lifecycle import State
from app.domain.text import is_storable
from app.service.credentials import Caller
from app.service.reading import Filter, Page, Position

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_TEXT = 1024

_NAMES = ("type", "state", "created_after", "created_before", "limit", "cursor")
_METADATA = "metadata."
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)")
_CURSOR = re.compile(r"[A-Za-z0-9_-]{32}")
_Value = TypeVar("_Value")


async def get(request: Request) -> Response:
    """A page, newest first; with an Idempotency-Key the operation that holds it, or nothing."""
    services = services_of(request)
    caller = await caller_of(request, READ)
    given = _parameters(request)
    if lines_of(request.scope, b"idempotency-key"):
        return await _by_key(request, caller, given)
    limit = _read(given, "limit", _limit) or DEFAULT_LIMIT
    page = await services.reading.page(
        caller.tenant, _filter(given), _read(given, "cursor", _position), limit
    )
    return _shown(request, page, given)


async def _by_key(request: Request, caller: Caller, given: Mapping[str, str]) -> Response:
    key = parse_idempotency_key(lines_of(request.scope, b"idempotency-key"))
    type = _read(given, "type", _text)
    if type is None or set(given) != {"type"}:
        detail = "A look-up by key needs the parameter type, and takes no other."
        raise _invalid("type", "missing", detail)
    view = await services_of(request).reading.by_key(caller.tenant, type, key)
    return _shown(request, Page(() if view is None else (view,), None), given)


def _shown(request: Request, page: Page, given: Mapping[str, str]) -> Response:
    following = None
    if page.next is not None:
        query = urlencode({**given, "cursor": _cursor(page.next)})
        following = link(request, f"/v1/operations?{query}")
    body = {"data": [body_of(request, view) for view in page.operations], "next": following}
    return JsonResponse(body, headers={"Cache-Control": "private, no-cache"})


def _parameters(request: Request) -> dict[str, str]:
    """The query's parameters, each known and given once. What is not known is not repeated (B51)."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in _NAMES and not name.startswith(_METADATA):
            known = ", ".join((*_NAMES, f"{_METADATA}K"))
            raise _invalid("", "unknown", f"There is a parameter that is not one of {known}.")
        if name in given:
            raise _invalid(name, "repeated", "Each parameter is given once.")
        given[name] = value
    return given


def _filter(given: Mapping[str, str]) -> Filter:
    metadata = tuple(
        (_checked(name, name.removeprefix(_METADATA), _text), _checked(name, value, _text))
        for name, value in given.items()
        if name.startswith(_METADATA)
    )
    return Filter(
        type=_read(given, "type", _text),
        state=_read(given, "state", State),
        created_after=_read(given, "created_after", _instant),
        created_before=_read(given, "created_before", _instant),
        metadata=metadata,
    )


def _read(
    given: Mapping[str, str], name: str, understand: Callable[[str], _Value]
) -> _Value | None:
    return _checked(name, given[name], understand) if name in given else None


def _checked(name: str, text: str, understand: Callable[[str], _Value]) -> _Value:
    """What `understand` makes of `text`; what it raises as ValueError becomes a 400."""
    try:
        return understand(text)
    except (ValueError, OverflowError):
        raise _invalid(name, "invalid", _EXPECTED.get(name, _EXPECTED_TEXT)) from None


_EXPECTED_TEXT = f"Expected: storable text of at most {MAX_TEXT} characters."
_EXPECTED = {
    "state": f"Expected: one of {', '.join(State)}.",
    "created_after": "Expected: a time as in RFC 3339, with Z or an offset.",
    "created_before": "Expected: a time as in RFC 3339, with Z or an offset.",
    "limit": f"Expected: a whole number from 1 to {MAX_LIMIT}.",
    "cursor": "Expected: the cursor of a `next` link, unchanged.",
}


def _invalid(name: str, code: str, detail: str) -> Refusal:
    shown = name if name in _NAMES else f"{_METADATA}K" if name else ""
    error = {"parameter": shown, "code": code, "detail": detail}
    return Refusal(Slug.INVALID_QUERY, "The query does not hold; see `errors`.", errors=(error,))


def _text(text: str) -> str:
    if not text or len(text) > MAX_TEXT or not is_storable(text):
        raise ValueError
    return text


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= MAX_LIMIT):
        raise ValueError
    return int(text)


def _instant(text: str) -> datetime:
    text = text.replace(" ", "+").upper()  # a plus sign that was not percent-encoded
    if _INSTANT.fullmatch(text) is None:
        raise ValueError
    return datetime.fromisoformat(text).astimezone(UTC)


def _cursor(position: Position) -> str:
    microseconds = (position.created_at - _EPOCH) // _MICROSECOND
    packed = microseconds.to_bytes(8, "big", signed=True) + position.id.bytes
    return urlsafe_b64encode(packed).decode()


def _position(text: str) -> Position:
    if _CURSOR.fullmatch(text) is None:
        raise ValueError
    packed = urlsafe_b64decode(text)
    microseconds = int.from_bytes(packed[:8], "big", signed=True)
    return Position(_EPOCH + microseconds * _MICROSECOND, UUID(bytes=packed[8:]))
