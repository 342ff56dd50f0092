"""Data-loading workers that live on from one pass over the dataset to the next."""

from __future__ import annotations

from autotune.techniques import Expectation, Factor, Switch
from autotune.techniques.frameworks import Argument, At, Lines, words
from autotune.techniques.num_workers import LoaderOption


class PersistentWorkers(Switch, LoaderOption):
    """`DataLoader(persistent_workers=True)`."""

    name = "persistent_workers"
    summary = "data-loading workers live on from epoch to epoch: saves time with short epochs"
    applies = "with workers"
    order = 30
    expected = Expectation(data=Factor(typical=0.9, spread=1.5))  # only the first batches of each pass wait less
    needs_workers = True
    frameworks = words(
        transformers=Argument("dataloader_persistent_workers"),
        dataloader=Argument("persistent_workers"),
        torch=Lines({At.LOADER: "persistent_workers={choice}"}),
    )
