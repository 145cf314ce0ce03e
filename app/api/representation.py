"""An operation on the wire, and the headers that speak of it (CONTRACT.md, Resources, 3, 12).

Never shown: owner token, generation, derived key, the raw idempotency key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from urllib.parse import quote

import orjson
from starlette.requests import Request

from app.api.answers import rfc_3339
from app.api.headers import http_date
from app.api.links import link
from app.api.services import services_of
from app.domain.operation import OperationView
from app.domain.plan import OperationType
from app.domain.progress import Progress, progress_of

RETRY_AFTER_CEILING_SECONDS = 60
_AGE_PER_SECOND = 10


def path_of(view: OperationView) -> str:
    """The operation's path, without any prefix."""
    return f"/v1/operations/{view.id}"


def etag(view: OperationView) -> str:
    """A strong validator: every visible change raises `version`; a strip changes the body beside it."""
    return f'"v{view.version}-purged"' if view.purged else f'"v{view.version}"'


def retry_after(view: OperationView, now: datetime) -> int:
    """Whole seconds until asking again is worth it: one at first, a tenth of the age later, bounded.

    `now` is this process's clock, beside the database's: a hint, so their difference does no harm.
    """
    age_seconds = (now - view.created_at).total_seconds()
    return min(max(1, math.ceil(age_seconds / _AGE_PER_SECOND)), RETRY_AFTER_CEILING_SECONDS)


def headers_of(view: OperationView) -> dict[str, str]:
    """The headers that every answer showing this one operation carries."""
    headers = {
        "ETag": etag(view),
        "Cache-Control": "private, no-cache",
        "Idempotency-Expires": http_date(view.idempotency_expires_at),
    }
    if not view.done:
        headers["Retry-After"] = str(retry_after(view, datetime.now(UTC)))
    return headers


def body_of(request: Request, view: OperationView) -> dict[str, object]:
    """The operation as this request is answered with it."""
    type = services_of(request).registry.get(view.type, view.type_version)
    return shown(view, type, lambda path: link(request, path))


def shown(
    view: OperationView, type: OperationType | None, href: Callable[[str], str]
) -> dict[str, object]:
    """The operation as a JSON object for orjson; `href` turns a path into what a client may follow.

    `type`: the version it was admitted under, None where it is not known here. A tombstone has no result, no
    error, no steps and no metadata.
    """
    progress = progress_of(view, type)
    body: dict[str, object] = {
        "id": str(view.id),
        "type": view.type,
        "type_version": view.type_version,
        "state": view.state.value,
        "done": view.done,
        "created_at": rfc_3339(view.created_at),
        "updated_at": rfc_3339(view.updated_at),
        "completed_at": rfc_3339(view.completed_at),
        "steps": _steps(progress),
        "progress": None if progress is None else {"done": progress.done, "total": progress.total},
        "cancel_requested": view.cancel_requested,
        "metadata": dict(view.metadata),
        "idempotency_expires_at": rfc_3339(view.idempotency_expires_at),
        "links": _links(view, href),
    }
    if view.attention is not None:
        body["attention"] = view.attention
    if view.purged:
        body["purged"] = True
    # Stored bytes go out as they are: the same answer for as long as it is kept (CONTRACT.md 16).
    if view.done and view.result is not None:
        body["result"] = orjson.Fragment(view.result)
    elif view.done and view.error is not None:
        body["error"] = orjson.Fragment(view.error)
    return body


def _steps(progress: Progress | None) -> list[Mapping[str, object]]:
    if progress is None:
        return []
    return [
        {
            "name": step.name,
            "state": step.state.value,
            "attempts": step.attempts,
            "provider": step.provider,
            "reference": step.reference,
        }
        for step in progress.steps
    ]


def _links(view: OperationView, href: Callable[[str], str]) -> dict[str, str]:
    path = path_of(view)
    return {
        "self": href(path),
        "cancel": href(f"{path}/cancel"),
        "type": href(f"/v1/operation-types?type={quote(view.type)}"),
    }


def reference_to(request: Request, view: OperationView) -> dict[str, object]:
    """What a problem says of an operation: id, address, and its end where there is one."""
    reference: dict[str, object] = {
        "id": str(view.id),
        "href": link(request, path_of(view)),
        "state": view.state.value,
        "done": view.done,
    }
    if view.completed_at is not None:
        reference["completed_at"] = rfc_3339(view.completed_at)
    if view.purged:
        reference["purged"] = True
    return reference
