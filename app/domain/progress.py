"""How far an operation's plan is, step by step: what a reader sees, derived and never written.

The one place where attempts become a step's state on the wire (CONTRACT.md, 'An operation on the wire'). It
shows and decides nothing: what happens next is `course.next_move`, from all rows and not from this summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from app.domain.identity import Direction
from app.domain.lifecycle import LIVE, State
from app.domain.operation import AttemptSummary, OperationView
from app.domain.outcome import OutcomeKind
from app.domain.plan import OperationType

_IN_DOUBT = (State.UNCERTAIN, State.NEEDS_ATTENTION)


class StepState(StrEnum):
    """Where one step stands. A client treats one it does not know as not done."""

    PENDING = "pending"
    """Nothing was begun."""
    RUNNING = "running"
    """Being sent, or to be sent again: what was sent so far is known to have had no effect."""
    UNCERTAIN = "uncertain"
    """Something was sent, and nobody knows yet what came of it."""
    SUCCEEDED = "succeeded"
    """The effect exists."""
    FAILED = "failed"
    """The effect does not and will not exist."""
    SKIPPED = "skipped"
    """The operation ended without it."""


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One step: its state, how often it was sent, by which provider, under which reference."""

    name: str
    state: StepState
    attempts: int
    provider: str | None
    reference: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    """All steps in the plan's order; `total` None where this process does not know the plan."""

    steps: tuple[StepProgress, ...]
    done: int
    total: int | None


def progress_of(view: OperationView, type: OperationType | None) -> Progress | None:
    """The steps of `view` under its type's version; None for a tombstone, which forgot them.

    `type` None (a version this process does not know, DESIGN.md I12): only steps that were begun appear.
    """
    if view.purged:
        return None
    plan: list[tuple[str, str | None]]
    if type is None:
        plan = [(name, None) for name in dict.fromkeys(sent.step for sent in view.attempts)]
    else:
        plan = [(step.name, step.provider) for step in type.steps]
    steps = tuple(_step(view, name, provider) for name, provider in plan)
    done = sum(step.state is StepState.SUCCEEDED for step in steps)
    return Progress(steps, done, None if type is None else len(steps))


def _step(view: OperationView, name: str, provider: str | None) -> StepProgress:
    sent = [
        attempt
        for attempt in view.attempts
        if attempt.step == name and attempt.direction is Direction.FORWARD
    ]
    reference = view.references.get(name) or next(
        (
            attempt.reference
            for attempt in sent
            if attempt.outcome is OutcomeKind.SUCCEEDED and attempt.reference is not None
        ),
        None,
    )
    state = _state(view.state, sent, found=name in view.references)
    return StepProgress(name, state, len(sent), provider, reference)


def _state(state: State, sent: Sequence[AttemptSummary], *, found: bool) -> StepState:
    outcomes = [attempt.outcome for attempt in sent]
    if state is State.SUCCEEDED or found or OutcomeKind.SUCCEEDED in outcomes:
        return StepState.SUCCEEDED
    if state not in LIVE:
        # A cancelled operation may have sent what is known not to have been applied: no failure of the step.
        failed = bool(sent) and state is State.FAILED
        return StepState.FAILED if failed else StepState.SKIPPED
    if not sent:
        return StepState.PENDING
    if OutcomeKind.UNKNOWN in outcomes or (None in outcomes and state in _IN_DOUBT):
        return StepState.UNCERTAIN
    if OutcomeKind.REJECTED in outcomes and None not in outcomes:
        return StepState.FAILED
    return StepState.RUNNING
