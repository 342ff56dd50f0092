"""Inspects a task in a process of its own: its facts and the techniques that apply to it, as plain data."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from autotune.coupling.compare import find_coupling
from autotune.coupling.moved import moved_by_passes
from autotune.coupling.samples import TypicalSamples
from autotune.devices import Device, open_device
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import ConfigError, TaskError, in_one_line
from autotune.probe.batch_support import batch_support
from autotune.records.check import Coupling
from autotune.records.config import (
    ACCUMULATION,
    ALONE,
    BATCH_SIZE,
    DEFAULT_BATCH_SIZE,
    BatchPlan,
    Choice,
    Config,
    World,
    largest_batch_size,
    share_of,
)
from autotune.records.device import Calibration, Communicators
from autotune.records.inspection import BatchSupport, Inspection, Layer, LossKind, ModelSignature, Support
from autotune.records.outcome import COMPARING, Progress
from autotune.task import Task, adapters, losses, samples
from autotune.task.batches import to_device
from autotune.task.facts import check_task, gather_facts, uses_batch_statistics
from autotune.techniques import Techniques, find_techniques
from autotune.techniques.base import REACHES_INTO_STEP, Phase, Technique
from autotune.techniques.build import Setting
from autotune.units import format_bytes

if TYPE_CHECKING:
    from autotune.task.task import Task

CHANGES_LEARNING = "it changes what is learned"


def inspect_task(
    task: Task,
    *,
    device: str | Device,
    memory_limit_bytes: int | None,
    calibration: dict[str, Any] | None = None,
    trained: dict[str, Choice] | None = None,
    comparing_s: float = 0.0,
    untrained: Untrained | None = None,
    not_compared: str = "",
    world: World = ALONE,
    report: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Validate `task` on `device`, gather its facts, and ask every technique what it supports. Returns plain data.

    Args:
        calibration: of the device, as a dict.
        trained: choices of the techniques that select what is trained; those it leaves out are the baseline's.
        comparing_s: for comparing a batch with its micro batches, which tells whether they learn the same; 0 to leave that out.
        untrained: how techniques are tried on a task whose models have no values; no step is tried then.
        not_compared: why that comparison failed in another process; empty where it did not.
        world: the processes that are to train the task together.
        report: is told when that comparison begins and ends.

    Raises:
        TaskError: the task or its baseline is not valid.
        ConfigError: the task has nothing to train by such a choice.
        Exception: memory ran out before the first step, or because other processes hold it.
    """
    opened = _enter(device, memory_limit_bytes)
    info, held, techniques = opened.info(), _held_outside(opened, world), find_techniques()
    chosen = techniques.trained_by(task, {**(task.baseline or {}), **(trained or {})})
    task = techniques.narrow_task(task, chosen)
    first = _first_step(task, opened, techniques, world, trains=untrained is None)
    if first.shortage:
        gc.collect()
    facts = gather_facts(task)
    baseline = _baseline(task, techniques, facts.dataset_size, world).replace(**chosen)
    model, few = task.model(), task.batch(first.samples)
    signature = signature_of(task, model, few)
    coupling = Coupling.unknown(not_compared) if not_compared else None
    if untrained is not None:
        few = untrained.inputs(few)
    else:
        model, few = model.to(opened.torch_device), to_device(few, opened.torch_device)
        if comparing_s:
            report(Progress(stage=COMPARING))
            coupling = _coupling(task, model, opened, baseline.plan_in(world), first, comparing_s)
            report(Progress())
    baseline = _uncut(task, baseline, coupling, facts.dataset_size, world)
    setting = _setting(task, opened, model, few, baseline, facts.dataset_size, calibration, world)
    batch, told = _batch_support(setting, baseline.plan_in(world), coupling, has_passes=not first.shortage)
    return Inspection(
        facts=replace(facts, warnings=(*facts.warnings, *told)),
        device=info,
        global_batch=task.global_batch,
        baseline=baseline.as_dict(),
        baseline_given=BATCH_SIZE in (task.baseline or {}),
        batch=batch,
        support={name: _supported(t, setting, untrained) for name, t in techniques.items()},
        **held,
        step_s=first.seconds,
        step_samples=first.samples,
        shortage=first.shortage,
        comparable=not task.takes_whole_steps,
        coupling=coupling,
        world=world,
        baseline_alone=_baseline_alone(task, techniques, chosen, coupling, facts.dataset_size, world),
        signature=signature,
    ).to_dict()


