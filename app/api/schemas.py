"""JSON Schemas (2020-12) of what goes over the wire, for `/openapi.json`; tests hold answers against them."""

from __future__ import annotations

from typing import Any

from app.api.problems import Slug
from app.domain.lifecycle import State
from app.domain.plan import OperationType
from app.domain.policy import PRIORITIES
from app.domain.progress import StepState
from app.domain.request import MAX_METADATA_PAIRS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INSTANT: Schema = {"type": "string", "format": "date-time"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _object(required: Schema, optional: Schema | None = None, *, closed: bool = False) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }
    if closed:
        schema["additionalProperties"] = False
    return schema


def operation() -> Schema:
    """An operation, done or not; result and error are never both there."""
    step = _object(
        {
            "name": _TEXT,
            "state": {
                "type": "string",
                "examples": list(StepState),
                "description": "One not listed means: not done",
            },
            "attempts": _COUNT,
            "provider": _MAYBE_TEXT,
            "reference": _MAYBE_TEXT,
        }
    )
    required = {
        "id": {"type": "string", "pattern": "^op_[0-9a-f-]{36}$"},
        "type": _TEXT,
        "type_version": {"type": "integer", "minimum": 1},
        "state": {
            "type": "string",
            "examples": list(State),
            "description": "One not listed means: not done. Look at `done`.",
        },
        "done": {"type": "boolean"},
        "created_at": _INSTANT,
        "updated_at": _INSTANT,
        "completed_at": {"type": ["string", "null"], "format": "date-time"},
        "steps": {"type": "array", "items": step},
        "progress": {
            "oneOf": [
                _object({"done": _COUNT, "total": {"type": ["integer", "null"]}}),
                {"type": "null"},
            ]
        },
        "cancel_requested": {"type": "boolean"},
        "metadata": {"type": "object", "additionalProperties": _TEXT},
        "idempotency_expires_at": {
            **_INSTANT,
            "description": "A lower bound until the operation is done",
        },
        "links": _object({"self": _TEXT, "cancel": _TEXT, "type": _TEXT}),
    }
    optional = {
        "result": {"type": "object", "description": "Once succeeded"},
        "error": error(),
        "attention": {**_TEXT, "description": "Why a human is needed (needs_attention)"},
        "purged": {"const": True, "description": "A tombstone: what it held is gone"},
    }
    return {**_object(required, optional), "not": {"required": ["result", "error"]}}


def error() -> Schema:
    """The error of an operation that failed or was cancelled (CONTRACT.md 19)."""
    return _object(
        {"code": _TEXT, "detail": _TEXT, "retryable": {"type": "boolean"}},
        {"step": _TEXT, "provider": _TEXT, "provider_code": _MAYBE_TEXT},
    )


def problem() -> Schema:
    """RFC 9457 with the members of CONTRACT.md 18."""
    reference = _object(
        {"id": _TEXT, "href": _TEXT},
        {"state": _TEXT, "done": {"type": "boolean"}, "completed_at": _INSTANT},
    )
    field = _object(
        {"code": _TEXT, "detail": _TEXT},
        {
            "pointer": {**_TEXT, "description": "A JSON Pointer into the body"},
            "parameter": {**_TEXT, "description": "A query parameter"},
        },
    )
    return _object(
        {
            "type": {"type": "string", "format": "uri-reference"},
            "title": _TEXT,
            "status": {"type": "integer"},
            "detail": _TEXT,
            "instance": {"type": "string", "format": "uri-reference"},
            "code": {"type": "string", "enum": list(Slug)},
            "retryable": {"type": "boolean"},
            "key_bound": {"enum": [True, False, "unknown"]},
        },
        {
            "operation": reference,
            "errors": {"type": "array", "items": field},
            "request_id": _TEXT,
        },
    )


def page(items: Schema) -> Schema:
    """A list: its items, and where it goes on."""
    return _object({"data": {"type": "array", "items": items}, "next": _MAYBE_TEXT})


def request_for(type: OperationType) -> Schema:
    """The body of the POST for one type; unknown members are refused."""
    return _object(
        {
            "type": {"const": type.name},
            "input": type.input.model_json_schema(mode="validation"),
        },
        {
            "metadata": {
                "type": "object",
                "maxProperties": MAX_METADATA_PAIRS,
                "additionalProperties": _TEXT,
            },
            "not_before": {"type": ["string", "null"], "format": "date-time"},
            "deadline": {"type": ["string", "null"], "format": "date-time"},
            "priority": {"enum": [*PRIORITIES, None], "description": "0 is first"},
        },
        closed=True,
    )


def operation_type() -> Schema:
    """One item of `/v1/operation-types`."""
    seconds: Schema = {"type": ["number", "null"]}
    policy = dict.fromkeys(
        (
            "retry_horizon_seconds",
            "retention_seconds",
            "tombstone_seconds",
            "attention_after_seconds",
            "deadline_seconds",
        ),
        seconds,
    )
    step = _object({"name": _TEXT, "kind": _TEXT, "provider": _TEXT})
    return _object(
        {
            "type": _TEXT,
            "version": {"type": "integer"},
            "title": _TEXT,
            "input_schema": {"type": "object"},
            "result_schema": {"type": "object"},
            "result_version": {"type": "integer"},
            "steps": {"type": "array", "items": step},
            "semantic_headers": {"type": "array", "items": _TEXT},
            "policy": _object({**policy, "priority": {"enum": list(PRIORITIES)}}),
        }
    )


def status() -> Schema:
    """The body of a health check; readiness also shows each provider's circuit."""
    circuits = {"type": "object", "additionalProperties": {"enum": ["closed", "half_open", "open"]}}
    return _object({"status": _TEXT}, {"circuits": circuits})
