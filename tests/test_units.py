"""Quantities as people write them."""

import pytest

from autotune.units import (
    format_bytes,
    format_chance,
    format_per_s,
    format_seconds,
    parse_bytes,
    parse_fraction,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1500MiB", 1500 * 2**20),
        ("12GiB", 12 * 2**30),
        ("12G", 12 * 2**30),
        ("2GB", 2 * 10**9),
        ("1024", 1024),
        ("0.5 KiB", 512),
    ],
)
def test_memory_sizes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


def test_a_percentage_is_of_the_total():
    assert parse_bytes("80%", total_bytes=1000) == 800


@pytest.mark.parametrize("text", ["lots", "", "-1GiB", "0", "80%", "12 GiBs"])
def test_what_is_no_memory_size_is_refused_by_name(text):
    with pytest.raises(ValueError, match="12GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), ("200ms", 0.2)])
def test_durations_are_read(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "0s", "-5m", "5 weeks"])
def test_what_is_no_duration_is_refused_by_name(text):
    with pytest.raises(ValueError, match="duration"):
        parse_seconds(text)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0)])
def test_shares_are_read(text, share):
    assert parse_fraction(text) == pytest.approx(share)


def test_a_share_of_all_or_more_is_refused():
    with pytest.raises(ValueError, match="100%"):
        parse_fraction("100%")


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(512, "512 B"), (1536, "1.50 KiB"), (1500 * 2**20, "1.46 GiB"), (700 * 2**20, "700 MiB")]
)
def test_bytes_are_shown_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.05e11, "105 GFLOP/s"), (9.994e8, "999 MFLOP/s"), (9.997e8, "1 GFLOP/s"), (12.0, "12 FLOP/s")],
)
def test_a_rate_whose_rounded_figure_has_four_digits_is_shown_in_the_next_unit(number, text):
    assert format_per_s(number, "FLOP") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (2.5, "2.5 s"),
        (75, "1m15s"),
        (3720, "1h02m"),
        (0.0009999, "1 ms"),
        (0.9999, "1 s"),
        (59.97, "1m00s"),
    ],
)
def test_seconds_are_shown_in_the_unit_that_reads_best(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("chance", "text"), [(0.0, "1%"), (0.004, "1%"), (0.5, "50%"), (0.999, "99%"), (1.0, "99%")])
def test_no_chance_is_told_as_none_or_as_certain(chance, text):
    assert format_chance(chance) == text
