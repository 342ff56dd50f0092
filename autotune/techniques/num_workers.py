"""Worker processes that load data while the device computes; and the base class of all techniques of data loading."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import replace
from typing import ClassVar

from autotune.devices import linux
from autotune.devices.linux import processors
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Support, Technique
from autotune.techniques.frameworks import Argument, At, Lines, words
from autotune.units import MIB, plural

# of each worker: pages that it copied from the process it was forked from, and what a thread of that process takes to serve it. One to four
# took 8 to 34 MiB each, of small samples in tensors, NumPy's and text; a data set that holds more in each worker is learned from probes
WORKER_BYTES = 18 * MIB


class LoaderOption(Technique):
    """An option of `torch.utils.data.DataLoader` with the technique's name, for tasks with a dataset.

    Attributes:
        choices: the choices for a task with a dataset.
        needs_workers: whether DataLoader refuses the option without worker processes.
    """

    phase = Phase.LOADER
    keeps_random_masks = True
    needs_workers: ClassVar[bool] = False

    def why_not(self, setting: Setting) -> str:
        return "the task has no train_dataset, so nothing is loaded" if setting.task.dataset() is None else ""

    def is_redundant(self, config: Config) -> bool:
        """An option that needs workers does nothing without them."""
        return self.needs_workers and config["num_workers"] == 0

    def apply(self, build: Build, choice: Choice) -> None:
        if not self.needs_workers or build.config["num_workers"]:
            build.loader_options[self.name] = choice


class NumWorkers(LoaderOption):
    """`DataLoader(num_workers=...)`."""

    name = "num_workers"
    summary = "processes that load data: hide loading, take host memory and processors"
    listed_choices = "0, 1, 2, 4 ... processors"
    applies = "with a dataset"
    off = 0
    ordered = True
    order = 10
    loads_host = True
    likely = (2, 1)
    choices = (0, 1)
    # Workers hide the loading, unless they take processors that training needs.
    expected = Expectation(
        compute=Factor(spread=1.05),
        data=Factor(typical=0.4, spread=2.0),
        state=Factor(spread=1.2),
        untraced=Factor(spread=3.0),
    )
    frameworks = words(
        transformers=Argument("dataloader_num_workers"),
        dataloader=Argument("num_workers"),
        torch=Lines({At.LOADER: "num_workers={choice}, multiprocessing_context=start_method()"}),
    )

    def untraced_bytes(self, choice: Choice) -> int:
        return int(choice) * WORKER_BYTES

    def support(self, setting: Setting) -> Support:
        """0 and powers of two, up to the processors that this process may use; at most 1 for an iterable dataset."""
        from torch.utils.data import IterableDataset

        support = super().support(setting)
        if support.reason:
            return support
        if isinstance(setting.task.dataset(), IterableDataset):
            return replace(
                support, reason="every worker of an iterable dataset yields all of it, unless it shards itself"
            )
        most = math.ceil(min(len(processors()), linux.processor_quota() or math.inf))
        return Support(choices=(*self.choices, *(2**power for power in range(1, most.bit_length()))))

    def apply(self, build: Build, choice: Choice) -> None:
        """Give the loader its workers, started by `start_method`."""
        super().apply(build, choice)
        if method := start_method():
            build.loader_options["multiprocessing_context"] = method

    def label(self, choice: Choice) -> str:
        return plural(int(choice), "worker")


def start_method() -> str | None:
    """How workers are to be started: forked, or None where the user's code has chosen.

    Other ways to start a process, which are the default from Python 3.14 on, import the dataset's module by its name, and a
    model file has no such name.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return "fork" if chosen in (None, multiprocessing.get_all_start_methods()[0]) else None
