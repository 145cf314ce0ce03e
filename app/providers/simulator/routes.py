"""The provider's routes, and its requests read into calls and look-ups.

`POST /v1/charges`, `/v1/refunds`, `/v1/shipments`, `/v1/messages` and `POST
/v1/{charges,shipments}/{id}/cancel` are calls; `GET
/v1/{charges,refunds,shipments}?reference=|idempotency_key=` and `.../{id}` are look-ups. Messages
know neither keys nor look-ups.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from .bodies import Body, read_body
from .faults import Traits
from .wire import Refusal, Request, error_answer, invalid, read_query

_KINDS = {"charges": "charge", "refunds": "refund", "shipments": "shipment", "messages": "message"}
_CANCELLABLE = ("charge", "shipment")
_MAX_KEY = 255


@dataclass(frozen=True, slots=True)
class Route:
    """`kind` of effect; `target` is the id in the path; a look-up or a call."""

    kind: str
    target: str | None
    look_up: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A POST that asks for an effect.

    `fingerprint` covers method, path with query, and the body's bytes as sent: a caller that
    renders the same values anew must render them to the same bytes.
    """

    kind: str
    target: str | None
    key: bytes | None
    fingerprint: bytes
    body: Body
    traits: Traits

    @property
    def reference(self) -> bytes | None:
        """The caller's reference as bytes."""
        return None if self.body.reference is None else self.body.reference.encode()


@dataclass(frozen=True, slots=True)
class LookUp:
    """A GET: by id, or by everything given of reference and key."""

    kind: str
    target: str | None
    reference: bytes | None
    key: bytes | None
    traits: Traits


def find_route(method: str, path: str) -> Route:
    """The route of a path under `/v1/`. Raises `Refusal`: 404, or 405 with `Allow`."""
    parts = path.split("/")[2:]
    kind = _KINDS.get(parts[0]) if parts else None
    target = parts[1] if len(parts) > 1 else None
    known = kind is not None and (target is None or (target != "" and kind != "message"))
    if known and kind is not None and len(parts) <= 2:
        allowed = ["POST"] if target is None else []
        if kind != "message":
            allowed.append("GET")
        if method in allowed:
            return Route(kind, target, look_up=method == "GET")
        raise _not_allowed(", ".join(allowed))
    if known and kind in _CANCELLABLE and len(parts) == 3 and parts[2] == "cancel":
        if method == "POST":
            return Route(f"{kind}_cancel", target, look_up=False)
        raise _not_allowed("POST")
    raise invalid("route_unknown", "There is nothing at this path.", status=404)


def _not_allowed(allowed: str) -> Refusal:
    return Refusal(
        error_answer(
            405, "invalid_request_error", "method_not_allowed", f"Only {allowed}.",
            ("Allow", allowed),
        )
    )  # fmt: skip


def read_key(request: Request) -> bytes | None:
    """The `Idempotency-Key`, or None where there is none. Raises `Refusal` (400)."""
    lines = request.header_lines(b"idempotency-key")
    if not lines:
        return None
    key = lines[0]
    if len(lines) > 1 or not 1 <= len(key) <= _MAX_KEY or any(not 32 <= byte < 127 for byte in key):
        raise invalid(
            "idempotency_key_invalid",
            f"One Idempotency-Key of 1 to {_MAX_KEY} printable ASCII characters.",
        )
    return key


def read_call(request: Request, route: Route) -> Call:
    """A POST, checked. Raises `Refusal` (400, 415)."""
    key = None if route.kind == "message" else read_key(request)
    body = read_body(route.kind, request)
    head = b" ".join((request.method.encode(), request.path.encode(), request.query))
    return Call(
        kind=route.kind,
        target=route.target,
        key=key,
        fingerprint=hashlib.sha256(head + b"\n" + request.body).digest(),
        body=body,
        traits=Traits(request.method, request.path, body.reference, body.source_text()),
    )


def read_look_up(request: Request, route: Route) -> LookUp:
    """A GET, checked. Raises `Refusal` (400)."""
    asked = read_query(request.query, () if route.target else ("reference", "idempotency_key"))
    if route.target is None and not asked:
        raise invalid("parameter_missing", "Ask by reference or idempotency_key.")
    reference = asked.get("reference")
    text = None if reference is None else reference.decode("utf-8", "replace")
    return LookUp(
        kind=route.kind,
        target=route.target,
        reference=reference,
        key=asked.get("idempotency_key"),
        traits=Traits(request.method, request.path, text),
    )
