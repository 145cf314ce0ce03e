"""The transition table: complete, reachable, and what each state answers (PROTOCOL.md, Transitions)."""

from __future__ import annotations

from itertools import product

import pytest

from app.domain.lifecycle import (
    LIVE,
    TERMINAL,
    TRANSITIONS,
    Ending,
    Event,
    Repeat,
    State,
    live_state,
    repeat_of,
    sources,
)


def test_every_event_has_exactly_one_row() -> None:
    assert sorted(row.event for row in TRANSITIONS) == sorted(Event)


def test_every_state_can_be_reached() -> None:
    reached: set[State] = set()
    while True:
        more = {
            to
            for row in TRANSITIONS
            for to in row.to
            if not row.sources or reached & {*row.sources}
        }
        if more <= reached:
            break
        reached |= more
    assert reached == set(State)


def test_states_are_live_or_terminal() -> None:
    assert {*LIVE} | {*TERMINAL} == set(State)
    assert not {*LIVE} & {*TERMINAL}


def test_nothing_leaves_a_terminal_state() -> None:
    """I8: late evidence and the strip change no state."""
    leaving = [row.event for row in TRANSITIONS if {*row.sources} & {*TERMINAL} and row.to]
    assert leaving == []


def test_nothing_goes_back_to_pending() -> None:
    """R9."""
    assert [row.event for row in TRANSITIONS if State.PENDING in row.to] == [Event.ADMIT]


@pytest.mark.parametrize("event", list(Event), ids=str)
def test_sources_are_the_tables(event: Event) -> None:
    [row] = [row for row in TRANSITIONS if row.event is event]
    assert sources(event) == row.sources


def test_the_live_state_in_its_order() -> None:
    """R9: attention > doubt > ending > waiting > running > pending, over all combinations."""
    for attention, doubt, ending, waiting, begun in product(
        (True, False), (True, False), (None, *Ending), (True, False), (True, False)
    ):
        state = live_state(
            attention=attention, in_doubt=doubt, ending=ending, waiting=waiting, begun=begun
        )
        order = [
            (attention, State.NEEDS_ATTENTION),
            (doubt, State.UNCERTAIN),
            (ending is not None, State.COMPENSATING),
            (waiting, State.WAITING),
            (begun, State.RUNNING),
            (True, State.PENDING),
        ]
        assert state is next(wanted for holds, wanted in order if holds)


@pytest.mark.parametrize("state", list(State), ids=str)
def test_what_a_repeat_is_answered(state: State) -> None:
    """CONTRACT.md 4, 11: the strip changes the answer, and only of what is done."""
    kept = Repeat.GOING_ON if state in LIVE else Repeat.DONE
    assert repeat_of(state, purged=False) is kept
    assert repeat_of(state, purged=True) is (Repeat.GOING_ON if state in LIVE else Repeat.GONE)
