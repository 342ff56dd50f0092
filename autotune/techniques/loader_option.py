"""What the techniques of data loading have in common: each is an option of `DataLoader`, for tasks with a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor


class LoaderOption(Technique):
    """An option of `torch.utils.data.DataLoader`, passed on under the technique's name.

    Attributes:
        choices: where the task has a dataset.
        waiting: what it does to the time that training waits for samples.
        needs_workers: DataLoader refuses it without worker processes.
    """

    phase: ClassVar[Phase] = Phase.LOADER
    keeps_random_masks: ClassVar[bool] = True
    choices: ClassVar[tuple[Choice, ...]]
    waiting: ClassVar[Factor]
    needs_workers: ClassVar[bool] = False

    def support(self, setting: Setting) -> Support:
        """It applies to tasks with a dataset."""
        if setting.task.dataset() is None:
            return Support(choices=(self.off,), reason="the task has no train_dataset, so nothing is loaded")
        return Support(choices=self.choices)

    def apply(self, build: Build, choice: Choice) -> None:
        """Set the option."""
        if not self.needs_workers or build.config["num_workers"]:
            build.loader_options[self.name] = choice

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Training waits less for samples."""
        return Expectation(data=self.waiting)

    def is_redundant(self, config: Config) -> bool:
        """Without workers it does nothing where it needs them."""
        return self.needs_workers and config["num_workers"] == 0
