"""Inspects a task in a process of its own: its facts and the techniques that apply to it, as plain data."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError, TaskError, in_one_line
from autotune.records.batch_plan import BATCH_SIZE, DEFAULT_BATCH_SIZE, largest_batch_size
from autotune.records.calibration import Calibration
from autotune.records.config import Choice, Config
from autotune.records.coupling import Coupling
from autotune.records.inspection import BatchSupport, Inspection, Support
from autotune.records.progress import COMPARING, Progress
from autotune.techniques import Techniques, find_techniques
from autotune.techniques.base import REACHES_INTO_STEP, Phase, Technique
from autotune.techniques.build import Setting
from autotune.units import format_bytes

if TYPE_CHECKING:
    from autotune.devices import Device

CHANGES_LEARNING = "it changes what is learned"


def inspect_task(
    task: Any,
    *,
    device: str | Device,
    memory_limit_bytes: int | None,
    calibration: dict[str, Any] | None = None,
    trained: dict[str, Choice] | None = None,
    comparing_s: float = 0.0,
    untrained: Untrained | None = None,
    not_compared: str = "",
    report: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Validate `task` on `device`, gather its facts, and ask every technique what it supports. Returns plain data.

    Args:
        calibration: of the device, as a dict.
        trained: what to train of the task, by techniques; where it says nothing, what the baseline trains.
        comparing_s: for finding out whether micro batches give the gradient of a whole batch; 0 to leave that out.
        untrained: how techniques are tried on a task whose models have no values; no step is tried then.
        not_compared: why that failed in another process.
        report: is told when that begins and ends.

    Raises:
        TaskError: the task or its baseline is not valid.
        ConfigError: the task has no such thing to train.
        Exception: memory ran out before anything was trained, or because others hold it.
    """
    from autotune.probe.signature import signature_of
    from autotune.probe.whole_batch import uncut, warnings_of
    from autotune.task.batches import to_device
    from autotune.task.facts import gather_facts

    opened = _enter(device, memory_limit_bytes)
    info, outside_bytes = opened.info(), opened.outside_bytes()
    techniques = find_techniques()
    chosen = techniques.trained_by(task, {**(task.baseline or {}), **(trained or {})})
    task = techniques.narrow_task(task, chosen)
    first = _first_step(task, opened, techniques) if untrained is None else FirstStep(samples=_fewest(task, techniques))
    if first.shortage:
        gc.collect()
    facts = gather_facts(task)
    baseline = _baseline(task, techniques, facts.dataset_size).replace(**chosen)
    model, few = task.model(), task.batch(first.samples)
    signature = signature_of(task, model, few)
    coupling = Coupling.unknown(not_compared) if not_compared else None
    if untrained is not None:
        few = untrained.inputs(few)
    else:
        model, few = model.to(opened.torch_device), to_device(few, opened.torch_device)
        if comparing_s:
            coupling = _compare(task, model, opened, baseline, first, comparing_s, report)
    baseline = uncut(task, baseline, coupling, facts.dataset_size)
    setting = _setting(task, opened, model, few, baseline, facts.dataset_size, calibration)
    batch = _batch_support(setting, baseline, coupling)
    return Inspection(
        facts=replace(facts, warnings=(*facts.warnings, *warnings_of(batch))),
        device=info,
        global_batch=task.global_batch,
        baseline=baseline.as_dict(),
        baseline_given=BATCH_SIZE in (task.baseline or {}),
        batch=batch,
        support={name: _supported(t, setting, untrained) for name, t in techniques.items()},
        outside_bytes=outside_bytes,
        step_s=first.seconds,
        step_samples=first.samples,
        shortage=first.shortage,
        comparable=not task.takes_whole_steps,
        coupling=coupling,
        signature=signature,
    ).to_dict()


def _enter(device: str | Device, memory_limit_bytes: int | None) -> Device:
    """The device, entered by this process and limited."""
    from autotune.devices import open_device

    opened = open_device(device) if isinstance(device, str) else device
    opened.enter()  # from here on CUDA itself says which GPU this is
    if memory_limit_bytes is not None:
        opened.limit_memory(memory_limit_bytes)
    return opened


def _compare(
    task: Any,
    model: Any,
    device: Device,
    baseline: Config,
    first: FirstStep,
    comparing_s: float,
    report: Callable[[Progress], None],
) -> Coupling | None:
    """Find out whether micro batches give the gradient of a whole batch, and tell when that begins and ends."""
    from autotune.probe.whole_batch import coupling_of

    report(Progress(stage=COMPARING))
    coupling = coupling_of(
        task, model, device, baseline.plan, legal=first.samples, step_s=first.seconds, comparing_s=comparing_s
    )
    report(Progress())
    return coupling


