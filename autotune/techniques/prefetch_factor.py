"""How many batches each data-loading worker prepares ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from autotune.records.config import Choice
from autotune.techniques.base import whole_number
from autotune.techniques.expectation import Factor
from autotune.techniques.frameworks import DATALOADER, TRANSFORMERS, Argument, Words
from autotune.techniques.loader_option import LoaderOption


class PrefetchFactor(LoaderOption):
    """`DataLoader(prefetch_factor=...)`."""

    name: ClassVar[str] = "prefetch_factor"
    summary: ClassVar[str] = "batches that each worker prepares ahead: evens out slow samples, takes host memory"
    listed_choices: ClassVar[str] = "2 4 8"
    applies: ClassVar[str] = "with workers"
    off: ClassVar[Choice] = 2  # torch's own default
    ordered: ClassVar[bool] = True
    order: ClassVar[int] = 40
    choices: ClassVar[tuple[Choice, ...]] = (2, 4, 8)
    waiting: ClassVar[Factor] = Factor(typical=0.97, spread=1.1)  # helps where samples take unequally long
    needs_workers: ClassVar[bool] = True
    # Both refuse a number without workers, so torch's own default is left unset.
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_prefetch_factor", unset=2),
        DATALOADER: Argument("prefetch_factor", unset=2),
    }

    def label(self, choice: Choice) -> str:
        """`prefetch 4`."""
        return f"prefetch {choice}"

    def validate(self, choice: Any) -> Choice:
        """A positive integer."""
        return whole_number(choice, 1)