def _held_outside(device: Device, world: World) -> dict[str, Any]:
    """What a process holds of its device before it has a model, and what it will hold for collectives: fields of an inspection."""
    guess_bytes = device.capabilities.communicator_bytes if world.size > 1 else 0
    return {"outside_bytes": device.outside_bytes(), "communicators": Communicators(guess_bytes=guess_bytes)}


def _enter(device: str | Device, memory_limit_bytes: int | None) -> Device:
    """The device, entered by this process, with its memory limited."""
    opened = open_device(device) if isinstance(device, str) else device
    opened.enter()  # only now is it certain which GPU this is
    if memory_limit_bytes is not None:
        opened.limit_memory(memory_limit_bytes)
    return opened


def _setting(
    task: Task,
    device: Device,
    model: torch.nn.Module,
    few: Any,
    baseline: Config,
    dataset_size: int | None,
    calibration: dict[str, Any] | None,
    world: World,
) -> Setting:
    """What techniques are asked about."""
    return Setting(
        task=task,
        device=device,
        model=model,
        optimizer=task.optimizer(model),
        batch=few,
        baseline=baseline.as_dict(),
        dataset_size=dataset_size,
        calibration=Calibration.from_dict(calibration or {}),
        world=world,
    )


def _coupling(
    task: Task, model: torch.nn.Module, device: Device, plan: BatchPlan, first: FirstStep, comparing_s: float
) -> Coupling | None:
    """Whether micro batches give the gradient of a process's whole batch. None where the user writes the whole optimizer step.

    Args:
        model: on the device, not trained yet.
        plan: the baseline's, which says what a whole batch is where the task does not.
        comparing_s: seconds after which no larger batch is compared.
    """
    if task.takes_whole_steps:
        return None
    whole = plan.batch_size if task.global_batch is None else share_of(task.global_batch, plan.world)
    return find_coupling(
        task,
        model,
        device,
        TypicalSamples(task),
        most=min(whole, task.dataset_size() or whole),
        seconds=comparing_s,
        legal=first.samples,
        sample_s=(first.seconds or 0.0) / first.samples,
    )


def _uncut(task: Task, baseline: Config, coupling: Coupling | None, dataset_size: int | None, world: World) -> Config:
    """The baseline, changed to take a process's share of the global batch in one piece where it must not be cut.

    A batch size that the user gives stays.
    """
    if coupling is None or coupling.may_be_cut or task.global_batch is None:
        return baseline
    whole = share_of(task.global_batch, world)
    says = BATCH_SIZE in (task.baseline or {}) or task.loader_batch_size() is not None
    if says or (dataset_size or whole) < whole:
        return baseline
    return baseline.replace(**{BATCH_SIZE: whole, ACCUMULATION: 1})


def _batch_support(
    setting: Setting, plan: BatchPlan, coupling: Coupling | None, *, has_passes: bool
) -> tuple[BatchSupport, list[str]]:
    """Which batches may be tried, why others may not, and what the user should know of that."""
    may_cut = setting.task.global_batch is not None and coupling is not None and coupling.may_be_cut
    # the comparison has ended, and its alarm with it: its finding is not lost to these passes
    moved = moved_by_passes(setting.task, setting.model, setting.batch) if may_cut and has_passes else ""
    given = setting.task.fixed_accumulation
    fixed = given if isinstance(given, str) else given(setting.model, setting.batch)
    found = batch_support(
        plan,
        global_batch=setting.task.global_batch,
        dataset_size=setting.dataset_size,
        normalises=uses_batch_statistics(setting.model),
        fixed_accumulation=fixed,
        whole_step="the task's own step takes the whole global batch at once" if setting.task.takes_whole_steps else "",
        coupling=coupling,
        moved=moved,
    )
    told = [found.warning]
    if fixed and not isinstance(given, str):  # it was found out here
        told = [
            f"the accumulation steps are kept as they are: {fixed}",
            found.warning if found.warning != fixed else "",
        ]
    return found, [*filter(None, told)]


