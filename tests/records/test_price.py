"""A price an hour: the currency is kept, and what is no price is refused with what was expected."""

from __future__ import annotations

import pytest

from autotune.errors import ConfigError
from autotune.records.options import SearchOptions
from autotune.records.price import Price


@pytest.mark.parametrize("written", ["2.50/h", "$2.50/h", "2.50€/h", "2.50 EUR/h", "CHF 2.50/h", " 2.5 / h "])
def test_a_price_is_read_with_or_without_a_currency(written: str) -> None:
    assert Price.parse(written).per_hour == 2.5


@pytest.mark.parametrize(
    "written", ["", "2.50", "/h", "-2.50/h", "2,50/h", "2.50/d", "2.50/h/h", "$2.50€/h", "a lot/h", "nan/h", "1e9/h"]
)
def test_what_is_no_price_is_refused_with_what_was_expected(written: str) -> None:
    with pytest.raises(ConfigError, match=r"^price: .* expected what one device costs an hour, such as 2\.50/h"):
        SearchOptions.of({"price": written})


def test_nothing_costs_nothing() -> None:
    with pytest.raises(ConfigError, match="expected more than 0"):
        SearchOptions.of({"price": "0/h"})


def test_samples_cost_the_time_of_all_devices() -> None:
    assert Price.parse("3.60/h").of(1_000_000, 1000.0, 2) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("written", "amount", "words"),
    [("$2.50/h", 1234.5, "$1,234.50"), ("2.5/h", 0.04321, "0.0432"), ("2.50 EUR/h", 3.0, "3.00 EUR")],
)
def test_an_amount_is_told_in_the_currency_that_was_given(written: str, amount: float, words: str) -> None:
    price = Price.parse(written)
    assert price.words(amount) == words
    assert Price.parse(str(price)) == price
