"""How many batches each data-loading worker prepares ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique, whole_number
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import DATALOADER, TRANSFORMERS, Argument, Words
from autotune.techniques.num_workers import WITHOUT_DATASET


class PrefetchFactor(Technique):
    """`DataLoader(prefetch_factor=...)`."""

    name: ClassVar[str] = "prefetch_factor"
    summary: ClassVar[str] = "batches that each worker prepares ahead: evens out slow samples, takes host memory"
    listed_choices: ClassVar[str] = "2 4 8"
    applies: ClassVar[str] = "with workers"
    off: ClassVar[Choice] = 2  # torch's own default
    phase: ClassVar[Phase] = Phase.LOADER
    ordered: ClassVar[bool] = True
    order: ClassVar[int] = 40
    keeps_random_masks: ClassVar[bool] = True
    # Both refuse a number without workers, so torch's own default is left unset.
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_prefetch_factor", unset=2),
        DATALOADER: Argument("prefetch_factor", unset=2),
    }

    def support(self, setting: Setting) -> Support:
        """It applies to tasks with a dataset."""
        if setting.task.dataset() is None:
            return Support(choices=(2,), reason=WITHOUT_DATASET)
        return Support(choices=(2, 4, 8))

    def apply(self, build: Build, choice: Choice) -> None:
        """Set the workers' queue; DataLoader refuses the option without workers."""
        if build.config["num_workers"]:
            build.loader_options["prefetch_factor"] = choice

    def label(self, choice: Choice) -> str:
        """`prefetch 4`."""
        return f"prefetch {choice}"

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Training waits a little less where samples take unequally long."""
        return Expectation(data=Factor(typical=0.97, spread=1.1))

    def validate(self, choice: Any) -> Choice:
        """A positive integer."""
        return whole_number(choice, 1)

    def is_redundant(self, config: Config) -> bool:
        """Without workers nothing is fetched ahead."""
        return config["num_workers"] == 0
