"""Reading an admission request: JSON text, members, validation, meaning (CONTRACT.md 2, 7, 18).

Everything here happens before a key is bound. What is accepted is what is stored, forwarded and
fingerprinted: the validated input in its JSON form.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NoReturn

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from app.domain.errors import MalformedBody
from app.domain.plan import OperationType
from app.domain.text import bounded_text

MAX_SAFE_INTEGER = 2**53 - 1
MAX_METADATA_PAIRS = 20
MAX_METADATA_BYTES = 4096
MAX_DEPTH = 64
"""How deep objects and arrays may be nested; far below what any JSON writer behind us gives up at."""

MAX_POINTER = 500
MAX_FIELD_ERRORS = 100
"""So many things wrong are listed at most: an answer need not be as long as what it refuses."""

_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)")
"""RFC 3339, 5.6."""


def parse_json(body: bytes) -> object:
    """One JSON text in UTF-8, a byte-order mark allowed.

    Raises:
        MalformedBody: not UTF-8, not JSON, a member named twice in one object, NaN or Infinity (also as an
            overflowing number), or nested too deeply. A sentence that repeats nothing of the body.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedBody(f"The body is not UTF-8 at byte {error.start}.") from None
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_unique_members,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        raise MalformedBody(
            f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise MalformedBody("The body is nested too deeply.") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth_of(value) > MAX_DEPTH:
        raise MalformedBody(f"The body is nested more than {MAX_DEPTH} deep.")
    return value


def _depth_of(value: object) -> int:
    """How many objects and arrays lie within each other. Level by level: it must not recurse itself."""
    depth, level = 0, [value]
    while level := [found for found in level if isinstance(found, (dict, list))]:
        depth += 1
        level = [
            member
            for found in level
            for member in (found.values() if isinstance(found, dict) else found)
        ]
    return depth


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise MalformedBody("An object in the body has two members of the same name.")
    return members


def _refuse_constant(_name: str) -> NoReturn:
    raise MalformedBody("NaN and Infinity are not JSON.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedBody("A number in the body is too large.")
    return number


def _integer(text: str) -> int:
    # Whatever is longer lies outside ±(2^53 - 1) anyway and is refused as such, field by field.
    return int(text) if len(text) <= 20 else 2**64


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing wrong with one member: `pointer` is an RFC 6901 JSON Pointer into the request body."""

    pointer: str
    code: str
    detail: str


def _rfc_3339(instant: object) -> object:
    if instant is None or (isinstance(instant, str) and _INSTANT.fullmatch(instant)):
        return instant
    raise PydanticCustomError(
        "instant", "A time is a string as in RFC 3339, 5.6, with Z or an offset"
    )


def _in_utc(instant: datetime) -> datetime:
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        raise PydanticCustomError("instant", "A time lies in the years 1 to 9999, UTC") from None


Instant = Annotated[
    datetime, Field(strict=False), BeforeValidator(_rfc_3339), AfterValidator(_in_utc)
]
"""A point in time; two spellings of one are the same request."""


class Envelope(BaseModel):
    """The members around `input`; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: str
    input: dict[str, Any]
    metadata: dict[
        Annotated[str, Field(min_length=1, max_length=64)],
        Annotated[str, Field(max_length=1024)],
    ] = Field(default_factory=dict, max_length=MAX_METADATA_PAIRS)
    not_before: Instant | None = None
    deadline: Instant | None = None
    priority: Literal[0, 1, 2, 3] | None = None

    @field_validator("priority", mode="before")
    @classmethod
    def _number(cls, priority: object) -> object:
        if isinstance(priority, bool):  # equal to 0 and 1 for Python, not for JSON
            raise PydanticCustomError("literal_error", "Input should be 0, 1, 2 or 3")
        return priority

    @field_validator("metadata")
    @classmethod
    def _small(cls, metadata: dict[str, str]) -> dict[str, str]:
        size = sum(len(name.encode()) + len(value.encode()) for name, value in metadata.items())
        if size > MAX_METADATA_BYTES:
            raise PydanticCustomError(
                "too_long", f"Metadata holds at most {MAX_METADATA_BYTES} bytes"
            )
        return metadata


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request that holds: validated, in its stored form, with its meaning for the fingerprint."""

    type: OperationType
    input: bytes
    metadata: Mapping[str, str]
    not_before: datetime | None
    deadline: datetime | None
    priority: int
    semantic_headers: Mapping[str, str]
    meaning: Mapping[str, object]


def read_request(
    type: OperationType, members: Mapping[str, object], headers: Mapping[str, str]
) -> ReadRequest | tuple[FieldError, ...]:
    """Validate a request under one version of its type: the request, or everything wrong with it.

    `headers` are the request's, lower case; only the type's semantic ones are looked at.
    """
    unstorable = tuple(_unstorable(members, ""))
    if unstorable:
        return unstorable[:MAX_FIELD_ERRORS]
    try:
        envelope = Envelope.model_validate_json(orjson.dumps(members))
    except ValidationError as error:
        return _field_errors(error, "")
    try:
        accepted = type.input.model_validate_json(orjson.dumps(envelope.input))
    except ValidationError as error:
        return _field_errors(error, "/input")
    semantic = {name: headers[name] for name in type.semantic_headers if name in headers}
    priority = type.policy.priority if envelope.priority is None else envelope.priority
    meaning: dict[str, object] = {
        "type": type.name,
        "input": accepted.model_dump(mode="json", exclude_defaults=True),
    }
    if envelope.metadata:
        meaning["metadata"] = envelope.metadata
    if envelope.not_before is not None:
        meaning["not_before"] = envelope.not_before.isoformat()
    if envelope.deadline is not None:
        meaning["deadline"] = envelope.deadline.isoformat()
    if priority != type.policy.priority:
        meaning["priority"] = priority
    if semantic:
        meaning["headers"] = semantic
    return ReadRequest(
        type=type,
        input=orjson.dumps(accepted.model_dump(mode="json", exclude_none=True)),
        metadata=envelope.metadata,
        not_before=envelope.not_before,
        deadline=envelope.deadline,
        priority=priority,
        semantic_headers=semantic,
        meaning=meaning,
    )


def _pointer(prefix: str, path: Sequence[object]) -> str:
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in path)
    return "".join((prefix, *(f"/{part}" for part in parts)))


def _shown(prefix: str, path: Sequence[object]) -> str:
    """The pointer to show: what is wrong with a member's name is shown at the member, and none is endless."""
    named = path[:-1] if path and path[-1] == "[key]" else path
    return bounded_text(_pointer(prefix, named), MAX_POINTER)


def unstorable_fields(members: Mapping[str, object]) -> tuple[FieldError, ...]:
    """Everything in a JSON object that no request may hold: text that cannot be stored, unsafe integers."""
    return tuple(_unstorable(members, ""))


def field_errors_of(error: ValidationError) -> tuple[FieldError, ...]:
    """What a pydantic model found wrong with a body, as field errors."""
    return _field_errors(error, "")


def _field_errors(error: ValidationError, prefix: str) -> tuple[FieldError, ...]:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return tuple(
        FieldError(_shown(prefix, item["loc"]), item["type"], item["msg"])
        for item in found[:MAX_FIELD_ERRORS]
    )


def _unstorable(value: object, pointer: str) -> list[FieldError]:
    """What no type may accept: NUL and lone surrogates in text, integers JSON readers disagree about."""
    if isinstance(value, str):
        return _bad_text(value, pointer)
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > MAX_SAFE_INTEGER:
            detail = (
                "Integers go from -(2^53 - 1) to 2^53 - 1; use minor units or a decimal string."
            )
            return [FieldError(pointer, "integer_out_of_range", detail)]
        return []
    found: list[FieldError] = []
    if isinstance(value, Mapping):
        for name, member in value.items():
            if _bad_text(name, pointer):
                detail = "A member's name may hold neither U+0000 nor lone surrogates."
                found.append(FieldError(pointer, "text_not_storable", detail))
                continue
            found += _unstorable(member, _pointer(pointer, (name,)))
    elif isinstance(value, list):
        for number, member in enumerate(value):
            found += _unstorable(member, _pointer(pointer, (number,)))
    return found


def _bad_text(text: str, pointer: str) -> list[FieldError]:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        detail = "Text may hold neither U+0000 nor lone surrogates."
        return [FieldError(pointer, "text_not_storable", detail)]
    return []
