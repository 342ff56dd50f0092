"""Page-locked host memory, from which a GPU copies batches while it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import DATALOADER, TRANSFORMERS, Argument, Words
from autotune.techniques.num_workers import WITHOUT_DATASET


class PinMemory(Technique):
    """`DataLoader(pin_memory=True)`; the session copies without waiting."""

    name: ClassVar[str] = "pin_memory"
    summary: ClassVar[str] = "batches in page-locked memory: copies to the GPU overlap with computing"
    listed_choices: ClassVar[str] = "`false` `true`"
    applies: ClassVar[str] = "with a dataset, on a GPU"
    off: ClassVar[Choice] = False
    phase: ClassVar[Phase] = Phase.LOADER
    order: ClassVar[int] = 20
    keeps_random_masks: ClassVar[bool] = True
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_pin_memory"),
        DATALOADER: Argument("pin_memory"),
    }

    def support(self, setting: Setting) -> Support:
        """It applies to tasks with a dataset on CUDA."""
        if setting.device.kind != "cuda":
            return Support(choices=(False,), reason="there is no copy to a GPU to speed up")
        if setting.task.dataset() is None:
            return Support(choices=(False,), reason=WITHOUT_DATASET)
        return Support(choices=(False, True))

    def label(self, choice: Choice) -> str:
        """`pinned`, or `no pin_memory`."""
        return "pinned" if choice else super().label(choice)

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Training waits less for copies that overlap with it."""
        return Expectation(data=Factor(typical=0.9, spread=1.15))

    def apply(self, build: Build, choice: Choice) -> None:
        """Let the loader pin what it yields."""
        build.loader_options["pin_memory"] = True
