"""Runners on other machines, found by name: `autotune search MODEL --runner NAME`. Each is a file of this room with an `Elsewhere`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import ClassVar

from autotune import plugins
from autotune.errors import ConfigError
from autotune.records.options import SearchOptions
from autotune.runners.runner import Runner
from autotune.task.source import TaskSource

GROUP = "autotune.runners"


class Elsewhere(ABC):
    """Opens a kind of runner. Another package offers one as an entry point in the group `autotune.runners`.

    Attributes:
        name: the NAME of `--runner NAME[:WHERE]`.
        summary: one line for the help.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def runner(self, source: TaskSource, options: SearchOptions, where: str, logs: Path) -> Runner:
        """A runner of the task, not yet entered.

        Args:
            options: of which `device`, `devices`, `slots` and `budget_s` are the runner's own.
            where: what the user wrote behind the name and its colon; empty for nothing.
            logs: folder for what the user's code prints.

        Raises:
            ConfigError, DeviceError: an option cannot be had there.
        """


@cache
def kinds() -> dict[str, Elsewhere]:
    """Every kind by its name.

    Raises:
        ConfigError: one of another package cannot be used.
    """
    return plugins.find_plugins(__package__, Elsewhere, GROUP, ("name", "summary"))  # type: ignore[type-abstract]


def runner_elsewhere(text: str, source: TaskSource, options: SearchOptions, logs: Path) -> Runner:
    """The runner that `NAME` or `NAME:WHERE` stands for; otherwise as `Elsewhere.runner`.

    Raises:
        ConfigError: there is none of that name.
    """
    name, _, where = text.partition(":")
    if name not in kinds():
        there = "; ".join(f"{name}: {kind.summary}" for name, kind in kinds().items())
        raise ConfigError(
            f"--runner {text!r}: {name!r} is no known runner; expected NAME or NAME:WHERE, with one of {there}"
        )
    return kinds()[name].runner(source, options, where, logs)
