"""Being asked to stop before, or beside, whoever handles it properly."""

from __future__ import annotations

import signal
from types import FrameType


def stop_is_no_failure() -> None:
    """Let SIGTERM and SIGINT end this process with status 0, until somebody handles them to drain.

    A service spends its first moments on imports and on waiting for the database; nothing is begun then.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise SystemExit(0)
