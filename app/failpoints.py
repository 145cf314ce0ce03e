"""The crash windows, by name. They cost one comparison unless armed; production refuses to arm them.

`FENCEPOST_FAILPOINTS="after_begin=kill,before_record=gate:/some/folder"` arms two. Actions: `kill` (SIGKILL
this process), `stop` (SIGSTOP it), `gate:FOLDER` (make FOLDER/NAME.reached, go on once FOLDER/NAME.go
exists). `@N` behind an action waits for the N-th passage: `after_claim=kill@3`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from app.domain.errors import ConfigurationError


class Failpoint(StrEnum):
    """Each is passed at exactly one place in service or workers and named by at least one crash test."""

    BEFORE_ADMIT_COMMIT = "before_admit_commit"
    """The admission's rows are written and not committed."""
    AFTER_ADMIT_COMMIT = "after_admit_commit"
    """The operation stands; nobody was told."""
    BEFORE_ADMIT_ANSWER = "before_admit_answer"
    """The answer is being made."""
    AFTER_CLAIM = "after_claim"
    """The lease is committed; nothing was done under it."""
    BEFORE_BEGIN_COMMIT = "before_begin_commit"
    """The attempt's row is written and not committed."""
    AFTER_BEGIN = "after_begin"
    """The attempt's row stands; no byte has left."""
    AFTER_EFFECT = "after_effect"
    """The provider has answered; the answer is recorded nowhere."""
    BEFORE_RECORD_COMMIT = "before_record_commit"
    """Outcome, and the end where there is one, are written and not committed."""
    AFTER_RECORD = "after_record"
    """Outcome and end stand; the process has not gone on."""
    AFTER_LOOKUP = "after_lookup"
    """A look-up was answered; the finding is recorded nowhere."""


@dataclass
class _Armed:
    action: str
    passages_left: int


class Failpoints:
    """What is armed in this process. The default, nothing, is what production runs with."""

    def __init__(self, armed: Mapping[Failpoint, tuple[str, int]] | None = None) -> None:
        self._armed = {point: _Armed(action, nth) for point, (action, nth) in (armed or {}).items()}

    @classmethod
    def parse(cls, text: str) -> Failpoints:
        """From the setting.

        Raises:
            ConfigurationError: a name or an action that does not exist; names it.
        """
        armed: dict[Failpoint, tuple[str, int]] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, action = part.partition("=")
            action, _, nth = action.partition("@")
            if name not in set(Failpoint):
                raise ConfigurationError(f"FENCEPOST_FAILPOINTS: there is no failpoint {name}.")
            if action not in ("kill", "stop") and not action.startswith("gate:"):
                raise ConfigurationError(f"FENCEPOST_FAILPOINTS: there is no action {action}.")
            if nth and not nth.isdigit():
                raise ConfigurationError("FENCEPOST_FAILPOINTS: behind @ comes a number.")
            armed[Failpoint(name)] = (action, int(nth or 1))
        return cls(armed)

    async def hit(self, point: Failpoint) -> None:
        """Pass a crash window: nothing happens unless it is armed."""
        if not self._armed:
            return
        armed = self._armed.get(point)
        if armed is None:
            return
        armed.passages_left -= 1
        if armed.passages_left != 0:
            return
        if armed.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif armed.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            await _gate(Path(armed.action.removeprefix("gate:")), point)


async def _gate(folder: Path, point: Failpoint) -> None:
    (folder / f"{point}.reached").touch()
    while not (folder / f"{point}.go").exists():  # noqa: ASYNC110 - another process opens the gate
        await asyncio.sleep(0.01)
