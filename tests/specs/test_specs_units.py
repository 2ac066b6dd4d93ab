"""Units: exact numbers from text, the traps, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.specs import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32GB", 32 * 10**9),
        ("32GiB", 32 * 2**30),
        ("32510MiB", 32510 * 2**20),
        ("25MB", 25_000_000),
        ("1.5GiB", 3 * 2**29),
        ("123B", 123),
        ("123", 123),
        ("0123", 123),
        ("80 GB", 80 * 10**9),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("32G", "did you mean 32GB or 32GiB"),
        ("32gb", "did you mean 32GB or 32GiB"),
        ("32Gb", "is in bits"),
        ("800Gbps", "is in bits"),
        ("0.3B", "not a whole number of bytes"),
        ("-1GB", "not an amount"),
        ("", "not an amount"),
        ("1e9", "not an amount"),
        ("GB", "not an amount"),
        ("٣GB", "not an amount"),
        ("3 parsecs", "'parsecs' is not a unit"),
    ],
)
def test_bytes_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        units.parse_bytes(text)


def test_rates_bits_are_not_bytes() -> None:
    assert units.parse_rate("800Gbps") == 10**11
    assert units.parse_rate("800Gb/s") == 10**11
    assert units.parse_rate("200 Gbit/s") == 25 * 10**9
    assert units.parse_rate("300GB/s") == 3 * 10**11
    assert units.parse_rate("300GiB/s") == 300 * 2**30


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("800", "has no unit"),
        ("800Gb", "in bits without 'a second'"),
        ("800GB", "did you mean 800GB/s"),
        ("x", "amount"),
    ],
)
def test_rates_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        units.parse_rate(text)


def test_flops() -> None:
    assert units.parse_flops("312T") == 312 * 10**12
    assert units.parse_flops("15.7T") == 15_700 * 10**9
    assert units.parse_flops("1.5PFLOPS") == units.parse_flops("1500 TFLOP/s") == 15 * 10**14
    with pytest.raises(ValueError, match="not a unit of FLOP/s"):
        units.parse_flops("312TB")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),  # the trap: Slurm's bare number is minutes
        ("1:30", 90),
        ("1:30:00", 5400),
        ("24:00:00", 86400),
        ("1-0", 86400),
        ("1-12", 36 * 3600),
        ("1-2:3", 86400 + 7200 + 180),
        ("2-00:00:01", 2 * 86400 + 1),
        ("90:00", 5400),
        ("90s", 90),
        ("30min", 1800),
        ("2h", 7200),
        ("1h30min", 5400),
        ("1d", 86400),
        ("0.5h", 1800),
    ],
)
def test_slurm_times(text: str, seconds: int) -> None:
    assert units.slurm_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1:2:3:4", "-5", "1-", "1-2-3", ":30", "1h30", "infinite", "1e3", "30min1h", "1s1s", "1 week"]
)
def test_slurm_times_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accepted: H:M:S"):
        units.slurm_time(text)


def test_a_bare_number_is_no_duration() -> None:
    with pytest.raises(ValueError, match="has no unit"):
        units.duration("30")
    with pytest.raises(ValueError, match="not a duration"):
        units.duration("1:30")


@given(st.integers(0, 10**9))
def test_times_come_back(seconds: int) -> None:
    assert units.slurm_time(units.format_slurm_time(seconds)) == seconds
    assert units.duration(units.format_duration(seconds)) == seconds


@given(st.integers(0, 10**18), st.sampled_from(sorted(units.BYTE_UNITS)))
def test_bytes_are_exact(count: int, unit: str) -> None:
    assert units.parse_bytes(f"{count}{unit}") == count * units.BYTE_UNITS[unit]


@pytest.mark.parametrize("text", ["20000-29999", "1024-1024", "1024-65535"])
def test_ports(text: str) -> None:
    first, last = units.port_range(text)
    assert text == f"{first}-{last}"


@pytest.mark.parametrize("text", ["29999-20000", "1-2000", "20000-70000", "20000", "20000:29999", "-1-5"])
def test_ports_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ports"):
        units.port_range(text)


def test_formats_for_people() -> None:
    assert units.format_slurm_time(86400 + 3661) == "1-01:01:01"
    assert units.format_slurm_time(1800) == "00:30:00"
    assert units.format_duration(90061) == "1d1h1min1s"
    assert units.format_bytes(0) == "0 B"
    assert units.format_bytes(1023) == "1023 B"
    assert units.format_bytes(32510 * 2**20) == "31.7 GiB"
    assert units.format_bytes(1024**2 - 1) == "1.00 MiB"
    assert units.format_bytes(25_000_000, binary=False) == "25.0 MB"
    assert units.format_bytes(-2048) == "-2.00 KiB"
    assert units.format_rate(10**11) == "100 GB/s"
