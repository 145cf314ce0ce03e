"""The children of `up`: what each one is, starting it, and asking it to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from app.cli.up.folder import DataFolder

_TAIL_LINES = 15
_TAIL_BYTES = 20_000
_HEALTHY_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 30.0


class Stage(IntEnum):
    """When a child is stopped: whoever takes work in first, whoever others still need last."""

    SERVING = 0
    WORKING = 1
    PROVIDING = 2


@dataclass(frozen=True)
class Program:
    """One command of ours to run as a child."""

    name: str
    arguments: tuple[str, ...]
    stage: Stage


class Child:
    """One supervised process. Never restarted more often than once a second, and ever more slowly."""

    def __init__(
        self, program: Program, environ: Mapping[str, str], folder: DataFolder, lifeline: int
    ) -> None:
        self.program = program
        self.log: Path = folder.log(program.name)
        self.due_at: float | None = None
        self._environ = environ
        self._folder = folder
        self._lifeline = lifeline
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._failures = 0

    def start(self) -> None:
        """Start the process; its output is appended to the log."""
        presence = self._folder.presence()
        try:
            with self.log.open("ab") as output:
                self._process = subprocess.Popen(  # noqa: S603 - our own program, no shell
                    [
                        sys.executable,
                        "-m",
                        "app.cli.up.child",
                        str(self._lifeline),
                        *self.program.arguments,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(self._environ),
                    pass_fds=(self._lifeline, presence),
                    umask=0o077,
                    start_new_session=True,  # the terminal's Ctrl-C is the parent's to handle
                )
        finally:
            os.close(presence)
        self._started_at = time.monotonic()
        self.due_at = None

    def ended(self) -> int | None:
        """The exit status (negative: the signal) of a process that has ended, told once; else None."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._process = None
        return status

    def plan_restart(self) -> float:
        """Say when to start again; returns in how many seconds."""
        now = time.monotonic()
        if now - self._started_at >= _HEALTHY_SECONDS:
            self._failures = 0
        pause = min(2.0**self._failures, _LONGEST_PAUSE_SECONDS)
        self._failures += 1
        self.due_at = max(now, self._started_at + pause)
        return self.due_at - now

    @property
    def runs(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        return None if self._process is None else self._process.pid

    def ask_to_end(self) -> None:
        """SIGTERM: it drains and ends."""
        self.due_at = None
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: what it had begun is found again by whoever claims it next."""
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self.runs and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_words(self) -> str:
        """The end of the log."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return ""


def said(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