def _setting(
    task: Any,
    device: Device,
    model: Any,
    few: Any,
    baseline: Config,
    dataset_size: int | None,
    calibration: dict[str, Any] | None,
) -> Setting:
    """What techniques are asked about."""
    return Setting(
        task=task,
        device=device,
        model=model,
        optimizer=task.optimizer(model),
        batch=few,
        baseline=baseline.as_dict(),
        global_batch=task.global_batch,
        dataset_size=dataset_size,
        calibration=Calibration.from_dict(calibration or {}),
    )


def _batch_support(setting: Setting, baseline: Config, coupling: Coupling | None) -> BatchSupport:
    """Which batches may be tried, and why others may not."""
    from autotune.probe.batch_support import batch_support
    from autotune.task.facts import uses_batch_statistics

    task = setting.task
    return batch_support(
        baseline.plan,
        global_batch=task.global_batch,
        dataset_size=setting.dataset_size,
        normalises=uses_batch_statistics(setting.model),
        fixed_accumulation=task.fixed_accumulation,
        whole_step="the task's own step takes the whole global batch at once" if task.takes_whole_steps else "",
        coupling=coupling,
    )


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


def _first_step(task: Any, device: Device, techniques: Techniques) -> FirstStep:
    """Train a step of two samples; where that is an error, one of the baseline's batch, which may be the only legal kind.

    That it runs out of memory is a finding: techniques may make the model fit. That others hold the memory is none.
    """
    from autotune.devices.oom import attempted_bytes
    from autotune.task import samples
    from autotune.task.facts import check_task

    mistake: Exception | None = None
    for size in (2, None):
        try:
            if size is None:
                dataset = task.dataset()
                size = _baseline(
                    task, techniques, None if dataset is None else samples.dataset_size(dataset)
                ).batch_size
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


def _fewest(task: Any, techniques: Techniques) -> int:
    """Two samples; where no batch of them can be made, as many as the baseline's has."""
    with suppress(Exception):
        task.batch(2)
        return 2
    return _baseline(task, techniques, task.dataset_size()).batch_size


def _baseline(task: Any, techniques: Techniques, dataset_size: int | None) -> Config:
    """The user's baseline as a complete config; plain training if the task has none, at its loader's batch or 32."""
    given: dict[str, Any] = dict(task.baseline or {})
    if task.takes_whole_steps and task.global_batch is not None:
        given = {BATCH_SIZE: task.global_batch, **given}
    if BATCH_SIZE not in given:
        usual = task.loader_batch_size() or DEFAULT_BATCH_SIZE
        given[BATCH_SIZE] = largest_batch_size(min(usual, dataset_size or usual), task.global_batch)
    try:
        return techniques.complete(given, global_batch=task.global_batch)
    except ConfigError as error:
        raise TaskError(f"the baseline {dict(task.baseline or {})!r} is not valid: {error}; correct BASELINE") from None


def _supported(technique: Technique, setting: Setting, untrained: Untrained | None) -> Support:
    """The choices of a technique that apply, and which of them cannot be traced: the process that searches cannot ask."""
    on_data = technique.phase is Phase.LOADER  # which is real in any case
    with nullcontext() if untrained is None or on_data else untrained.run():
        support = _support(technique, setting)
    reasons = {choice: technique.untraceable(choice, setting.device.kind) for choice in _on(technique, support)}
    return replace(support, untraceable=tuple((choice, reason) for choice, reason in reasons.items() if reason))


def _on(technique: Technique, support: Support) -> tuple[Choice, ...]:
    return tuple(choice for choice in (*support.choices, *support.optional) if choice != technique.off)


def _support(technique: Technique, setting: Setting) -> Support:
    """The choices of a technique that apply. If trying the technique raises, it is off, with the reason.

    Where memory runs out it is tried once more without activations kept for a backward pass: it may be what makes them fit.
    That others hold the memory is no reason, and raised.
    """
    import torch

    from autotune.devices.oom import attempted_bytes

    if technique.reaches_into_step and setting.task.takes_whole_steps:
        return Support(choices=(technique.off,), reason=REACHES_INTO_STEP)
    reason = ""
    for keeps_activations in (True, False):
        try:
            with torch.set_grad_enabled(keeps_activations):
                support = technique.support(setting)
            is_partition = technique.phase is Phase.TASK  # which says itself what is to be included
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
