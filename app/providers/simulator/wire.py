"""Requests and answers of the simulator, free of sockets and of HTTP parsing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import unquote_to_bytes

import orjson

CutStyle = Literal["fin", "rst"]
"""How a connection is cut: an orderly end of stream, or a reset."""


@dataclass(frozen=True, slots=True)
class Request:
    """One complete request.

    `path` is as sent (percent-encoded, without the query); header names are lower-case;
    `connection` is the number of the connection in `GET /_control/connections`.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    connection: int

    def header_lines(self, name: bytes) -> list[bytes]:
        """Every value sent under the lower-case `name`, in order."""
        return [value for given, value in self.headers if given == name]


@dataclass(frozen=True, slots=True)
class Answer:
    """One response: status, body bytes, and headers beside those the connection itself adds."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()

    def with_header(self, name: str, value: str) -> Answer:
        """The same answer with one more header line."""
        return Answer(self.status, self.body, (*self.headers, (name, value)))


@dataclass(frozen=True, slots=True)
class Cut:
    """End the connection instead of answering.

    With `answer`, its head (announcing the full length) and the first half of its body leave
    before the cut.
    """

    style: CutStyle
    answer: Answer | None = None


Reply = Answer | Cut


class Refusal(Exception):
    """A request that is answered with an error before anything was executed or stored."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


JSON_TYPE = ("Content-Type", "application/json")


def json_answer(status: int, value: Any, *headers: tuple[str, str]) -> Answer:
    """An answer with a JSON body."""
    return Answer(status, orjson.dumps(value), (JSON_TYPE, *headers))


def error_answer(
    status: int,
    kind: str,
    code: str,
    message: str,
    *headers: tuple[str, str],
    param: str | None = None,
    **more: str,
) -> Answer:
    """A Stripe-like error: `{"error": {"type", "code", "message", "param"?}}`.

    `kind` becomes `type`; `more` are further members (`decline_code`).
    """
    error = {"type": kind, "code": code, "message": message, **more}
    if param is not None:
        error["param"] = param
    return json_answer(status, {"error": error}, *headers)


def invalid(code: str, message: str, *, param: str | None = None, status: int = 400) -> Refusal:
    """A refusal of type `invalid_request_error`."""
    return Refusal(error_answer(status, "invalid_request_error", code, message, param=param))


def read_query(query: bytes, allowed: tuple[str, ...]) -> dict[str, bytes]:
    """The query's parameters as the bytes they stand for (a value need not be UTF-8).

    Raises `Refusal` (400) for a parameter that is not in `allowed` or is given twice.
    """
    found: dict[str, bytes] = {}
    for part in query.split(b"&"):
        if not part:
            continue
        raw_name, _, raw_value = part.partition(b"=")
        name = unquote_to_bytes(raw_name).decode("utf-8", "replace")
        if name not in allowed:
            raise invalid("parameter_unknown", f"The query may hold: {', '.join(allowed)}.")
        if name in found:
            raise invalid("parameter_repeated", f"{name} may be given once.", param=name)
        found[name] = unquote_to_bytes(raw_value.replace(b"+", b" "))
    return found


def rfc3339(at: float) -> str:
    """Seconds since the epoch as an RFC 3339 instant in UTC, with microseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")[:-6] + "Z"
