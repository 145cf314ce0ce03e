"""What the provider `payments` says, read strictly: answers to calls, and lists found by look-ups.

An object counts as the effect of a request only if it says so itself: a created one by its
`metadata.fencepost_key`, which must be the stored request's; a cancelled one by its id and status. So an
answer that belongs to another request, a list that ignored its filter, and two operations with one reference
are all told apart. Only known members are kept, each bounded: a result is small whatever the provider sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

import orjson

from app.domain.fields import MAX_EXACT_INTEGER
from app.domain.identity import DownstreamKey
from app.domain.outcome import Absent, Applied, Finding, Refused, Unavailable
from app.domain.plan import EffectRequest
from app.domain.profile import ProviderAnswer
from app.domain.text import bounded_text
from app.providers.http import HttpAnswer

_VALUE_LIMIT = 255
_KEPT = (
    "id",
    "object",
    "status",
    "amount",
    "currency",
    "charge",
    "reference",
    "created_at",
    "cancelled_at",
)
_PATH = re.compile(r"(?P<collection>/v1/[a-z_]+)(?:/(?P<target>[^/?]+)/cancel)?")


@dataclass(frozen=True, slots=True)
class WantedEffect:
    """Which effect a stored request asks for.

    `collection` is its path (`/v1/charges`); `target` the id of what is to be cancelled, None where something
    is to be created; `tag` the key the request carries in its metadata.
    """

    collection: str
    target: str | None
    tag: str

    @classmethod
    def of(cls, request: EffectRequest, key: DownstreamKey) -> WantedEffect | None:
        """Read from the stored request; None where it is none of this provider's."""
        match = _PATH.fullmatch(request.path)
        if match is None:
            return None
        metadata = (_json_object(request.body) or {}).get("metadata")
        tag = metadata.get("fencepost_key") if isinstance(metadata, dict) else None
        return cls(match["collection"], match["target"], tag if isinstance(tag, str) else key.value)

    def is_shown_by(self, thing: Mapping[str, object]) -> bool:
        """Whether `thing` is the effect, by its own account."""
        if not isinstance(thing.get("id"), str):
            return False
        if self.target is not None:
            return thing["id"] == self.target and thing.get("status") == "cancelled"
        metadata = thing.get("metadata")
        return isinstance(metadata, dict) and metadata.get("fencepost_key") == self.tag


def read_answer(answer: HttpAnswer, wanted: WantedEffect | None) -> ProviderAnswer:
    """An answer to a call, in the profile's terms. Unreadable: a success without its object, or no JSON."""
    value = None if answer.body is None else _json_object(answer.body)
    code, detail, readable = None, None, value is not None
    reference, result = None, None
    if 200 <= answer.status < 300:
        if value is not None and wanted is not None and wanted.is_shown_by(value):
            result = _known_members(value)
            reference = str(result["id"])
        else:
            readable, detail = False, "The answer does not show the effect that was asked for."
    elif value is not None:
        code, detail = _error_of(value)
    return ProviderAnswer(
        status=answer.status,
        code=code,
        detail=detail,
        reference=reference,
        result=result,
        retry_after_seconds=answer.retry_after_seconds,
        provider_request_id=answer.header("request-id"),
        readable=readable,
        replayed=(answer.header("idempotent-replayed") or "").lower() == "true",
    )


def read_list(answer: HttpAnswer, wanted: WantedEffect, *, exact: bool) -> Finding:
    """What a list says about an effect. `exact`: the filter names this effect and no other (its key).

    Absent only from a whole, well-formed list; where an exact filter gave things that are not ours, the
    filter did not work, and nothing follows.
    """
    trouble = look_up_trouble(answer)
    if trouble is not None:
        return trouble
    value = {} if answer.body is None else _json_object(answer.body) or {}
    things = value.get("data")
    if not isinstance(things, list) or not all(isinstance(thing, dict) for thing in things):
        return Unavailable("unreadable-answer", "The look-up did not answer with a list.")
    for thing in things:
        if wanted.is_shown_by(thing):
            return replace(_applied(thing), created_at=_instant(thing.get("created_at")))
    if value.get("has_more") is not False:
        return Unavailable("incomplete-list", "The look-up did not give the whole list.")
    if things and exact:
        return Refused("filter-ignored", "The look-up gave effects that were not asked for.")
    return Absent()


def _instant(text: object) -> datetime | None:
    """An RFC 3339 time with a zone, or None: then nothing is known of the effect's age."""
    try:
        instant = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return None if instant is None or instant.tzinfo is None else instant


def read_target(answer: HttpAnswer, wanted: WantedEffect) -> Finding:
    """What the object that was to be cancelled says: cancelled, or not (yet)."""
    trouble = look_up_trouble(answer)
    if trouble is not None:
        return trouble
    thing = None if answer.body is None else _json_object(answer.body)
    if (
        thing is None
        or thing.get("id") != wanted.target
        or not isinstance(thing.get("status"), str)
    ):
        return Unavailable("unreadable-answer", "The look-up did not answer with the object.")
    return _applied(thing) if wanted.is_shown_by(thing) else Absent()


def look_up_trouble(answer: HttpAnswer) -> Finding | None:
    """None for a 2xx; else why this answer is no evidence: try again, or it will stay like this."""
    if 200 <= answer.status < 300:
        return None
    value = None if answer.body is None else _json_object(answer.body)
    code, detail = (None, None) if value is None else _error_of(value)
    code = code or f"http-{answer.status}"
    if answer.status in (401, 403, 408, 425, 429) or answer.status >= 500:
        return Unavailable(code, detail, answer.retry_after_seconds)
    return Refused(code, detail)


def _applied(thing: Mapping[str, object]) -> Applied:
    result = _known_members(thing)
    return Applied(str(result["id"]), result)


def _error_of(value: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The provider's own code and sentence: `{"error": {"code", "message", ...}}`."""
    error = value.get("error")
    if not isinstance(error, dict):
        return None, None
    code, message = error.get("code"), error.get("message")
    return (
        bounded_text(code, _VALUE_LIMIT) if isinstance(code, str) else None,
        bounded_text(message) if isinstance(message, str) else None,
    )


def _known_members(thing: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name in _KEPT:
        value = thing.get(name)
        if isinstance(value, str):
            kept[name] = bounded_text(value, _VALUE_LIMIT)
        elif type(value) is int and abs(value) <= MAX_EXACT_INTEGER:
            kept[name] = value
    return kept


def _json_object(body: bytes) -> dict[str, object] | None:
    """The JSON object a body is, or None. orjson bounds the depth of nesting: no body can blow the stack."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
