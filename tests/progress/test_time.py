"""Bounds, parsing and formatting of times."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.progress.time import (
    MAX_TIME,
    MIN_TIME,
    check_time,
    describe_time,
    format_time,
    parse_time,
)

NOW = 1_800_000_000_000
TIMES = st.integers(0, 253_402_300_799_999)
UNITS = {"ms": 1, "second": 1_000, "minutes": 60_000, "h": 3_600_000, "days": 86_400_000}


@given(value=st.integers(MIN_TIME, MAX_TIME))
def test_check_time_in_range_returns_it(value: int) -> None:
    assert check_time(value) == value


def test_check_time_accepts_both_bounds() -> None:
    assert (check_time(MIN_TIME), check_time(MAX_TIME)) == (0, 2**63 - 1)


@pytest.mark.parametrize("value", [-1, MAX_TIME + 1, True, False, 1.0, "1", None])
def test_check_time_of_other_value_raises_usage_error(value: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_time(value)
    assert f"time {value!r} " in str(caught.value)


@given(TIMES)
def test_format_time_and_parse_time_round_trip(time_ms: int) -> None:
    assert parse_time(format_time(time_ms), NOW) == time_ms
    assert parse_time(str(time_ms), NOW) == time_ms
    assert str(time_ms) in describe_time(time_ms)


@given(TIMES, st.integers(-23 * 60, 23 * 60))
def test_parse_time_of_an_aware_datetime_equals_its_text(time_ms: int, minutes: int) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=min(time_ms, 4 * 10**12))
    moment = moment.astimezone(timezone(timedelta(minutes=minutes)))
    assert parse_time(moment, NOW) == parse_time(moment.isoformat(), NOW)


@given(st.integers(0, 10_000), st.sampled_from(sorted(UNITS)))
def test_parse_time_of_a_relative_time_counts_back_from_now(count: int, unit: str) -> None:
    assert parse_time(f"{count} {unit} ago", NOW) == NOW - count * UNITS[unit]


@pytest.mark.parametrize(
    "text", ["", "yesterday", "10 minutes", "2026-11-15T12:00:00", "-5", "1.5", "9" * 5_000]
)
def test_parse_time_of_other_text_raises_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a time|has no time zone") as caught:
        parse_time(text, NOW)
    assert "10 minutes ago" in caught.value.hint


def test_parse_time_drops_parts_of_a_millisecond() -> None:
    assert parse_time("1970-01-01T00:00:00.0019Z", NOW) == 1
    assert parse_time("2026-11-16T21:34:00.123456+02:00", NOW) % 1_000 == 123


def test_format_time_beyond_the_calendar_is_the_number() -> None:
    assert format_time(2**62) == str(2**62)
