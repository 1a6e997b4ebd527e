"""Sizes and times as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.cli.quantities import parse_bytes, parse_seconds
from pagedkv.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        (" 24gib ", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5KiB", 1536),
        ("2.KB", 2000),
        ("1e3MB", 10**9),
        ("7", 7),
        ("7B", 7),
        ("0.1TiB", 109_951_162_777),
        ("3MiB", 3 * 2**20),
        ("3TB", 3 * 10**12),
    ],
)
def test_sizes_have_binary_and_decimal_units_in_any_case(text: str, size_bytes: int) -> None:
    assert parse_bytes(text, option="--memory") == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("1.5s", 1.5),
        ("10 min", 600.0),
        ("1h", 3600.0),
        ("3", 3.0),
        ("250us", 250e-6),
        ("250µs", 250e-6),
        ("1MIN", 60.0),
    ],
)
def test_times_have_units_from_microseconds_to_hours(text: str, seconds: float) -> None:
    assert parse_seconds(text, option="--duration") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("24 GiBs", "unknown unit 'GiBs': use one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ("24G", "unknown unit 'G'"),
        ("1h", "unknown unit 'h'"),
        ("GiB", "no number with a unit: write it like 24GiB"),
        ("", "no number with a unit"),
        ("-1GiB", "no number with a unit"),
        ("1,000MiB", "no number with a unit"),
        ("nan", "no number with a unit"),
        ("inf", "no number with a unit"),
        ("0x10", "no number with a unit"),
        ("1GiB 2MiB", "no number with a unit"),
        ("0GiB", "not above 0"),
        ("0.1B", "less than a byte"),
        ("1e400GiB", "too large"),
    ],
)
def test_a_size_that_is_none_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_bytes(text, option="--memory")
    message = str(refusal.value)
    assert message.startswith(f"--memory: {text!r} ")
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("banana", "no number with a unit: write it like 20ms"),
        ("5m", "unknown unit 'm': use one of us, µs, ms, s, min, h"),
        ("1h30min", "no number with a unit"),
        ("24GiB", "unknown unit 'GiB'"),
        ("0", "not above 0"),
        ("1e309", "too large"),
    ],
)
def test_a_time_that_is_none_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse_seconds(text, option="--step-time")
    assert str(refusal.value).startswith(f"--step-time: {text!r} ")
    assert problem in str(refusal.value)


@given(st.text(max_size=12))
def test_any_text_is_a_number_above_0_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_seconds):
        try:
            assert 0 < parse(text, option="--x") < float("inf")
        except InvalidInput as refusal:
            assert str(refusal).startswith("--x: ")


@given(st.integers(1, 10**6), st.sampled_from(["B", "KiB", "MiB", "GiB"]))
def test_whole_sizes_are_exact(count: int, unit: str) -> None:
    factor = 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)
    assert parse_bytes(f"{count}{unit}", option="--memory") == count * factor
