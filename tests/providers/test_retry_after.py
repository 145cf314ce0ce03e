"""`Retry-After` in every form, and in none (CASES.md K20)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.providers.retry_after import parse_http_date, retry_after_seconds

NOW = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)
DAY = 86_400.0


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["0"], 0.0),
        (["120"], 120.0),
        (["  120\t"], 120.0),
        (["00120"], 120.0),
        (["1.5"], 1.5),
        (["1."], 1.0),
        (["86401"], DAY),
        (["9" * 5000], DAY),
        (["Tue, 01 Dec 2026 12:00:30 GMT"], 30.0),
        (["Tuesday, 01-Dec-26 12:00:30 GMT"], 30.0),
        (["Tue Dec  1 12:00:30 2026"], 30.0),
        (["Tue, 01 Dec 2026 12:00:60 GMT"], 60.0),
        (["Sun, 06 Nov 1994 08:49:37 GMT"], 0.0),
        (["Sunday, 06-Nov-94 08:49:37 GMT"], 0.0),
        (["Fri, 31 Dec 9998 23:59:59 GMT"], DAY),
        (["5", "10"], 10.0),
        (["soon", "10"], 10.0),
        (["5, 10"], 10.0),
        (["3", "Tue, 01 Dec 2026 12:00:30 GMT"], 30.0),
        ([], None),
        ([""], None),
        (["   "], None),
        (["-5"], None),
        (["+5"], None),
        (["inf"], None),
        (["nan"], None),
        (["1e3"], None),
        (["0x10"], None),
        ([".5"], None),
        (["5 seconds"], None),
        (["\u0663"], None),
        (["\u00b2"], None),
        (["tomorrow"], None),
        (["Tue, 32 Dec 2026 12:00:30 GMT"], None),
        (["Tue, 01 Foo 2026 12:00:30 GMT"], None),
        (["Tue, 01 Dec 2026 25:00:30 GMT"], None),
        (["Tue, 01 Dec 2026 12:00:30 CET"], None),
        (["2026-12-01T12:00:30Z"], None),
    ],
)
def test_every_form(lines: list[str], seconds: float | None) -> None:
    assert retry_after_seconds(lines, date=None, now=NOW) == seconds


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ("Tue, 01 Dec 2026 12:00:10 GMT", 20.0),
        ("Tue, 01 Dec 2026 13:00:00 GMT", 0.0),
        ("Tue Dec  1 12:00:10 2026", 20.0),
        ("garbage", 30.0),
        (None, 30.0),
    ],
)
def test_a_date_is_measured_against_the_clock_that_wrote_it(
    date: str | None, seconds: float
) -> None:
    lines = ["Tue, 01 Dec 2026 12:00:30 GMT"]
    assert retry_after_seconds(lines, date=date, now=NOW) == seconds


def test_seconds_do_not_depend_on_any_clock() -> None:
    assert retry_after_seconds(["7"], date="Fri, 01 Jan 1999 00:00:00 GMT", now=NOW) == 7.0


def test_two_digits_of_a_year_lie_at_most_fifty_years_ahead() -> None:
    seventy_six = parse_http_date("Tuesday, 01-Dec-76 12:00:00 GMT", NOW)
    seventy_seven = parse_http_date("Tuesday, 01-Dec-77 12:00:00 GMT", NOW)
    assert seventy_six is not None
    assert seventy_seven is not None
    assert (seventy_six.year, seventy_seven.year) == (2076, 1977)


@given(
    lines=st.lists(
        st.text()
        | st.from_regex(r"[0-9.,eE+\- ]{0,40}")
        | st.from_regex(r"[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9:]{8} GMT")
        | st.datetimes(timezones=st.just(UTC)).map(
            lambda moment: format_datetime(moment, usegmt=True)
        ),
        max_size=5,
    ),
    date=st.none() | st.text(),
    now=st.datetimes(timezones=st.just(UTC)),
)
def test_it_never_raises_and_stays_within_a_day(
    lines: list[str], date: str | None, now: datetime
) -> None:
    seconds = retry_after_seconds(lines, date=date, now=now)
    assert seconds is None or 0 <= seconds <= DAY


@given(st.integers(0, 86_400))
def test_a_date_gives_back_the_seconds_it_was_made_from(ahead: int) -> None:
    line = format_datetime(NOW + timedelta(seconds=ahead), usegmt=True)
    assert retry_after_seconds([line], date=None, now=NOW) == ahead
