"""Techniques that choose what is trained. Their choices divide the space: configs of two of them are never compared."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from autotune.records.config import Choice
from autotune.techniques.base import Phase, Technique
from autotune.techniques.build import Build

if TYPE_CHECKING:
    from autotune.task import Task


class Partition(Technique):
    """Something of which each choice is another training, with a search, a baseline and a ranking of its own.

    It acts on the task, before anything is built. Inspection, trace and check are then those of the narrower task, in
    which nothing says that there are others. What `support` offers beside the baseline's choice is ranked beside it, and
    what it offers as optional only if the user includes it.
    """

    phase = Phase.TASK
    changes_learning = True
    off = "none"

    @abstractmethod
    def narrow(self, task: Task, choice: Choice) -> Task:
        """The task that trains `choice`, which is not `off`.

        Raises:
            ConfigError: the task has no such choice; building its model may raise that, too.
        """

    def named(self, task: Task, choice: Choice) -> Choice:
        """The name under which the task knows `choice`, where `off` has one of its own."""
        return choice

    def apply(self, build: Build, choice: Choice) -> None:
        """Put the narrower task in the place of the task."""
        build.task = self.narrow(build.task, choice)

    def validate(self, choice: Any) -> Choice:
        """A name; a whole number is one, too, as those of an `nn.Sequential` are."""
        if type(choice) is int:
            return str(choice)
        if not isinstance(choice, str) or not choice:
            raise ValueError("expected a name")
        return choice
