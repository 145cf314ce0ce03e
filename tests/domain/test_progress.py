"""Steps and progress on the wire, from attempts and state (CONTRACT, 'An operation on the wire')."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from app.domain.identity import Direction, OperationId
from app.domain.lifecycle import LIVE, TERMINAL, State
from app.domain.operation import AttemptSummary, OperationView
from app.domain.outcome import OutcomeKind
from app.domain.progress import StepProgress, StepState, progress_of
from tests.support.core import type_of

NOW = datetime(2030, 1, 1, tzinfo=UTC)
OPEN = None
S, R, N, U = (
    OutcomeKind.SUCCEEDED,
    OutcomeKind.REJECTED,
    OutcomeKind.NOT_APPLIED,
    OutcomeKind.UNKNOWN,
)


def _view(state: State, outcomes: list[OutcomeKind | None], **changes: Any) -> OperationView:
    attempts = tuple(
        AttemptSummary("send", 0, Direction.FORWARD, told, "ref-a" if told is S else None)
        for told in outcomes
    )
    given: dict[str, Any] = {
        "id": OperationId.new(0),
        "tenant": "t",
        "type": "test.one",
        "type_version": 1,
        "state": state,
        "version": 1,
        "created_at": NOW,
        "updated_at": NOW,
        "completed_at": None,
        "idempotency_expires_at": NOW,
        "metadata": {},
        "cancel_requested": False,
        "attention": None,
        "result": None,
        "error": None,
        "purged": False,
        "attempts": attempts,
    }
    return OperationView(**(given | changes))


def _one(view: OperationView) -> StepProgress:
    progress = progress_of(view, type_of())
    assert progress is not None
    assert progress.total == 1
    assert progress.done == (progress.steps[0].state is StepState.SUCCEEDED)
    return progress.steps[0]


@pytest.mark.parametrize(
    ("state", "outcomes", "expected"),
    [
        (State.PENDING, [], "pending"),
        (State.RUNNING, [OPEN], "running"),
        (State.RUNNING, [N], "running"),
        (State.RUNNING, [N, OPEN], "running"),
        (State.RUNNING, [U, OPEN], "uncertain"),
        (State.RUNNING, [S], "succeeded"),
        (State.RUNNING, [U, S], "succeeded"),
        (State.WAITING, [S], "succeeded"),
        (State.UNCERTAIN, [U], "uncertain"),
        (State.UNCERTAIN, [OPEN], "uncertain"),
        (State.UNCERTAIN, [U, R], "uncertain"),
        (State.UNCERTAIN, [U, N], "uncertain"),
        (State.NEEDS_ATTENTION, [OPEN], "uncertain"),
        (State.NEEDS_ATTENTION, [N], "running"),
        (State.COMPENSATING, [R], "failed"),
        (State.COMPENSATING, [S], "succeeded"),
        (State.SUCCEEDED, [S], "succeeded"),
        (State.SUCCEEDED, [U], "succeeded"),
        (State.FAILED, [R], "failed"),
        (State.FAILED, [U, R], "failed"),
        (State.FAILED, [N], "failed"),
        (State.FAILED, [], "skipped"),
        (State.CANCELLED, [], "skipped"),
        (State.CANCELLED, [N], "skipped"),
        (State.CANCELLED, [S], "succeeded"),
    ],
)
def test_state_of_a_step(state: State, outcomes: list[OutcomeKind | None], expected: str) -> None:
    """One pure function from attempts and the operation's state."""
    step = _one(_view(state, outcomes))
    assert step.state == expected
    assert step.attempts == len(outcomes)
    assert step.provider == "test"


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("outcomes", [[], [OPEN], [N], [R], [U], [S], [U, N, OPEN]])
def test_nothing_is_left_open_at_the_end(state: State, outcomes: list[OutcomeKind | None]) -> None:
    """Every combination has an answer, and a done operation shows no step as going on or in doubt."""
    shown = _one(_view(state, outcomes)).state
    if state in TERMINAL:
        assert shown in (StepState.SUCCEEDED, StepState.FAILED, StepState.SKIPPED)
    else:
        assert state in LIVE
        assert shown is not StepState.SKIPPED


def test_evidence_counts_like_an_answer() -> None:
    """A look-up that found the effect makes the step succeeded, under the reference it found."""
    step = _one(_view(State.RUNNING, [U], references={"send": "ref-f"}))
    assert (step.state, step.reference) == (StepState.SUCCEEDED, "ref-f")
    assert _one(_view(State.RUNNING, [U, S])).reference == "ref-a"
    assert _one(_view(State.RUNNING, [U])).reference is None


def test_compensations_are_no_forward_attempts() -> None:
    """What is sent on the way back neither counts nor changes the step's state."""
    back = AttemptSummary("send", 0, Direction.COMPENSATION, U, None)
    view = _view(State.COMPENSATING, [S])
    both = _view(State.COMPENSATING, [], attempts=(*view.attempts, back))
    assert _one(both) == _one(view)


def test_plans_not_known_here() -> None:
    """I12: of a version not known here only begun steps appear, and nobody knows how many there are."""
    progress = progress_of(_view(State.RUNNING, [S, N]), None)
    assert progress is not None
    assert [(step.name, step.provider) for step in progress.steps] == [("send", None)]
    assert (progress.done, progress.total) == (1, None)


def test_steps_in_the_plans_order() -> None:
    """Progress is steps done of steps in all."""
    progress = progress_of(_view(State.RUNNING, [S]), type_of("first", "send", "last"))
    assert progress is not None
    assert [step.name for step in progress.steps] == ["first", "send", "last"]
    assert [step.state for step in progress.steps] == ["pending", "succeeded", "pending"]
    assert (progress.done, progress.total) == (1, 3)


def test_tombstones_forgot_their_steps() -> None:
    """CONTRACT 11: nothing is made up for what is gone."""
    assert progress_of(_view(State.SUCCEEDED, [], purged=True), type_of()) is None
