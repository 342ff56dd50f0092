"""Worker processes that load data while the device computes."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique, whole_number
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import DATALOADER, TRANSFORMERS, Argument, Words


class NumWorkers(Technique):
    """`DataLoader(num_workers=...)`."""

    name: ClassVar[str] = "num_workers"
    summary: ClassVar[str] = "processes that load data: hide loading, take host memory and processors"
    listed_choices: ClassVar[str] = "0, 1, 2, 4 ... processors"
    applies: ClassVar[str] = "with a dataset"
    off: ClassVar[Choice] = 0
    phase: ClassVar[Phase] = Phase.LOADER
    ordered: ClassVar[bool] = True
    order: ClassVar[int] = 10
    keeps_random_masks: ClassVar[bool] = True
    likely: ClassVar[tuple[Choice, ...]] = (2, 1)
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_num_workers"),
        DATALOADER: Argument("num_workers"),
    }

    def support(self, setting: Setting) -> Support:
        """0 and powers of two, up to the processors that this process may use; at most 1 for an iterable dataset."""
        from torch.utils.data import IterableDataset

        dataset = setting.task.dataset()
        if dataset is None:
            return Support(choices=(0,), reason=WITHOUT_DATASET)
        if isinstance(dataset, IterableDataset):
            return Support(
                choices=(0, 1),
                reason="every worker of an iterable dataset yields all of it, unless it shards itself",
            )
        most = num_processors()
        workers = [1]
        while workers[-1] * 2 <= most:
            workers.append(workers[-1] * 2)
        return Support(choices=(0, *workers))

    def apply(self, build: Build, choice: Choice) -> None:
        """Give the loader its workers, forked unless the user's code has chosen otherwise.

        Other ways to start a process import the dataset's module by its name, and a model file has none: from
        Python 3.14 on they are the default.
        """
        build.loader_options["num_workers"] = choice
        if multiprocessing.get_start_method(allow_none=True) in (None, multiprocessing.get_all_start_methods()[0]):
            build.loader_options["multiprocessing_context"] = "fork"

    def label(self, choice: Choice) -> str:
        """`2 workers`."""
        return f"{choice} worker{'' if choice == 1 else 's'}"

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Workers hide the loading, unless they take the processors that train."""
        return Expectation(compute=Factor(spread=1.05), data=Factor(typical=0.4, spread=2.0), state=Factor(spread=1.2))

    def validate(self, choice: Any) -> Choice:
        """An integer of at least 0."""
        return whole_number(choice, 0)


WITHOUT_DATASET = "the task has no train_dataset, so nothing is loaded"


def num_processors() -> int:
    """How many processors this process may use: its affinity, or its control group's quota if that is less."""
    from autotune.devices import cgroup

    there_are = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.num_processors()
    return there_are if quota is None else max(1, min(there_are, math.ceil(quota)))
