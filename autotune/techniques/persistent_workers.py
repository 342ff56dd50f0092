"""Data-loading workers that live on from one pass over the dataset to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import DATALOADER, TRANSFORMERS, Argument, Words
from autotune.techniques.num_workers import WITHOUT_DATASET


class PersistentWorkers(Technique):
    """`DataLoader(persistent_workers=True)`."""

    name: ClassVar[str] = "persistent_workers"
    summary: ClassVar[str] = "data-loading workers live on from epoch to epoch: saves time with short epochs"
    listed_choices: ClassVar[str] = "`false` `true`"
    applies: ClassVar[str] = "with workers"
    off: ClassVar[Choice] = False
    phase: ClassVar[Phase] = Phase.LOADER
    order: ClassVar[int] = 30
    keeps_random_masks: ClassVar[bool] = True
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_persistent_workers"),
        DATALOADER: Argument("persistent_workers"),
    }

    def support(self, setting: Setting) -> Support:
        """It applies to tasks with a dataset."""
        if setting.task.dataset() is None:
            return Support(choices=(False,), reason=WITHOUT_DATASET)
        return Support(choices=(False, True))

    def apply(self, build: Build, choice: Choice) -> None:
        """Keep the workers; DataLoader refuses the option without any."""
        if build.config["num_workers"]:
            build.loader_options["persistent_workers"] = True

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Only the first batches of each pass over the dataset wait less."""
        return Expectation(data=Factor(typical=0.97, spread=1.1))

    def is_redundant(self, config: Config) -> bool:
        """Without workers there is nothing to keep."""
        return config["num_workers"] == 0
