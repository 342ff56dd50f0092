"""What the techniques of data loading have in common: each is an option of `DataLoader`, for tasks with a dataset."""

from __future__ import annotations

from typing import ClassVar

from autotune.records.config import Choice, Config
from autotune.techniques import Build, Phase, Setting, Technique


class LoaderOption(Technique):
    """An option of `torch.utils.data.DataLoader`, passed on under the technique's name.

    Attributes:
        choices: where the task has a dataset.
        needs_workers: DataLoader refuses it without worker processes.
    """

    phase = Phase.LOADER
    keeps_random_masks = True
    needs_workers: ClassVar[bool] = False

    def why_not(self, setting: Setting) -> str:
        return "the task has no train_dataset, so nothing is loaded" if setting.task.dataset() is None else ""

    def is_redundant(self, config: Config) -> bool:
        """Without workers it does nothing where it needs them."""
        return self.needs_workers and config["num_workers"] == 0

    def apply(self, build: Build, choice: Choice) -> None:
        if not self.needs_workers or build.config["num_workers"]:
            build.loader_options[self.name] = choice
