"""What all integrations share: a live model as a task wants it, a framework's arguments read, and an answer said in them.

Each probe gets a fresh copy of the user's model and optimizer. The arguments that are read are the baseline.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune import api
from autotune.devices import TYPES
from autotune.errors import ConfigError, TaskError
from autotune.export.base import arguments
from autotune.group import launched_world
from autotune.integrations.launched import search_by_first
from autotune.records.config import Choice, World
from autotune.records.result import Result
from autotune.report.figures import said_of
from autotune.report.live import listeners_of
from autotune.study.place import shown_of
from autotune.task import Task
from autotune.task.adapters import keep_modes
from autotune.task.loading import runs_model_file
from autotune.techniques import Phase, find_techniques
from autotune.techniques.frameworks import BATCH
from autotune.tuning.events import Listener, Listeners


class LiveModel:
    """Copies of a model and of its optimizer. Neither is trained on, moved or otherwise changed.

    Args:
        optimizer: of the model's parameters; its state is left behind.
        keeps_modes: parts that are in evaluation mode stay so where the model itself is in training mode.

    Raises:
        TaskError: the model is wrapped in DistributedDataParallel or DataParallel, or the optimizer has parameters of something else.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, keeps_modes: bool = False
    ) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            raise TaskError(f"the model is wrapped in {type(model).__name__}; give the model itself, model.module")
        self.model = model
        self._keeps_modes = keeps_modes
        self._parameters = dict(model.named_parameters())
        self._optimizer = None if optimizer is None else (type(optimizer), _attributes(model, optimizer))

    def build_model(self) -> torch.nn.Module:
        """A copy, without gradients."""
        model = copy.deepcopy(self.model)
        return keep_modes(model) if self._keeps_modes else model

    def configure_optimizers(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer, of a copy's parameters instead."""
        assert self._optimizer is not None
        kind, attributes = self._optimizer
        parameters = dict(model.named_parameters(remove_duplicate=False))
        others: dict[int, Any] = {id(own): parameters[name] for name, own in self._parameters.items()}
        others[id(self.model)] = model
        optimizer: torch.optim.Optimizer = object.__new__(kind)
        # the base class's own: it sets attributes and adds what it needs beside them
        torch.optim.Optimizer.__setstate__(optimizer, {**copy.deepcopy(attributes, others), "state": defaultdict(dict)})
        return set_to_train(optimizer)

    def task_identity(self) -> str:
        """What distinguishes this model and optimizer from others in the same script."""
        shapes = [tuple(parameter.shape) for parameter in self.model.parameters()]
        if self._optimizer is None:
            return f"{self.model!r} {shapes}"
        kind, attributes = self._optimizer
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in attributes["param_groups"]
        ]
        return f"{self.model!r} {shapes} {kind.__module__}.{kind.__qualname__} {groups}"


def _attributes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's attributes as plain data, since pickling or copying it keeps only those that torch itself defines.

    Its state is left behind, and so is what others have hung on it: hooks, and the `step` of a learning-rate scheduler.
    """
    own = {id(parameter) for parameter in model.parameters()}
    known = all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    if not known:
        raise TaskError(
            f"the {type(optimizer).__name__} has parameters that the {type(model).__name__} does not have; expected an "
            "optimizer of this model alone, made after any part of the model was replaced: a loss with parameters of "
            "its own belongs into the model"
        )
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "step") and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }


def set_to_train(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, in training mode where it has modes: those that need no schedule refuse to step in another."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def listeners_here(listeners: Sequence[Listener] | None) -> Sequence[Listener]:
    """Who watches in this process: of several that train together, the first alone tells the user."""
    return listeners_of([] if launched_world().rank else listeners)


def name_of(device: torch.device) -> str:
    """The name of a device that a framework trains on: some give the CPU the number of the process (`cpu:1`)."""
    known = TYPES.get(device.type)
    return device.type if known is not None and not known.capabilities.own_processors else str(device)


def batch_of_all(samples: int) -> int:
    """The samples of an optimizer step over all processes: a launched script states one process's share, a model file the whole."""
    return samples if runs_model_file() else samples * launched_world().size


def read(
    framework: str, given: Mapping[str, Any], task: Task | None = None, model: torch.nn.Module | None = None
) -> dict[str, Choice]:
    """The choices that a framework's arguments make, as a partial config. What they do not say is left out.

    Args:
        task, model: tell what "all of the model" means, where an argument is only on or off. The model is looked at, not changed.
    """
    found: dict[str, Choice | None] = {}
    for name, words in BATCH.items():
        found[name] = words[framework].read(given) if framework in words else None
    for name, technique in find_techniques().items():
        if technique.phase is Phase.SPREAD and launched_world().size == 1:
            continue  # such arguments change nothing then
        found[name] = technique.read(framework, given)
        if found[name] is None and task is not None and model is not None and framework in technique.frameworks:
            whole = technique.recomputation(task, model, technique.off)
            found[name] = None if whole is None else technique.read(framework, given, (technique.off, whole.each))
    return {name: choice for name, choice in found.items() if choice is not None}


def techniques_saying(framework: str, argument: str) -> list[str]:
    """The techniques that write this argument of the framework even when they are off."""
    techniques = find_techniques().values()
    return [each.name for each in techniques if argument in (each.write(framework, each.off) or {})]


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

    In a script that was launched in several processes rank 0 searches on the devices of all, and all have the answer. How the model
    is spread over them stays as the script has it.

    Args:
        device: on which this process trains, unless the options have another or a runner of their own.

    Raises:
        AutotuneError: as `autotune.search` does.
    """
    world, listeners = launched_world(), listeners_of(listeners)
    if "devices" in options:
        raise ConfigError(
            "devices: a search from a script is of the devices that the script trains on; leave the option out, and start the script "
            "on as many as it is to have: torchrun --nproc-per-node 2, say"
        )
    options = {"frameworks": tuple(frameworks), **options}
    has_own = options.get("runner") is not None
    if world.size == 1:
        return _search(task, options if has_own else {"device": device, **options}, listeners)
    kept = [name for name, each in find_techniques().items() if each.phase is Phase.SPREAD]
    options["exclude"] = (*options.get("exclude", ()), *(name for name in kept if name not in options.get("fix", ())))
    device = options.pop("device", device)

    def search_on(devices: str) -> Result:
        """Search on the devices of all."""
        said = [f"{name}={choice}" for name, choice in (task.baseline or {}).items() if name in kept]
        spread = ", ".join(said) or "copies of it, whose gradients are averaged"
        Listeners(listeners).tell(f"how the model is spread over the processes stays as the script has it: {spread}")
        return _search(task, options if has_own else {"devices": devices, **options}, listeners)

    return search_by_first(search_on, device, world)


def _search(task: Task, options: Mapping[str, Any], listeners: Sequence[Listener]) -> Result:
    result = api.search(task, listeners=listeners, **options)
    found = said_of(result)
    gain = "".join((f", {found.gain}" if found.gain else "", f" ({found.sure})" if found.sure else ""))
    told = ", ".join(f"{name}={choice}" for name, choice in find_changes(task, result).items()) or "nothing to change"
    study = f'{shown_of(result.storage)} --study "{result.study}"'
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
    changed = replace(result, config=found)
    said, unsaid = arguments(changed, space, frameworks, "no argument says it", with_defaults=True)
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
    world = World(size=result.subject.num_processes)
    return find_techniques().complete(task.baseline or {}, global_batch=task.global_batch, world=world).as_dict()
