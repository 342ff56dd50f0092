"""Data-loading workers that live on from one pass over the dataset to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune.records.config import Choice
from autotune.techniques.expectation import Factor
from autotune.techniques.frameworks import DATALOADER, TRANSFORMERS, Argument, Words
from autotune.techniques.loader_option import LoaderOption


class PersistentWorkers(LoaderOption):
    """`DataLoader(persistent_workers=True)`."""

    name: ClassVar[str] = "persistent_workers"
    summary: ClassVar[str] = "data-loading workers live on from epoch to epoch: saves time with short epochs"
    listed_choices: ClassVar[str] = "`false` `true`"
    applies: ClassVar[str] = "with workers"
    off: ClassVar[Choice] = False
    order: ClassVar[int] = 30
    choices: ClassVar[tuple[Choice, ...]] = (False, True)
    waiting: ClassVar[Factor] = Factor(typical=0.97, spread=1.1)  # only the first batches of each pass wait less
    needs_workers: ClassVar[bool] = True
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_persistent_workers"),
        DATALOADER: Argument("persistent_workers"),
    }
