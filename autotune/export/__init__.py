"""The answer of a search in other words: a file's, a shell's, a framework's. One file an exporter.

Every exporter has a name: those of the files of this package, and the entry points of others.
"""

from __future__ import annotations

import contextlib
from functools import cache

from autotune import plugins
from autotune.errors import ConfigError, StudyError
from autotune.export.base import Export, Exporter, SearchedChoices
from autotune.records.result import Result
from autotune.study.reading import load_study

__all__ = ["Export", "Exporter", "export", "exporters", "of_result"]

GROUP = "autotune.exporters"


@cache
def exporters() -> dict[str, Exporter]:
    """Every exporter by its name.

    Raises:
        ConfigError: another package's cannot be used.
    """
    return plugins.find_plugins(__name__, Exporter, GROUP, ("name", "summary"))  # type: ignore[type-abstract]


def of_result(result: Result, to: str, *, force: bool = False) -> Export:
    """What `Result.export` returns: `export`, with the space of the answer's study where that can be read.

    Raises:
        ConfigError: as for `export`.
    """
    space: SearchedChoices = {}
    with contextlib.suppress(StudyError):  # moved away, or made on another machine
        space = load_study(result.storage, study=result.study).facts.space
    return export(result, to, space=space, force=force)


def export(result: Result, to: str, *, space: SearchedChoices | None = None, force: bool = False) -> Export:
    """An answer in the words of `to`.

    Args:
        space: technique -> choices that were searched, as `space` of a study's facts has them: some frameworks know
            only on and off, so that it matters whether the answer is the furthest that there was.
        force: also an answer that did not pass its comparison with plain fp32.

    Raises:
        ConfigError: there is no exporter of that name, it cannot say a command line, or the answer did not pass its comparison.
    """
    if result.doubt and not force:
        raise ConfigError(
            f"the answer of {result.study} was not shown to train as plain fp32 does: {result.doubt}; search again, or "
            "export it all the same with --force (in Python: force=True)"
        )
    known = exporters()
    if to not in known:
        there = "; ".join(f"{name}: {exporter.summary}" for name, exporter in known.items())
        raise ConfigError(f"{to!r} is not a known exporter; expected one of {there}")
    if result.command and not known[to].says_any_config:
        others = ", ".join(name for name, exporter in known.items() if exporter.says_any_config)
        raise ConfigError(
            f"the answer of {result.study} is a command line, whose script has words of its own, so {to} cannot say it; export its config "
            f"by --to {others}, or run it: {result.command}"
        )
    return known[to].export(result, space=space or {})
