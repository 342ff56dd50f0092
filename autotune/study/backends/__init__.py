"""The kinds of storage that several searches may write to at once: a file each, found because it is there."""

from __future__ import annotations

from functools import cache

from autotune import plugins
from autotune.study.backends.base import SharedBackend, scheme_of

GROUP = "autotune.backends"  # entry points of other distributions


@cache
def _shared_backends() -> dict[str, SharedBackend]:
    """What several searches may write to at once, by the scheme of its URLs."""
    return plugins.find_plugins(__name__, SharedBackend, GROUP, ("name", "example", "purpose"))  # type: ignore[type-abstract]


def shared_backend_of(url: str) -> SharedBackend | None:
    """The kind of storage that a URL names; None where one search writes to it at a time: an SQLite file, another database.

    Raises:
        ConfigError: another package's kind of storage cannot be used.
    """
    return _shared_backends().get(scheme_of(url))


def ways_to_share() -> str:
    """How several searches can share one study, in words."""
    return ", or ".join(f"--storage {one.example} ({one.purpose})" for one in _shared_backends().values())
