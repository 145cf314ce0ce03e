"""Answers as bytes: orjson, times in RFC 3339 with Z."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import orjson
from starlette.responses import Response

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"


class JsonResponse(Response):
    """A JSON body. `orjson.Fragment` members go out as the bytes that are stored."""

    def __init__(
        self,
        content: object,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str = JSON,
    ) -> None:
        super().__init__(orjson.dumps(content), status_code, headers, media_type)


def rfc_3339(instant: datetime | None) -> str | None:
    """An instant in UTC with Z and the clock's full precision."""
    if instant is None:
        return None
    return instant.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
