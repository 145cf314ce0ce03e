"""Times and limits refuse what cannot work; zero is zero (CASES.md B08 b, B32)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.errors import ConfigurationError
from app.domain.policy import (
    DAY_SECONDS,
    DEFAULT_RETENTION_SECONDS,
    DEFAULT_TOMBSTONE_SECONDS,
    Backoff,
    LeasePolicy,
    TypePolicy,
)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"lease_seconds": -1}, "lease_seconds"),
        ({"lease_seconds": math.nan}, "lease_seconds"),
        ({"renew_interval_seconds": 0}, "renew_interval_seconds"),
        ({"renew_interval_seconds": 15.1}, "renew_interval_seconds"),
        ({"renew_interval_seconds": math.nan}, "renew_interval_seconds"),
        ({"margin_seconds": -0.1}, "margin_seconds"),
        ({"margin_seconds": 20}, "margin_seconds"),
        ({"claims_limit": 0}, "claims_limit"),
    ],
    ids=str,
)
def test_a_lease_that_cannot_work(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigurationError, match=names):
        LeasePolicy(**changes)


def test_a_missed_renewal_does_not_lose_a_lease() -> None:
    LeasePolicy(lease_seconds=30.0, renew_interval_seconds=15.0, margin_seconds=14.9)
    policy = LeasePolicy()
    missed = 2 * policy.renew_interval_seconds
    assert missed < policy.lease_seconds - policy.margin_seconds


@pytest.mark.parametrize(
    "changes",
    [
        {"base_seconds": 0},
        {"base_seconds": -1},
        {"base_seconds": 10, "ceiling_seconds": 9},
        {"base_seconds": math.nan},
    ],
    ids=str,
)
def test_a_back_off_that_cannot_work(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Backoff(**changes)


@pytest.mark.parametrize(
    ("failures", "draw", "floor", "wait"),
    [
        (1, 0.0, 0.0, 0.0),
        (1, 0.5, 0.0, 0.5),
        (2, 0.5, 0.0, 1.0),
        (4, 0.5, 0.0, 4.0),
        (0, 0.5, 0.0, 0.5),
        (1, 0.5, 7.0, 7.5),  # jitter comes on top of the floor: nobody is back before it
        (1, 0.0, 7.0, 7.0),
        (1, 0.5, -7.0, 0.5),
        (1, 0.0, 1e9, DAY_SECONDS),
        (10_000, 0.5, 0.0, 150.0),
    ],
)
def test_how_long_it_waits(failures: int, draw: float, floor: float, wait: float) -> None:
    assert Backoff().wait_seconds(failures, draw, floor) == wait


@given(st.integers(0, 10**6), st.floats(0, 1, exclude_max=True), st.floats(-1e6, 1e6))
def test_a_wait_is_never_negative_nor_before_the_floor(
    failures: int, draw: float, floor: float
) -> None:
    backoff = Backoff(2.0, 60.0)
    wait = backoff.wait_seconds(failures, draw, floor)
    assert min(max(floor, 0.0), DAY_SECONDS) <= wait <= DAY_SECONDS + backoff.ceiling_seconds


@pytest.mark.parametrize(
    "changes",
    [
        {"retry_horizon_seconds": -1},
        {"retry_horizon_seconds": math.nan},
        {"retention_seconds": 0},
        {"retention_seconds": 10.0, "tombstone_seconds": 9.0},
        {"priority": 4},
        {"priority": -1},
        {"deadline_seconds": 0},
        {"deadline_seconds": -1.0},
    ],
    ids=str,
)
def test_a_type_policy_that_cannot_work(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TypePolicy(**changes)


def test_a_horizon_of_zero_is_zero() -> None:
    """B08: never 'unlimited'."""
    assert TypePolicy(retry_horizon_seconds=0).retry_horizon_seconds == 0


def test_settings_speak_only_where_a_type_is_silent() -> None:
    silent = TypePolicy().where_silent(retention_seconds=5.0, tombstone_seconds=6.0)
    assert (silent.retention_seconds, silent.tombstone_seconds) == (5.0, 6.0)
    own = TypePolicy(retention_seconds=7.0, tombstone_seconds=8.0)
    assert own.where_silent(retention_seconds=5.0, tombstone_seconds=6.0) == own
    # A type that gives the same number as the default has spoken.
    said = TypePolicy(
        retention_seconds=float(DEFAULT_RETENTION_SECONDS),
        tombstone_seconds=float(DEFAULT_TOMBSTONE_SECONDS),
    )
    assert said.where_silent(retention_seconds=5.0, tombstone_seconds=6.0) == said
    with pytest.raises(ConfigurationError):
        TypePolicy(retention_seconds=7.0).where_silent(retention_seconds=1.0, tombstone_seconds=6.0)
