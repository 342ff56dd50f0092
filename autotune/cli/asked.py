"""Which options a command runs with: its flags, else what a study was asked, else what the project's file asks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

from autotune.cli.parser import options_given
from autotune.cli.project import read_project
from autotune.records.batch_plan import BATCH_KEYS
from autotune.records.options import (
    CHOICES,
    DEVICE,
    EVAL,
    EXCLUDE,
    FIX,
    FRAMEWORKS,
    GLOBAL_BATCH,
    GPU,
    INCLUDE,
    TRAIN_EPOCHS,
    TRAIN_STEPS,
    CommandOptions,
    RunOptions,
    table,
)

_INSTEAD = ((GPU, DEVICE), (TRAIN_STEPS, TRAIN_EPOCHS))  # one of the two is given


def read_options(
    options: argparse.Namespace, of: type[RunOptions], of_study: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options that were given: by flags, else as a study was asked, else by the project's file."""
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
    if getattr(options, "replay", None) is not None:  # the table has a device and a global batch, and no dataset
        left_out |= {DEVICE.name, GLOBAL_BATCH.name, TRAIN_EPOCHS.name, EVAL.name}
    elif getattr(options, "script", None) is not None:  # only the keys of its own config are known there
        left_out |= {FRAMEWORKS.name, TRAIN_EPOCHS.name, EVAL.name}
        choices = options_given(options, CommandOptions).get(CHOICES.name, project.get(CHOICES.name, {}))
        keys = {*BATCH_KEYS, *CHOICES.kind.read(choices)}
        naming = (option for option in (FIX, INCLUDE, EXCLUDE) if option.name in project)
        left_out |= {option.name for option in naming if not keys.issuperset(option.kind.read(project[option.name]))}
    return {name: value for name, value in project.items() if name not in left_out}