@dataclass(frozen=True)
class Untrained:
    """How to try techniques on models without values.

    Attributes:
        run: a context in which code runs on such models.
        inputs: makes a batch that such a model takes.
    """

    run: Callable[[], AbstractContextManager[Any]]
    inputs: Callable[[Any], Any]


@dataclass(frozen=True)
class FirstStep:
    """The step that was tried: its seconds, its samples, and how it ran out of memory if it did."""

    seconds: float | None = None
    samples: int = 2
    shortage: str = ""


def _first_step(task: Task, device: Device, techniques: Techniques, world: World, *, trains: bool) -> FirstStep:
    """Train a step of two samples; where that is an error, a step of the baseline's batch, which may be the only legal size.

    Running out of memory is a finding, as techniques may make the model fit. Memory held by others is not one, and is raised.
    """
    if not trains:
        return FirstStep(samples=_fewest(task, techniques, world))
    mistake: Exception | None = None
    for size in (2, None):
        try:
            if size is None:
                dataset = task.dataset()
                known = None if dataset is None else samples.dataset_size(dataset)
                size = _baseline(task, techniques, known, world).batch_size
            return FirstStep(check_task(task, device.torch_device, size), size)
        except Exception as error:
            if device.is_out_of_memory(error):
                asked = attempted_bytes(error)
                if device.is_crowded(asked):
                    raise
                shortage = f"an allocation of {format_bytes(asked)} failed" if asked else "out of memory"
                return FirstStep(None, size or 2, shortage)
            mistake = mistake or error
    assert mistake is not None
    raise mistake


def _fewest(task: Task, techniques: Techniques, world: World) -> int:
    """Two samples; where no batch of two can be made, as many as the baseline's batch has."""
    with suppress(Exception):
        task.batch(2)
        return 2
    return _baseline(task, techniques, task.dataset_size(), world).batch_size


def _baseline(task: Task, techniques: Techniques, dataset_size: int | None, world: World) -> Config:
    """The user's baseline as a complete config; plain training if the task has none, at its loader's batch or 32."""
    return _completed(task, dict(task.baseline or {}), techniques, dataset_size, world)


def _baseline_alone(
    task: Task,
    techniques: Techniques,
    chosen: dict[str, Choice],
    coupling: Coupling | None,
    dataset_size: int | None,
    world: World,
) -> dict[str, Choice] | None:
    """The baseline of one device, whatever is stated for several: nothing spreads the model, and accumulation follows from the batch.

    Args:
        chosen: what is trained.

    Returns:
        None in a world of one process.
    """
    if world.size == 1:
        return None
    stated, spread = task.baseline or {}, [name for name, each in techniques.items() if each.phase is Phase.SPREAD]
    given: dict[str, Any] = {name: choice for name, choice in stated.items() if name not in spread}
    if task.global_batch is not None:
        given.pop(ACCUMULATION, None)
        if BATCH_SIZE in given:
            size = int(techniques.validate(BATCH_SIZE, given[BATCH_SIZE]))
            given[BATCH_SIZE] = largest_batch_size(size, task.global_batch)
    found = _completed(task, given, techniques, dataset_size, ALONE)
    return _uncut(task, found, coupling, dataset_size, ALONE).replace(**chosen).as_dict()


