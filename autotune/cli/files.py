"""The files that a command reads and writes: the project's, configs, and outputs, which never replace a file that is read.

The options that a command runs with are its flags, else those that the study was made with, else the project's `[tool.autotune]`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from autotune.cli.parser import COMMANDS, options_given
from autotune.errors import ConfigError
from autotune.records.config import BATCH_KEYS
from autotune.records.options import (
    CHOICES,
    DEVICE,
    DEVICES,
    EVAL,
    EXCLUDE,
    FIX,
    FRAMEWORKS,
    GLOBAL_BATCH,
    GPU,
    INCLUDE,
    ONE_DEVICE,
    ONE_SLOT,
    SLOTS,
    TRAIN_EPOCHS,
    TRAIN_STEPS,
    CommandOptions,
    Option,
    RunOptions,
    table,
)

FILE = "pyproject.toml"
_EXAMPLE = '{"batch_size": 16}'
SEVERAL = re.compile(r"\d+(?:,\d+)+")  # of devices, the numbers that a search of a model file compares
_INSTEAD = ((GPU, DEVICE), (TRAIN_STEPS, TRAIN_EPOCHS))  # of each pair a command takes one


def read_options(
    options: argparse.Namespace, of: type[RunOptions], of_study: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options that were given: by flags, else those that the study was made with, else those of the project's file."""
    project = read_project(Path.cwd())
    possible = _possible(project.options, options)
    told_by_study = {} if of_study is None else table(RunOptions)
    names = (option.name for option in table(of) if option not in told_by_study)
    found = {name: possible[name] for name in names if name in possible}
    asked = {**found, **(of_study or {}), **options_given(options, of)}
    told = ", ".join(f"{name} = {value}" for name, value in found.items() if asked[name] is value)
    if told and not getattr(options, "quiet", False):
        print(f"note: {project.file} asks for {told}", file=sys.stderr)
    return asked


def _possible(project: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What a project asks for, without the options that this form of the command, or a flag of it, rules out."""
    left_out = {other.name for pair in _INSTEAD for one, other in permutations(pair) if one.name in options}
    replay, script, runner = (getattr(options, name, None) for name in ("replay", "script", "runner"))
    searches_file = options.command == "search" and replay is script is runner is None
    if SEVERAL.fullmatch(project.get(DEVICES.name, "")) and not searches_file:
        left_out |= {DEVICES.name}
    if getattr(options, DEVICES.name, ONE_DEVICE) != ONE_DEVICE:  # a slot is one device
        left_out |= {SLOTS.name}
    if getattr(options, SLOTS.name, ONE_SLOT) != ONE_SLOT:
        left_out |= {DEVICES.name}
    if replay is not None:  # the table has devices and a global batch, and no dataset
        left_out |= {DEVICE.name, DEVICES.name, SLOTS.name, GLOBAL_BATCH.name, TRAIN_EPOCHS.name, EVAL.name}
    elif script is not None:  # only the keys of its own config are known there, and it chooses its devices itself
        left_out |= {SLOTS.name, FRAMEWORKS.name, TRAIN_EPOCHS.name, EVAL.name}
        choices = options_given(options, CommandOptions).get(CHOICES.name, project.get(CHOICES.name, {}))
        keys = {*BATCH_KEYS, *CHOICES.kind.read(choices)}
        naming = (option for option in (FIX, INCLUDE, EXCLUDE) if option.name in project)
        left_out |= {option.name for option in naming if not keys.issuperset(option.kind.read(project[option.name]))}
    return {name: value for name, value in project.items() if name not in left_out}


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
    that it has. Options that a command requires cannot be given there.

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
        for command in COMMANDS
        if command.options is not None
        for option, default in table(command.options).items()
        if default is not MISSING
    }


def read_config(text: str) -> dict[str, Any]:
    """A config dict from JSON text or a file; the whole JSON document of a search will do, too.

    Raises:
        ConfigError: neither JSON nor a readable file with a JSON object.
    """
    is_json = text.lstrip().startswith("{")
    try:
        content = text if is_json else Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"--config {text!r} cannot be read: {why}; expected a file, or an object such as {_EXAMPLE}"
        ) from None
    try:
        config = json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--config {text!r} is not valid JSON: {error}; expected an object such as {_EXAMPLE}"
        ) from None
    if isinstance(config, dict) and isinstance(config.get("result"), dict):  # of `show --json`
        config = config["result"]
    if isinstance(config, dict) and isinstance(config.get("config"), dict):
        config = config["config"]
    if not isinstance(config, dict):
        raise ConfigError(f"--config {text!r} is a JSON {type(config).__name__}; expected an object such as {_EXAMPLE}")
    return config


def require_writable(path: Path, flag: str) -> None:
    """Raise ConfigError where an output cannot be written: better before a search than after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(
            f"{flag} {path} cannot be written; expected a file in a folder that exists and may be written to"
        )


def require_other(path: Path, flag: str, what: str, *read: Path | str | None) -> None:
    """Raise ConfigError where an output is one of the files that the command reads.

    Args:
        what: says what these files are.
    """
    for file in read:
        if file and path.exists() and Path(file).is_file() and path.samefile(file):
            raise ConfigError(f"{flag} {path} is {what} itself; expected another file")


def write(path: Path, flag: str, content: str) -> None:
    """Write an output. Raises ConfigError where that fails."""
    try:
        path.write_text(content, encoding="utf-8", errors="surrogateescape")  # a file's name may be no UTF-8
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}; the study keeps the result") from None
