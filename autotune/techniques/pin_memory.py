"""Page-locked host memory, from which a GPU copies batches while it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Expectation, Factor, Phase, Setting, Technique
from autotune.techniques.num_workers import WITHOUT_DATASET

if TYPE_CHECKING:
    from autotune.session import Build


class PinMemory(Technique):
    """`DataLoader(pin_memory=True)`; the session copies without waiting."""

    name: ClassVar[str] = "pin_memory"
    summary: ClassVar[str] = "batches in page-locked memory: copies to the GPU overlap with computing"
    off: ClassVar[Choice] = False
    phase: ClassVar[Phase] = Phase.LOADER

    def support(self, setting: Setting) -> Support:
        """Tasks with a dataset on CUDA."""
        if setting.device.kind != "cuda":
            return Support(choices=(False,), reason="there is no copy to a GPU to speed up")
        if setting.task.dataset() is None:
            return Support(choices=(False,), reason=WITHOUT_DATASET)
        return Support(choices=(False, True))

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Copies that overlap wait less."""
        return Expectation(data=Factor(typical=0.9, spread=1.15))

    def apply(self, build: Build, choice: Choice) -> None:
        """Let the loader pin what it yields."""
        build.loader_options["pin_memory"] = True
