"""The process's own clock: only ever used to make its owner give up earlier (DESIGN.md I9)."""

from __future__ import annotations

import time

_SOURCE = getattr(time, "CLOCK_BOOTTIME", None)


def elapsed() -> float:
    """Seconds since some moment, never backwards.

    On Linux it counts on while the machine is suspended: a lease goes on ending during a suspend, so a
    clock that stood still would trust it for too long.
    """
    return time.monotonic() if _SOURCE is None else time.clock_gettime(_SOURCE)
