"""Which of the task's architectures is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.errors import ConfigError
from autotune.records.config import Choice
from autotune.techniques import Setting
from autotune.techniques.base import Partition
from autotune.techniques.frameworks import At, Lines, words

if TYPE_CHECKING:
    from autotune.task import Task


class Variant(Partition):
    """The argument of the task's `build_model`."""

    name = "variant"
    summary = "architectures side by side: one ranking for each, no winner among them"
    listed_choices = "the names in `VARIANTS`; `none` is the first"
    applies = "where the model file names them, and has `build_model(variant)`"
    order = 10
    frameworks = words(torch=Lines({At.BUILD: "{choice}"}))

    def why_not(self, setting: Setting) -> str:
        return "" if setting.task.variants else "the task names no architectures (VARIANTS in a model file)"

    def choices_for(self, setting: Setting) -> tuple[Choice, ...]:
        return tuple(setting.task.variants or ())

    def narrow(self, task: Task, choice: Choice) -> Task:
        """The task whose first architecture is `choice`."""
        names = tuple(task.variants or ())
        if choice not in names:
            known = f"expected one of {', '.join(names)}" if names else "the task names none (VARIANTS in a model file)"
            raise ConfigError(f"variant={choice} is no architecture of the task; {known}")
        return task.with_other_models(variants=(choice, *(name for name in names if name != choice)))

    def named(self, task: Task, choice: Choice) -> Choice:
        """The first of the names, for `none`."""
        return task.variants[0] if task.variants and choice == self.off else choice
