"""Signals of `up`: counted, and waited for together with the ends of children."""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While it is open, requests to stop are counted instead of obeyed; `wait` returns early for each.

    Open it in the main thread. The handlers that were there before come back at the end.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._reader, self._writer = socket.socketpair()
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._count)
        # The wake-up needs a handler of Python's own; the end of a child is then seen by polling it.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _ignore)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float) -> None:
        """Until a signal has come (a child's end is one), or so many seconds are over."""
        ready, _, _ = select.select([self._reader], [], [], max(seconds, 0.0))
        if ready:
            self._reader.recv(1000)

    def _count(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked += 1


def _ignore(number: int, frame: FrameType | None) -> None:
    del number, frame


def interruptible() -> None:
    """Let SIGTERM and SIGHUP end what is under way as Ctrl-C does: by an exception that tidies up."""
    for number in STOPPING:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    # Once is enough: a second one must not interrupt the tidying up.
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
