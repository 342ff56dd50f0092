"""Page-locked host memory, from which a GPU copies batches while it computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Switch
from autotune.techniques.build import Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import DATALOADER, TORCH, TRANSFORMERS, Argument, At, Lines, Words
from autotune.techniques.loader_option import LoaderOption


class PinMemory(Switch, LoaderOption):
    """`DataLoader(pin_memory=True)`; the session copies without waiting."""

    name = "pin_memory"
    summary = "batches in page-locked memory: copies to the GPU overlap with computing"
    applies = "with a dataset, on a GPU"
    order = 20
    expected = Expectation(data=Factor(typical=0.9, spread=1.15))
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Argument("dataloader_pin_memory"),
        DATALOADER: Argument("pin_memory"),
        TORCH: Lines({At.LOADER: "pin_memory={choice}"}),
    }

    def support(self, setting: Setting) -> Support:
        """It applies to tasks with a dataset on CUDA."""
        if not setting.device.capabilities.page_locked:
            return Support(choices=(False,), reason="there is no copy to a GPU to speed up")
        return super().support(setting)

    def label(self, choice: Choice) -> str:
        return "pinned" if choice else super().label(choice)
