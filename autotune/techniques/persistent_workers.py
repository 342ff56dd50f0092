"""Data-loading workers that live on from one pass over the dataset to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune.techniques.base import Switch
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import DATALOADER, TORCH, TRANSFORMERS, Argument, At, Lines, Words
from autotune.techniques.loader_option import LoaderOption


class PersistentWorkers(Switch, LoaderOption):
    """`DataLoader(persistent_workers=True)`."""

    name = "persistent_workers"
    summary = "data-loading workers live on from epoch to epoch: saves time with short epochs"
    applies = "with workers"
    order = 30
    expected = Expectation(data=Factor(typical=0.97, spread=1.1))  # only the first batches of each pass wait less
    needs_workers = True
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_persistent_workers"),
        DATALOADER: Argument("persistent_workers"),
        TORCH: Lines({At.LOADER: "persistent_workers={choice}"}),
    }
