"""A framework's arguments read as a baseline, and an answer said in them: what all integrations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune import api
from autotune.errors import ConfigError
from autotune.export.arguments import arguments
from autotune.integrations.live import refuse_several_processes
from autotune.records.config import Choice
from autotune.records.result import Result
from autotune.report.gain import said_of
from autotune.report.live import listeners_of
from autotune.task import Task
from autotune.techniques import find_techniques
from autotune.techniques.frameworks import BATCH
from autotune.tuning.events import Listener, Listeners

if TYPE_CHECKING:
    import torch


def read(
    framework: str, given: Mapping[str, Any], task: Task | None = None, model: torch.nn.Module | None = None
) -> dict[str, Choice]:
    """The choices that a framework's arguments make, as a partial config. What they do not say is left out.

    Args:
        task, model: tell what "all of the model" means, where arguments know no more than on and off. The model is looked at.
    """
    found: dict[str, Choice | None] = {}
    for name, words in BATCH.items():
        found[name] = words[framework].read(given) if framework in words else None
    for name, technique in find_techniques().items():
        found[name] = technique.read(framework, given)
        if found[name] is None and task is not None and model is not None and framework in technique.frameworks:
            whole = technique.recomputation(task, model, technique.off)
            found[name] = None if whole is None else technique.read(framework, given, (technique.off, whole.each))
    return {name: choice for name, choice in found.items() if choice is not None}


def plain(framework: str) -> dict[str, Any]:
    """The framework's arguments for plain training: every technique off that they can say."""
    said: dict[str, Any] = {}
    for technique in find_techniques().values():
        said |= technique.write(framework, technique.off) or {}
    return said


def search(
    task: Task,
    frameworks: Sequence[str],
    options: Mapping[str, Any],
    listeners: Sequence[Listener] | None = None,
    *,
    device: str = "auto",
) -> Result:
    """Search what some frameworks can say. Progress and answer go to stderr unless listeners take them.

    Args:
        device: on which the user trains, unless the options have another or a runner of their own.

    Raises:
        AutotuneError: as `autotune.search` does.
    """
    refuse_several_processes()
    named: dict[str, Any] = {"frameworks": tuple(frameworks)}
    if options.get("runner") is None:
        named["device"] = device
    listeners = listeners_of(listeners)
    result = api.search(task, listeners=listeners, **{**named, **options})
    found = said_of(result)
    gain = "".join((f", {found.gain}" if found.gain else "", f" ({found.sure})" if found.sure else ""))
    told = ", ".join(f"{name}={choice}" for name, choice in find_changes(task, result).items()) or "nothing to change"
    study = f'{result.storage.removeprefix("sqlite:///")} --study "{result.study}"'
    Listeners(listeners).tell(f"{found.verdict}{gain}: {told}; `autotune show {study}` tells why")
    return result


def find_changes(task: Task, result: Result) -> dict[str, Choice]:
    """The answer's choices that differ from the baseline's."""
    before = _before(task, result)
    return {name: choice for name, choice in result.config.items() if choice != before[name]}


def words_of_changes(task: Task, result: Result, frameworks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the answer changes of the baseline: framework -> arguments.

    Raises:
        ConfigError: an option asked for something that none of the frameworks can say.
    """
    before, found = _before(task, result), find_changes(task, result)
    space = {name: (before[name], choice) for name, choice in found.items()}
    said, unsaid = arguments(replace(result, config=found), space, frameworks, "no argument says it")
    require_said(unsaid)
    for words in said.values():
        words.pop("shuffle", None)  # as it was
    return said


def require_said(unsaid: Mapping[str, str]) -> None:
    """Raise ConfigError where a part of the answer has no words. The batch size for evaluation is in the result."""
    if names := [name for name in unsaid if name != "eval_batch_size"]:
        raise ConfigError(
            f"no argument says {' and '.join(names)}, which an option asked for; leave it out, or train with "
            "autotune.prepare"
        )


def _before(task: Task, result: Result) -> Mapping[str, Choice]:
    if result.baseline is not None:
        return result.baseline.config
    return find_techniques().complete(task.baseline or {}, global_batch=task.global_batch).as_dict()
