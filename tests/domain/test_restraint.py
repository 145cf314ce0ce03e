"""The circuit breaker and the rate limit, as pure decisions (CASES.md B32, K19)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.domain.restraint import BreakerState, RestraintRules, Standing, after, grant

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = RestraintRules(failure_threshold=3, cooldown_seconds=1, max_cooldown_seconds=4)
RATED = RestraintRules(rate_per_second=10, burst=2)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def failed(standing: Standing, times: int, now: datetime = NOW) -> Standing:
    for _ in range(times):
        standing = after(standing, RULES, successes=0, failures=1, now=now)
    return standing


def test_opens_after_a_run_of_failures_and_not_before() -> None:
    assert failed(Standing(), 2).breaker is BreakerState.CLOSED
    opened = failed(Standing(), 3)
    assert opened.breaker is BreakerState.OPEN
    assert opened.open_until == later(1)


def test_a_success_between_forgets_the_failures() -> None:
    standing = after(failed(Standing(), 2), RULES, successes=1, failures=0, now=NOW)
    assert failed(standing, 2).breaker is BreakerState.CLOSED


def test_open_grants_nothing_and_says_how_long() -> None:
    given_ = grant(failed(Standing(), 3), RULES, 50, later(0.25))
    assert (given_.granted, given_.wait_seconds) == (0, 0.75)


def test_half_open_lets_one_probe_through_and_then_one_more_if_it_never_answers() -> None:
    first = grant(failed(Standing(), 3), RULES, 50, later(1))
    assert first.granted == 1
    assert first.standing.breaker is BreakerState.HALF_OPEN
    assert grant(first.standing, RULES, 50, later(1.5)).granted == 0
    assert grant(first.standing, RULES, 50, later(2)).granted == 1


def test_a_failed_probe_doubles_the_cooldown_up_to_the_limit() -> None:
    standing = failed(Standing(), 3)
    waits = []
    now = NOW
    for _ in range(5):
        assert standing.open_until is not None
        waits.append((standing.open_until - now).total_seconds())
        now = standing.open_until
        standing = after(
            grant(standing, RULES, 1, now).standing, RULES, successes=0, failures=1, now=now
        )
    assert waits == [1, 2, 4, 4, 4]


def test_a_good_probe_closes() -> None:
    probing = grant(failed(Standing(), 3), RULES, 1, later(1)).standing
    assert after(probing, RULES, successes=1, failures=0, now=later(1)) == Standing()


def test_calls_that_began_before_it_opened_do_not_push_it_further() -> None:
    opened = failed(Standing(), 3)
    assert failed(opened, 20, later(0.5)).open_until == opened.open_until


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 20)), min_size=1, max_size=50))
def test_the_rate_is_never_passed(asked: list[tuple[float, int]]) -> None:
    """Over any run of questions, no more is granted than burst + rate x time."""
    standing, now, total = Standing(), NOW, 0
    for pause, wanted in asked:
        now += timedelta(seconds=pause)
        given_ = grant(standing, RATED, wanted, now)
        standing = given_.standing
        total += given_.granted
        assert 0 <= given_.granted <= wanted
        assert given_.wait_seconds >= 0
    passed = (now - NOW).total_seconds()
    assert total <= 2 + 10 * passed + 1e-6


def test_without_a_rate_everything_wanted_is_granted() -> None:
    assert grant(Standing(), RULES, 1000, NOW).granted == 1000