def _completed(
    task: Task, given: dict[str, Any], techniques: Techniques, dataset_size: int | None, world: World
) -> Config:
    """A baseline as a complete config, of which `given` is stated."""
    if task.takes_whole_steps and task.global_batch is not None:
        given = {BATCH_SIZE: share_of(task.global_batch, world), **given}
    if BATCH_SIZE not in given:
        usual = task.loader_batch_size() or DEFAULT_BATCH_SIZE
        given[BATCH_SIZE] = largest_batch_size(min(usual, dataset_size or usual), task.global_batch, world)
    try:
        others = {name: choice for name, choice in given.items() if name != BATCH_SIZE}
        if dataset_size is not None and int(techniques.validate(BATCH_SIZE, given[BATCH_SIZE])) > dataset_size:
            raise ConfigError(f"the training set has {dataset_size} samples, fewer than one micro batch")
        return techniques.complete(others, baseline=given, global_batch=task.global_batch, world=world)
    except ConfigError as error:
        what = "BASELINE" if task.global_batch is None else "BASELINE or GLOBAL_BATCH (--global-batch)"
        raise TaskError(f"the baseline {dict(task.baseline or {})!r} is not valid: {error}; correct {what}") from None


def _supported(technique: Technique, setting: Setting, untrained: Untrained | None) -> Support:
    """The choices of a technique that apply, and which of them cannot be traced, which the searching process cannot find out."""
    on_data = technique.phase is Phase.LOADER  # data is real, even where models have no values
    with nullcontext() if untrained is None or on_data else untrained.run():
        support = _support(technique, setting)
    reasons = {choice: technique.untraceable(choice, setting.device.kind) for choice in _on(technique, support)}
    return replace(support, untraceable=tuple((choice, reason) for choice, reason in reasons.items() if reason))


def _on(technique: Technique, support: Support) -> tuple[Choice, ...]:
    return tuple(choice for choice in (*support.choices, *support.optional) if choice != technique.off)


def _support(technique: Technique, setting: Setting) -> Support:
    """The choices of a technique that apply. If trying the technique raises, it is off, with the reason.

    Where memory runs out, the technique is tried once more without keeping activations for a backward pass, since it may be
    just what makes them fit. Memory held by other processes is no reason, and is raised.
    """
    if technique.reaches_into_step and setting.task.takes_whole_steps:
        return Support(choices=(technique.off,), reason=REACHES_INTO_STEP)
    reason = ""
    for keeps_activations in (True, False):
        try:
            with torch.set_grad_enabled(keeps_activations):
                support = technique.support(setting)
            is_partition = technique.phase is Phase.TASK  # a partition says itself which choices are to be included
            return _optional(technique, support) if technique.changes_learning and not is_partition else support
        except Exception as error:
            reason = f"trying it raised {in_one_line(error)}"[:300]
            if not setting.device.is_out_of_memory(error):
                break
            if setting.device.is_crowded(attempted_bytes(error)):
                raise
        gc.collect()  # what the failed attempt held; not inside `except`, where the traceback still holds it
    return Support(choices=(technique.off,), reason=reason)


def _optional(technique: Technique, support: Support) -> Support:
    """A technique that changes what is learned: it is searched only if the user includes it, and is labelled."""
    others = _on(technique, support)
    return Support(
        choices=(technique.off,),
        optional=others,
        reason=support.reason or (CHANGES_LEARNING if others else ""),
        note=support.note or f"{CHANGES_LEARNING}: compare validation results before you use it",
    )


def signature_of(task: Task, model: torch.nn.Module, batch: Any) -> ModelSignature:
    """The signature of a task's model.

    Args:
        batch: a small one, whose targets say which loss is the default.
    """
    parameters = list(model.parameters())
    return ModelSignature(
        layers=_layers(model),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        loss=_loss_kind(task, model, batch),
    )


def _layers(model: torch.nn.Module) -> tuple[Layer, ...]:
    found: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
    for module in model.modules():
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters(recurse=False))
        if shapes or not any(True for _ in module.children()):
            found[type(module).__name__, shapes] += 1
    return tuple(Layer(kind=kind, shapes=shapes, count=count) for (kind, shapes), count in sorted(found.items()))


def _loss_kind(task: Task, model: torch.nn.Module, batch: Any) -> LossKind:
    if task.takes_whole_steps:
        return LossKind.WHOLE_STEP
    if task.training_step is not None:
        return LossKind.OWN
    return LossKind.MODULE if adapters.is_lightning(model) else losses.default_kind(batch)
