"""What a project asks of all its searches and runs: `[tool.autotune]` in the nearest `pyproject.toml`, below the flags."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.records.options import (
    CommandOptions,
    ExplainOptions,
    Option,
    PredictOptions,
    ProbeOptions,
    SweepOptions,
    VerifyOptions,
    table,
)

FILE = "pyproject.toml"
_CLASSES = (CommandOptions, ProbeOptions, VerifyOptions, PredictOptions, ExplainOptions, SweepOptions)


@dataclass(frozen=True, kw_only=True)
class Project:
    """The options that a project's file gives.

    Attributes:
        file: where they stand; None where no file gives any.
        options: by name, as the Python API takes them.
    """

    file: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def read_project(folder: Path) -> Project:
    """The options in the `pyproject.toml` of a folder or, where it has none, of the nearest folder above it that has one.

    A key is a flag without its dashes, and a value what the flag or the Python API takes. Each command takes the options
    that it has. An option that a command must be given is not among them.

    Raises:
        ConfigError: the file cannot be read, or gives an unknown option or a value that is not possible.
    """
    file = next((found for at in (folder, *folder.parents) if (found := at / FILE).is_file()), None)
    if file is None:
        return Project()
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; [tool.autotune] is looked for there") from None
    asked = tool.get("autotune", {}) if isinstance(tool, dict) else tool
    if not isinstance(asked, dict):
        raise ConfigError(f"{file}: [tool.autotune] is {asked!r}; expected a table of options, such as budget = '2m'")
    known = _known()
    for key, value in asked.items():
        if key not in known:
            near = difflib.get_close_matches(key.replace("_", "-"), known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise ConfigError(f"{file}: [tool.autotune] {key}: there is no such option; {meant}")
        try:
            known[key].kind.read(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{file}: [tool.autotune] {key}: {error}") from None
    return Project(file=file, options={known[key].name: value for key, value in asked.items()}) if asked else Project()


def _known() -> dict[str, Option]:
    """The options that a project can give, by the key that it gives them under."""
    return {
        option.flag.removeprefix("--"): option
        for options in _CLASSES
        for option, default in table(options).items()
        if default is not MISSING
    }
