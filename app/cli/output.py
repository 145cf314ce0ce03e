"""What commands print: JSON for scripts, aligned lines for people. Nothing else writes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any, cast
from uuid import UUID

import orjson


def line(text: str = "") -> None:
    """One line for a person."""
    sys.stdout.write(f"{text}\n")


def note(text: str) -> None:
    """One line about progress: on stderr, so that stdout stays what was asked for."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def json(value: object) -> None:
    """One JSON text, indented; see `plain` for what it may be made of."""
    text = orjson.dumps(plain(value), option=orjson.OPT_INDENT_2).decode()
    sys.stdout.write(f"{text}\n")


def plain(value: object) -> Any:
    """`value` in JSON's own types. Times become RFC 3339 in UTC, sets become sorted lists."""
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(member) for name, member in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(member) for member in value)
    if isinstance(value, range):
        return [value.start, value.stop - 1]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(member) for member in value]
    if is_dataclass(value):
        return {part.name: plain(getattr(value, part.name)) for part in fields(value)}
    return value


def moment(at: datetime | None) -> str | None:
    """RFC 3339, UTC, as the API writes it."""
    return None if at is None else at.isoformat().replace("+00:00", "Z")


def columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns under their names, never cut or wrapped: lines stay lines for grep and awk."""
    cells = [[cell.upper() for cell in head], *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(row[number]) for row in cells) for number in range(len(head))]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line("  ".join(padded).rstrip())


def pairs(rows: Sequence[tuple[str, object]], indent: str = "") -> None:
    """`name  value` lines, aligned."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        line(f"{indent}{name.ljust(width)}  {_cell(value)}".rstrip())


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return cast(str, moment(value))
    if isinstance(value, Enum):
        value = value.value
    return printable(str(value))


def printable(text: str) -> str:
    """Text from outside as a terminal may see it: control characters could move its cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)


def span(seconds: float | None) -> str:
    """A duration for a person: `45 s`, `10 min`, `24 h`, `400 d`."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and seconds % length == 0):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
