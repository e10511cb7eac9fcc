"""Sizes as people write them, numbers as people read them."""

import math

import pytest

from penstock.core.errors import UsageError
from penstock.core.units import duration, mib, parse_count, short, si


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10M", 10**7),
        ("10m", 10**7),
        ("1.5k", 1500),
        ("64MiB", 2**26),
        ("64 MiB", 2**26),
        ("64mi", 2**26),
        ("1T", 10**12),
        ("1TiB", 2**40),
        ("5GB", 5 * 10**9),
        ("5B", 5),
        (" 7 ", 7),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740.993k", 2**53 + 1),
    ],
)
def test_a_count_is_read_exactly(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1e6", "5P", "5i", "MiB", "1 2", "1,000", ".5k"])
def test_what_is_no_count_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UsageError, match=r"Not a count or size \(got .*4096, 10M or 64MiB") as refusal:
        parse_count(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (999, "999"),
        (999.4, "999"),
        (999.6, "1k"),
        (1000, "1k"),
        (-1500, "-1.5k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (1_234_567, "1.23M"),
        (1e12, "1T"),
        (6.02e23, "602Z"),
        (1e24, "1Y"),
    ],
)
def test_a_number_has_three_digits_and_a_letter(value: float, text: str) -> None:
    assert si(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**39, "1.5 TiB")],
)
def test_bytes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert mib(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.97, "1m00s"),
        (60, "1m00s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (7260, "2h01m"),
        (100 * 3600, "100h00m"),
    ],
)
def test_seconds_are_shown_as_a_person_would_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.96, "1,000"), (999_960, "1M"), (math.inf, "∞"), (-math.inf, "-∞"), (1e18, "1e18")],
)
def test_short_numbers_at_the_edges(value: float, text: str) -> None:
    assert short(value) == text
