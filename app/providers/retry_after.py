"""The one parser of `Retry-After` (RFC 9110, 10.2.3; CASES.md K20). Pure; never raises.

| given | read as |
|---|---|
| `120`, with blanks, `1.5` | seconds |
| an HTTP-date in any of its three forms | seconds after the answer's `Date`, else our clock; never below 0 |
| several lines, or numbers joined by commas | the longest of those understood: nobody is pressed |
| garbage, negative, infinite, empty | not given (None) |
| anything huge | a day |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from app.domain.policy import DAY_SECONDS

_MAX_LINE = 200
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIME = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_DATES = (
    re.compile(rf"[A-Za-z]{{3}}, (?P<day>[0-9]{{2}}) (?P<month>\w{{3}}) (?P<year>[0-9]{{4}}) {_TIME} GMT"),
    re.compile(
        rf"[A-Za-z]{{6,9}}, (?P<day>[0-9]{{2}})-(?P<month>\w{{3}})-(?P<year>[0-9]{{2}}) {_TIME} GMT"
    ),
    re.compile(
        rf"[A-Za-z]{{3}} (?P<month>\w{{3}}) (?P<day>[ 0-9][0-9]) {_TIME} (?P<year>[0-9]{{4}})"
    ),
)  # fmt: skip
"""IMF-fixdate, RFC 850 and asctime. Not `strptime`, whose names of months follow the process' locale."""


def retry_after_seconds(lines: Sequence[str], *, date: str | None, now: datetime) -> float | None:
    """Seconds to wait, 0 to a day, from an answer's `Retry-After` lines; None where they say nothing.

    `date` is the answer's `Date` line: a date in `Retry-After` is measured against the clock that wrote it.
    `now` is our wall clock (aware), for answers without a readable `Date`.
    """
    found: list[float] = []
    for line in lines:
        text = line[:_MAX_LINE].strip()
        moment = parse_http_date(text, now)
        if moment is not None:
            sent = None if date is None else parse_http_date(date[:_MAX_LINE].strip(), now)
            found.append((moment - (sent or now)).total_seconds())
            continue
        found.extend(
            seconds for part in text.split(",") if (seconds := _number(part.strip())) is not None
        )
    return min(max(*found, 0.0), DAY_SECONDS) if found else None


def parse_http_date(text: str, now: datetime) -> datetime | None:
    """The instant an HTTP-date names (aware, UTC), or None. `now` places years of two digits."""
    for form in _DATES:
        match = form.fullmatch(text)
        if match is not None and match["month"] in _MONTHS:
            break
    else:
        return None
    year = int(match["year"])
    if len(match["year"]) == 2:
        # RFC 9110, 5.6.7: what would lie more than 50 years ahead is the past with the same digits.
        year += now.year - now.year % 100
        if year > now.year + 50:
            year -= 100
    try:
        return datetime(
            year,
            _MONTHS.index(match["month"]) + 1,
            int(match["day"]),
            int(match["hour"]),
            int(match["minute"]),
            tzinfo=UTC,
        ) + timedelta(seconds=min(int(match["second"]), 60))  # 60: a leap second
    except (ValueError, OverflowError):
        return None


def _number(text: str) -> float | None:
    # The line's bound keeps even a number of nothing but digits within what a float holds.
    return float(text) if _SECONDS.fullmatch(text) else None
