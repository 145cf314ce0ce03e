"""The OpenAPI document, from the table of routes and the loaded operation types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.api import schemas
from app.api.answers import JSON, PROBLEM_JSON, JsonResponse
from app.api.operation_types import current_types
from app.api.operators import ResolveBody, RetryBody
from app.api.problems import PROBLEMS
from app.domain.registry import Registry


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: `where` is path, query or header."""

    name: str
    where: str
    meaning: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """One good answer. `schema` names a component; without one and without media types there is no body."""

    status: int
    meaning: str
    schema: str | None = None
    media_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Described:
    """What is said of one route. `problems`: the statuses of problems it may answer with, beside 500."""

    method: str
    path: str
    meaning: str
    answers: tuple[Answer, ...]
    problems: tuple[int, ...] = ()
    scope: str | None = None
    parameters: tuple[Parameter, ...] = ()
    body: str | None = None


def document(routes: Sequence[Described], registry: Registry, server: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document; `server` is the prefix of all paths, or empty."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fencepost",
            "version": "1",
            "description": "Durable operations for long external effects: each done once, or openly in "
            "doubt. Errors are `application/problem+json`; their `type` says what to do.",
        },
        "servers": [{"url": server or "/"}],
        "paths": paths,
        "components": {
            "schemas": _components(registry),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _components(registry: Registry) -> dict[str, Any]:
    requests = [schemas.request_for(type) for type in current_types(registry)]
    reason = {"type": ["string", "null"], "maxLength": 1000}
    return {
        "operation": schemas.operation(),
        "operations": schemas.page({"$ref": "#/components/schemas/operation"}),
        "operation_request": {"oneOf": requests},
        "operation_types": schemas.page(schemas.operation_type()),
        "cancel_request": {
            "type": "object",
            "properties": {"reason": reason},
            "additionalProperties": False,
        },
        "resolve_request": ResolveBody.model_json_schema(by_alias=True),
        "retry_request": RetryBody.model_json_schema(),
        "problem": schemas.problem(),
        "status": schemas.status(),
    }


def _operation(route: Described) -> dict[str, Any]:
    responses = {str(answer.status): _answer(answer) for answer in route.answers}
    for status in (*route.problems, 500):
        responses[str(status)] = _problem(status)
    described: dict[str, Any] = {
        "operationId": _name(route),
        "description": route.meaning,
        "responses": responses,
    }
    if route.parameters:
        described["parameters"] = [_parameter(parameter) for parameter in route.parameters]
    if route.body is not None:
        described["requestBody"] = {
            "required": route.body == "operation_request",
            "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{route.body}"}}},
        }
    if route.scope is not None:
        described["security"] = [{"key": []}]
        described["description"] += f" Needs the scope `{route.scope}`."
    return described


def _name(route: Described) -> str:
    words = [word for word in route.path.split("/") if word and not word.startswith("{")]
    by_id = "_one" if route.path.endswith("}") else ""
    return "_".join([route.method.lower(), *words]).replace("-", "_").replace(".", "_") + by_id


def _answer(answer: Answer) -> dict[str, Any]:
    described: dict[str, Any] = {"description": answer.meaning}
    if answer.schema is not None:
        schema = {"$ref": f"#/components/schemas/{answer.schema}"}
        described["content"] = {JSON: {"schema": schema}}
    elif answer.media_types:
        described["content"] = {media_type: {} for media_type in answer.media_types}
    return described


def _problem(status: int) -> dict[str, Any]:
    slugs = [f"`{slug}`" for slug, kind in PROBLEMS.items() if kind.status == status]
    return {
        "description": f"{HTTPStatus(status).phrase}: {', '.join(slugs)}",
        "content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/problem"}}},
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "description": parameter.meaning,
        "required": parameter.required,
        "schema": {"type": "string"},
    }


async def get(request: Request) -> Response:
    """The OpenAPI document."""
    return JsonResponse(request.app.openapi())
