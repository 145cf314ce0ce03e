"""Words of request headers, read from the raw lines of the ASGI scope: several lines stay several.

Sources: RFC 9110 (Accept, conditional requests, dates), RFC 7240 (Prefer), RFC 6750 (Bearer).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime

from starlette.types import Scope

MAX_DIGITS = 9


def lines_of(scope: Scope, name: bytes) -> list[bytes]:
    """The values of all lines of the header `name` (lower case), in order, as they came."""
    return [value for key, value in scope["headers"] if key == name]


def joined(scope: Scope, name: bytes) -> str | None:
    """All lines of a list-valued header as one, None where there is none (RFC 9110, 5.3)."""
    lines = lines_of(scope, name)
    return ", ".join(line.decode("latin-1") for line in lines) if lines else None


def semantic_headers(scope: Scope) -> Mapping[str, str]:
    """Every header by its lower-case name, lines joined; a type picks those that are part of its meaning."""
    names = dict.fromkeys(name for name, _ in scope["headers"])
    return {name.decode("latin-1"): joined(scope, name) or "" for name in names}


def http_date(instant: datetime) -> str:
    """An HTTP date, whole seconds, rounded down (RFC 9110, 5.6.7)."""
    return format_datetime(instant.astimezone(UTC), usegmt=True)


@dataclass(frozen=True, slots=True)
class Preferences:
    """What of `Prefer` is understood here; `wait_seconds` None: not asked for."""

    respond_async: bool = False
    wait_seconds: int | None = None


_PREFERENCE = re.compile(
    r'([!#$%&\'*+.^_`|~0-9A-Za-z-]+)(?:\s*=\s*("[^"]*"|[^\s;,"]*))?\s*(?:;.*)?'
)


def preferences(scope: Scope) -> Preferences:
    """`Prefer: respond-async, wait=N`; whatever is malformed or unknown is ignored (RFC 7240, 2).

    The first of several counts. N is whole seconds; bounding it is the caller's business.
    """
    respond_async, wait_seconds, seen_wait = False, None, False
    for part in (joined(scope, b"prefer") or "").split(","):
        match = _PREFERENCE.fullmatch(part.strip())
        if match is None:
            continue
        name, value = match[1].lower(), (match[2] or "").strip('"')
        if name == "respond-async":
            respond_async = True
        elif name == "wait" and not seen_wait:
            seen_wait = True
            if value.isascii() and value.isdigit():
                wait_seconds = (
                    int(value[-MAX_DIGITS:]) if len(value) <= MAX_DIGITS else 10**MAX_DIGITS
                )
    return Preferences(respond_async, wait_seconds)


def matches_etag(scope: Scope, etag: str) -> bool | None:
    """Whether `If-None-Match` names `etag` (weak comparison, RFC 9110, 13.1.2); None where it is not sent."""
    given = joined(scope, b"if-none-match")
    if given is None:
        return None
    if given.strip() == "*":
        return True
    return etag in (part.strip().removeprefix("W/") for part in given.split(","))


def accepts(scope: Scope, *offered: str) -> str | None:
    """The best of `offered` media types for `Accept`, None where all are excluded (RFC 9110, 12.5.1).

    An unreadable range counts as absent; no header, or none that can be read, accepts everything.
    """
    given = joined(scope, b"accept")
    ranges = (
        [] if given is None else [found for part in given.split(",") if (found := _range(part))]
    )
    if not ranges:
        return offered[0]
    best, best_quality = None, 0.0
    for media_type in offered:
        quality = _quality(media_type, ranges)
        if quality > best_quality:
            best, best_quality = media_type, quality
    return best


_RANGE = re.compile(r"([\w!#$&^.+*-]+/[\w!#$&^.+*-]+)((?:\s*;[^;]*)*)")
_WEIGHT = re.compile(r";\s*q\s*=\s*([01](?:\.\d{0,3})?)\s*(?:;|$)", re.IGNORECASE)


def _range(part: str) -> tuple[str, float] | None:
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        return None
    weight = _WEIGHT.search(match[2])
    return match[1].lower(), min(float(weight[1]), 1.0) if weight else 1.0


def _quality(media_type: str, ranges: list[tuple[str, float]]) -> float:
    """The weight of the most specific range that fits, 0 where none does."""
    for wanted in (media_type, f"{media_type.partition('/')[0]}/*", "*/*"):
        fitting = [quality for name, quality in ranges if name == wanted]
        if fitting:
            return max(fitting)
    return 0.0
