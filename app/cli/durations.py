"""Durations on the command line: a number and a unit, such as `90d`."""

from __future__ import annotations

import re

_UNITS_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])")


def parse_duration(text: str) -> float:
    """Seconds: `45s`, `30m`, `12h`, `90d`, with fractions where wanted.

    Raises:
        ValueError: anything else, and 0; says what is understood.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _UNITS_SECONDS[found[2]] if found else 0.0
    if not seconds > 0:
        raise ValueError(
            f"{text!r} is not a duration: a number above 0 and s, m, h or d, such as 90d"
        )
    return seconds
