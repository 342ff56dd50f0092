"""A search as experiment trackers know it. One file a tracker; entry points of other packages bring more."""

from __future__ import annotations

from functools import cache

from autotune import plugins
from autotune.errors import ConfigError
from autotune.trackers.base import Answer, Point, Start, Tracker

__all__ = ["Answer", "Point", "Start", "Tracker", "tracker", "trackers"]

GROUP = "autotune.trackers"


@cache
def trackers() -> dict[str, type[Tracker]]:
    """Every tracker by its name.

    Raises:
        ConfigError: another package's cannot be used.
    """
    found = plugins.find_plugins(__name__, Tracker, GROUP, ("name", "summary", "package", "install"))  # type: ignore[type-abstract]
    return {name: type(tracker) for name, tracker in found.items()}


def tracker(text: str) -> Tracker:
    """The tracker that `NAME` or `NAME:WHERE` stands for.

    Raises:
        ConfigError: there is none of that name.
    """
    name, _, where = text.partition(":")
    if name not in trackers():
        there = "; ".join(f"{name}: {kind.summary}" for name, kind in trackers().items())
        raise ConfigError(
            f"--track {text!r}: {name!r} is not a known tracker; expected NAME or NAME:WHERE, with one of {there}"
        )
    return trackers()[name](where)
