"""How many batches each data-loading worker prepares ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.techniques.base import Expectation, Factor, Phase, Setting, Technique
from autotune.techniques.batch_size import positive_int
from autotune.techniques.num_workers import WITHOUT_DATASET

if TYPE_CHECKING:
    from autotune.session import Build


class PrefetchFactor(Technique):
    """`DataLoader(prefetch_factor=...)`."""

    name: ClassVar[str] = "prefetch_factor"
    summary: ClassVar[str] = "batches that each worker prepares ahead: evens out slow samples, takes host memory"
    off: ClassVar[Choice] = 2  # torch's own default
    phase: ClassVar[Phase] = Phase.LOADER
    ordered: ClassVar[bool] = True

    def support(self, setting: Setting) -> Support:
        """Tasks with a dataset."""
        if setting.task.dataset() is None:
            return Support(choices=(2,), reason=WITHOUT_DATASET)
        return Support(choices=(2, 4, 8))

    def apply(self, build: Build, choice: Choice) -> None:
        """Set the workers' queue; DataLoader refuses the option without workers."""
        if build.config["num_workers"]:
            build.loader_options["prefetch_factor"] = choice

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """A little less waiting where samples take unequally long."""
        return Expectation(data=Factor(typical=0.97, spread=1.1))

    def validate(self, choice: Any) -> Choice:
        """A positive integer."""
        return positive_int(choice)

    def is_redundant(self, config: Config) -> bool:
        """Without workers nothing is fetched ahead."""
        return config["num_workers"] == 0
