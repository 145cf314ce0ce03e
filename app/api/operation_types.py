"""`GET /v1/operation-types`: what can be asked for, and every window of time (CONTRACT.md 11)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import JsonResponse
from app.api.authentication import READ, caller_of
from app.api.services import services_of
from app.domain.plan import OperationType
from app.domain.registry import Registry


async def get(request: Request) -> Response:
    """Every type in the version new operations are admitted under; `?type=` narrows it to one."""
    await caller_of(request, READ)
    wanted = request.query_params.get("type")
    types = [
        described(type)
        for type in current_types(services_of(request).registry)
        if wanted in (None, type.name)
    ]
    return JsonResponse({"data": types, "next": None}, headers={"Cache-Control": "private"})


def current_types(registry: Registry) -> list[OperationType]:
    """The highest version of each type, by name."""
    names = sorted({name for name, _ in registry.types})
    return [type for name in names if (type := registry.latest(name)) is not None]


def described(type: OperationType) -> dict[str, object]:
    """One type as JSON: schemas (JSON Schema 2020-12), steps, policy in seconds."""
    policy = type.policy
    return {
        "type": type.name,
        "version": type.version,
        "title": type.title,
        "input_schema": type.input.model_json_schema(mode="validation"),
        "result_schema": type.result.model_json_schema(mode="serialization"),
        "result_version": type.result_version,
        "steps": [
            {"name": step.name, "kind": "effect", "provider": step.provider} for step in type.steps
        ],
        "semantic_headers": list(type.semantic_headers),
        "policy": {
            "retry_horizon_seconds": policy.retry_horizon_seconds,
            "retention_seconds": policy.retention_seconds,
            "tombstone_seconds": policy.tombstone_seconds,
            "attention_after_seconds": policy.attention_after_seconds,
            "deadline_seconds": policy.deadline_seconds,
            "priority": policy.priority,
        },
    }
