"""The parent of `up`: starts children, starts again what crashes, stops everything in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from app.cli.failing import Refused
from app.cli.output import note
from app.cli.up.processes import Child, Stage, said
from app.cli.up.signals import Signals
from app.cli.up.store import Store

_READY_SECONDS = 90.0
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 27.0
_ENOUGH = 2  # requests to stop: the second one means now
_PATIENCE = {Stage.SERVING: 5.0, Stage.WORKING: _STOP_SECONDS, Stage.PROVIDING: 3.0}


class Supervisor:
    """Children in the order they are started, and the database under them."""

    def __init__(self, children: Sequence[Child], store: Store, signals: Signals) -> None:
        self._children = children
        self._store = store
        self._signals = signals

    def start(self, ready: Sequence[Callable[[], bool]]) -> None:
        """Start every child and return once each of `ready` holds.

        Raises:
            Refused: a child ended, or it takes too long; its last words are told.
            KeyboardInterrupt: asked to stop meanwhile.
        """
        for child in self._children:
            child.start()
        waiting = list(ready)
        gives_up_at = time.monotonic() + _READY_SECONDS
        while True:
            waiting = [each for each in waiting if not each()]
            if self._signals.asked:
                raise KeyboardInterrupt
            for child in self._children:
                if (status := child.ended()) is not None:
                    note(child.last_words())
                    raise Refused(f"The {child.program.name} {said(status)}; see {child.log}.")
            if not waiting:
                return
            if time.monotonic() > gives_up_at:
                raise Refused(f"Not ready within {_READY_SECONDS:.0f} s: see the logs.")
            self._signals.wait(_POLL_SECONDS)

    def watch(self) -> None:
        """Until asked to stop: start again what ends, after a pause that grows.

        Raises:
            EmbeddedPostgresError: the database ended and does not start again.
        """
        while not self._signals.asked:
            self._signals.wait(self._next_look())
            if self._signals.asked:
                return
            if not self._store.runs:
                note("PostgreSQL has ended unexpectedly; starting it again.")
                self._store.restart()
            for child in self._children:
                self._look_at(child)

    def _next_look(self) -> float:
        now = time.monotonic()
        due = [each.due_at - now for each in self._children if each.due_at is not None]
        return min([_LOOK_SECONDS, *due])

    def _look_at(self, child: Child) -> None:
        status = child.ended()
        if status is not None:
            words = child.last_words()
            pause = child.plan_restart()
            note(
                f"The {child.program.name} {said(status)} unexpectedly; "
                f"starting it again in {pause:.1f} s. The end of {child.log}:\n{words}"
            )
        if child.due_at is not None and time.monotonic() >= child.due_at:
            child.start()

    def stop(self) -> None:
        """Stop stage by stage, then the database; a second request to stop kills what still runs."""
        ends_at = time.monotonic() + _STOP_SECONDS
        for stage in Stage:
            for child in self._children:
                if child.program.stage is stage:
                    child.ask_to_end()
            ended = self._ended_by(stage, min(ends_at, time.monotonic() + _PATIENCE[stage]))
            if self._signals.asked >= _ENOUGH:
                break
            # A slow API does not hold up the drain of the workers: they end side by side.
            if not ended and stage is not Stage.SERVING:
                self._kill(stage)
            ends_at = max(ends_at, time.monotonic() + _PATIENCE[Stage.PROVIDING])
        self._kill(Stage.PROVIDING)
        self._store.stop()

    def _ended_by(self, stage: Stage, limit: float) -> bool:
        """Whether all children up to `stage` have ended before `limit`, on time's clock."""
        while any(child.runs for child in self._children if child.program.stage <= stage):
            if time.monotonic() > limit or self._signals.asked >= _ENOUGH:
                return False
            self._signals.wait(_POLL_SECONDS)
        return True

    def _kill(self, stage: Stage) -> None:
        for child in self._children:
            if child.runs and child.program.stage <= stage:
                note(f"The {child.program.name} (process {child.pid}) is killed.")
                child.kill()
