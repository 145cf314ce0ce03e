"""What can be answered instead of what was asked: one table, which answers and `/problems/{slug}` share.

Every error of the service is raised as `Refusal` or known to `app.api.errors`, and rendered there as RFC 9457
`application/problem+json` with the members of CONTRACT.md 18.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from app.domain.request import FieldError
from app.service.admission import KeyBound


class Slug(StrEnum):
    """The stable codes: the last part of a problem's `type`, and its `code`."""

    UNAUTHENTICATED = "unauthenticated"
    INSUFFICIENT_SCOPE = "insufficient-scope"
    NOT_FOUND = "not-found"
    OPERATION_NOT_FOUND = "operation-not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    NOT_ACCEPTABLE = "not-acceptable"
    KEY_MISSING = "idempotency-key-missing"
    KEY_MALFORMED = "idempotency-key-malformed"
    KEY_REUSED = "idempotency-key-reused"
    KEY_EXPIRED = "idempotency-key-expired"
    MEDIA_TYPE = "unsupported-media-type"
    TOO_LARGE = "body-too-large"
    MALFORMED_JSON = "malformed-json"
    INVALID_QUERY = "invalid-query"
    INVALID_INPUT = "invalid-input"
    UNKNOWN_TYPE = "unknown-type"
    VERSION_UNKNOWN = "version-unknown"
    IF_MATCH_MISSING = "if-match-missing"
    VERSION_MISMATCH = "version-mismatch"
    OPERATION_DONE = "operation-done"
    NOT_IN_DOUBT = "not-in-doubt"
    IN_DOUBT = "in-doubt"
    NOT_STOPPED = "not-stopped"
    STEP_NOT_BEGUN = "step-not-begun"
    ATTEMPT_NOT_SETTLED = "attempt-not-settled"
    STORE_UNAVAILABLE = "store-unavailable"
    NOT_READY = "not-ready"
    BAD_REQUEST = "bad-request"
    INTERNAL_ERROR = "internal-error"


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One row: its usual status, whether the same request may work later, what happened, what to do."""

    status: int
    title: str
    retryable: bool
    meaning: str
    advice: str


PROBLEMS: Mapping[Slug, ProblemType] = {
    Slug.UNAUTHENTICATED: ProblemType(
        401,
        "No valid API key",
        False,
        "The request has no API key, more than one, or one that is malformed, unknown, expired or revoked. "
        "The answer is the same in all these cases.",
        "Send exactly one header `Authorization: Bearer <key>`. If the key is the right one, have a new one "
        "made.",
    ),
    Slug.INSUFFICIENT_SCOPE: ProblemType(
        403,
        "The API key may not do this",
        False,
        "The key is valid, but lacks the scope that this route needs.",
        "Use a key with the scope named in `detail`.",
    ),
    Slug.NOT_FOUND: ProblemType(
        404,
        "No such resource",
        False,
        "There is nothing at this path.",
        "Compare the path with `/openapi.json`. Paths have no slash at the end.",
    ),
    Slug.OPERATION_NOT_FOUND: ProblemType(
        404,
        "No such operation",
        False,
        "There is no operation of this id that the caller may know of.",
        "Use the id or the `Location` that the POST answered with, and a key of the same tenant.",
    ),
    Slug.METHOD_NOT_ALLOWED: ProblemType(
        405,
        "Method not allowed",
        False,
        "The path exists, but not with this method.",
        "Use one of the methods in the `Allow` header.",
    ),
    Slug.NOT_ACCEPTABLE: ProblemType(
        406,
        "Nothing acceptable to answer with",
        False,
        "The `Accept` header excludes everything this route can answer with. Nothing was done.",
        "Accept `application/json`, or leave the header out.",
    ),
    Slug.KEY_MISSING: ProblemType(
        400,
        "No Idempotency-Key",
        False,
        "The request needs an `Idempotency-Key` header. Nothing was written.",
        "Send a fresh key per intent, and the same key with every retry of it.",
    ),
    Slug.KEY_MALFORMED: ProblemType(
        400,
        "Malformed Idempotency-Key",
        False,
        "The header is not one key of 1 to 255 bytes of printable ASCII without spaces. Nothing was written.",
        "Send one header line with one key, bare or as a quoted string; a UUID is a good key.",
    ),
    Slug.KEY_REUSED: ProblemType(
        422,
        "The Idempotency-Key holds another request",
        False,
        "An earlier request with this key meant something else. Nothing was changed.",
        "Repeat the first request unchanged to get its operation, or use a fresh key for a new intent.",
    ),
    Slug.KEY_EXPIRED: ProblemType(
        410,
        "The Idempotency-Key has expired",
        False,
        "This very request was carried out earlier; its result is no longer kept. It is never carried out "
        "again.",
        "Look at `operation` for how it ended. For a new intent use a fresh key.",
    ),
    Slug.MEDIA_TYPE: ProblemType(
        415,
        "Unsupported media type or encoding",
        False,
        "The body is not `application/json` in UTF-8, or is encoded otherwise than with gzip. Nothing was "
        "written.",
        "Send `Content-Type: application/json`, and no `Content-Encoding` or gzip.",
    ),
    Slug.TOO_LARGE: ProblemType(
        413,
        "The body is too large",
        False,
        "The body, or what it unpacks to, is larger than the limit in `detail`. Nothing was written.",
        "Send less: references instead of contents.",
    ),
    Slug.MALFORMED_JSON: ProblemType(
        400,
        "The body is not JSON",
        False,
        "The body is not one JSON text with unique member names and finite numbers. Nothing was written.",
        "Correct the body; the key, where there was none before, is still free.",
    ),
    Slug.INVALID_QUERY: ProblemType(
        400,
        "Invalid query",
        False,
        "A query parameter does not hold, or is not known here.",
        "Correct the parameters listed in `errors`.",
    ),
    Slug.INVALID_INPUT: ProblemType(
        422,
        "The request does not hold",
        False,
        "The body is JSON, but not a valid request; `errors` has one entry per field. Nothing was written.",
        "Correct the fields; `key_bound` says whether the key is free for the corrected request.",
    ),
    Slug.UNKNOWN_TYPE: ProblemType(
        422,
        "No such operation type",
        False,
        "There is no operation type of this name here. Nothing was written.",
        "Use a type that `GET /v1/operation-types` lists.",
    ),
    Slug.VERSION_UNKNOWN: ProblemType(
        503,
        "Another release knows this operation",
        True,
        "The key was admitted by a newer release than the process that was asked, so it cannot compare.",
        "Try again after `Retry-After`: a deployment is under way. The operation goes on.",
    ),
    Slug.IF_MATCH_MISSING: ProblemType(
        428,
        "No If-Match",
        False,
        "An operator's act names the version it was decided on, so that it cannot hit a later stop.",
        "Read the operation, decide on what it shows, and send its `ETag` as `If-Match`.",
    ),
    Slug.VERSION_MISMATCH: ProblemType(
        412,
        "The operation has changed",
        False,
        "The operation is not at the version that `If-Match` names. Nothing was changed.",
        "Read it again and decide anew.",
    ),
    Slug.OPERATION_DONE: ProblemType(
        409,
        "The operation is done",
        False,
        "A terminal answer never changes. Nothing was changed.",
        "Evidence against a finished operation is shown beside its answer; make amends in a new one.",
    ),
    Slug.NOT_IN_DOUBT: ProblemType(
        409,
        "Nothing to resolve",
        False,
        "The operation is in a state in which nothing waits for a verdict. Nothing was changed.",
        "Read it again: it may have been settled meanwhile.",
    ),
    Slug.IN_DOUBT: ProblemType(
        409,
        "A step is in doubt",
        False,
        "An effect may or may not exist, so going on could make it twice. Nothing was changed.",
        "Find out at the provider and `resolve` the step with the evidence.",
    ),
    Slug.NOT_STOPPED: ProblemType(
        409,
        "The operation goes on by itself",
        False,
        "Only an operation that needs attention can be let go on. Nothing was changed.",
        "Wait for it, or cancel it.",
    ),
    Slug.STEP_NOT_BEGUN: ProblemType(
        409,
        "Nothing was sent for this step",
        False,
        "The step or item has no attempt, or the type has no such step. Nothing was changed.",
        "Name a step that `steps` shows with attempts.",
    ),
    Slug.ATTEMPT_NOT_SETTLED: ProblemType(
        409,
        "A send may still arrive",
        True,
        "What was sent can still arrive at the provider, so its absence cannot be known yet.",
        "Look again after `Retry-After`, then repeat the verdict. `applied` is allowed at any time.",
    ),
    Slug.STORE_UNAVAILABLE: ProblemType(
        503,
        "The database is out of reach",
        True,
        "The database is down or too slow. `key_bound` says whether this request may have been admitted.",
        "Send the same request with the same key again after `Retry-After`; that is safe, whatever became of "
        "it. This says nothing about how an operation goes.",
    ),
    Slug.NOT_READY: ProblemType(
        503,
        "This process cannot serve",
        True,
        "The schema or the stamp of the database is not what this process needs, or the process is stopping.",
        "Send traffic elsewhere; `fencepost doctor` says what is wrong.",
    ),
    Slug.BAD_REQUEST: ProblemType(
        400,
        "The request cannot be understood",
        False,
        "The request breaks HTTP in a way that has no problem type of its own.",
        "Correct the request.",
    ),
    Slug.INTERNAL_ERROR: ProblemType(
        500,
        "Something went wrong here",
        True,
        "An error nobody expected. It says nothing about an operation; a POST may have been admitted or not.",
        "Send the same request with the same key again. If it stays, report `request_id`: the log has it.",
    ),
}


@dataclass(eq=False)
class Refusal(Exception):
    """Ends a request with a problem. `operation` is what may be shown of the operation it is about.

    `errors`: one entry per field. `status` overrides the table where the framework chose one.
    """

    slug: Slug
    detail: str
    key_bound: KeyBound = False
    operation: Mapping[str, object] | None = None
    errors: Sequence[Mapping[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int | None = None


def field_errors(errors: Sequence[FieldError]) -> list[dict[str, str]]:
    """Field errors as they stand in a problem: `pointer`, `code`, `detail`."""
    return [
        {"pointer": error.pointer, "code": error.code, "detail": error.detail} for error in errors
    ]
