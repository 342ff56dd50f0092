"""What rooms are given from above: the work behind public methods whose classes live below it.

`print(result)` is rendered by `report`, `result.export` by `export`, `Task.from_loader` by `integrations`. None of these classes
imports them: `autotune/__init__`, which runs before every other file of the package, gives it to them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
_GIVEN: dict[str, Function] = {}


def give(**functions: Function) -> None:
    """Give the work behind public methods, by name."""
    _GIVEN.update(functions)


def given(name: str) -> Function:
    """The work behind a public method.

    Raises:
        KeyError: nothing was given by that name.
    """
    return _GIVEN[name]
