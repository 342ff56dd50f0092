"""What a device costs an hour, as people write it: `2.50/h`, `$2.50/h`, `2.50 EUR/h`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autotune.records.formats import Record

EXPECTED = "expected what one device costs an hour, such as 2.50/h, $2.50/h or 2.50 EUR/h"
_PRICE = re.compile(r"(?P<before>[^\d\s.,/+-]{0,3}\s?)(?P<amount>\d+(?:\.\d+)?)(?P<after>\s?[^\d\s.,/+-]{0,3})\s*/\s*h")


@dataclass(frozen=True, kw_only=True)
class Price(Record):
    """A price of an hour.

    Attributes:
        per_hour: the amount.
        before, after: the currency, where it was written before or after the amount, with the blank between; both may be empty.
    """

    per_hour: float
    before: str = ""
    after: str = ""

    @classmethod
    def parse(cls, text: str) -> Price:
        """Read a price. Raises ValueError with what was expected."""
        found = _PRICE.fullmatch(text.strip())
        if found is None or (found["before"].strip() and found["after"].strip()):
            raise ValueError(f"{text!r} is not a price; {EXPECTED}")
        amount = float(found["amount"])
        if not 0 < amount < math.inf:
            raise ValueError(f"{text!r} is not possible; expected more than 0 an hour")
        return cls(per_hour=amount, before=found["before"], after=found["after"].rstrip())

    def of(self, samples: float, samples_per_s: float, num_devices: int) -> float:
        """What it costs to train on so many samples, on so many devices together."""
        return self.per_hour * num_devices * samples / samples_per_s / 3600

    def words(self, amount: float) -> str:
        """An amount with the currency: `$0.83`, `0.0042 EUR`: cents, and three significant figures below one."""
        digits = f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"
        return f"{self.before}{digits}{self.after}"

    def __str__(self) -> str:
        """`$2.50/h`, which `parse` reads."""
        cents = f"{self.per_hour:.2f}"
        return f"{self.before}{cents if float(cents) == self.per_hour else repr(self.per_hour)}{self.after}/h"
