"""Data-loading workers that live on from one pass over the dataset to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.techniques.base import Expectation, Factor, Phase, Setting, Technique
from autotune.techniques.num_workers import WITHOUT_DATASET

if TYPE_CHECKING:
    from autotune.session import Build


class PersistentWorkers(Technique):
    """`DataLoader(persistent_workers=True)`."""

    name: ClassVar[str] = "persistent_workers"
    summary: ClassVar[str] = "data-loading workers are started once, not once per epoch: saves time with short epochs"
    off: ClassVar[Choice] = False
    phase: ClassVar[Phase] = Phase.LOADER

    def support(self, setting: Setting) -> Support:
        """Tasks with a dataset."""
        if setting.task.dataset() is None:
            return Support(choices=(False,), reason=WITHOUT_DATASET)
        return Support(choices=(False, True))

    def apply(self, build: Build, choice: Choice) -> None:
        """Keep the workers; DataLoader refuses the option without any."""
        if build.config["num_workers"]:
            build.loader_options["persistent_workers"] = True

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Only the first batches of a pass over the dataset wait less."""
        return Expectation(data=Factor(typical=0.97, spread=1.1))

    def is_redundant(self, config: Config) -> bool:
        """Without workers there is nothing to keep."""
        return config["num_workers"] == 0
