"""Which of the task's architectures is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from autotune.errors import ConfigError
from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.build import Setting
from autotune.techniques.frameworks import TORCH, At, Lines, Words
from autotune.techniques.partition import Partition

if TYPE_CHECKING:
    from autotune.task import Task


class Variant(Partition):
    """The argument of the task's `build_model`."""

    name = "variant"
    summary = "architectures side by side: one ranking for each, no winner among them"
    listed_choices = "the names in `VARIANTS`; `none` is the first"
    applies = "where the model file names them, and has `build_model(variant)`"
    order = 10
    frameworks: ClassVar[Mapping[str, Words]] = {TORCH: Lines({At.BUILD: "{choice}"})}

    def support(self, setting: Setting) -> Support:
        """The names that the task gives."""
        if not setting.task.variants:
            return Support(choices=(self.off,), reason="the task names no architectures (VARIANTS in a model file)")
        return Support(choices=tuple(setting.task.variants))

    def narrow(self, task: Task, choice: Choice) -> Task:
        """The task whose first architecture is `choice`."""
        names = tuple(task.variants or ())
        if choice not in names:
            expected = (
                f"expected one of {', '.join(names)}" if names else "the task names none (VARIANTS in a model file)"
            )
            raise ConfigError(f"variant={choice} is no architecture of the task; {expected}")
        return task.with_other_models(variants=(choice, *(name for name in names if name != choice)))

    def named(self, task: Task, choice: Choice) -> Choice:
        """The first of the names, for `none`."""
        return task.variants[0] if task.variants and choice == self.off else choice
