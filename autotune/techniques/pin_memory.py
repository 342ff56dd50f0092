"""Page-locked host memory, from which a GPU copies batches while it computes."""

from __future__ import annotations

from autotune.records.config import Choice
from autotune.techniques import Expectation, Factor, Setting, Switch
from autotune.techniques.frameworks import Argument, At, Lines, words
from autotune.techniques.num_workers import LoaderOption


class PinMemory(Switch, LoaderOption):
    """`DataLoader(pin_memory=True)`; the session copies without waiting."""

    name = "pin_memory"
    summary = "batches in page-locked memory: copies to the GPU overlap with computing"
    applies = "with a dataset, on a GPU"
    order = 20
    expected = Expectation(data=Factor(typical=0.9, spread=1.15))
    frameworks = words(
        transformers=Argument("dataloader_pin_memory"),
        dataloader=Argument("pin_memory"),
        torch=Lines({At.LOADER: "pin_memory={choice}"}),
    )

    def label(self, choice: Choice) -> str:
        return "pinned" if choice else super().label(choice)

    def why_not(self, setting: Setting) -> str:
        page_locked = setting.device.capabilities.page_locked
        return super().why_not(setting) if page_locked else "there is no copy to a GPU to speed up"
