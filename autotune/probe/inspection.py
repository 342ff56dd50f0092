"""Inspects a task in a process of its own: its facts and the techniques that apply to it, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autotune.errors import ConfigError, TaskError
from autotune.records.batch_plan import BATCH_SIZE, DEFAULT_BATCH_SIZE, largest_batch_size
from autotune.records.config import Config
from autotune.records.device import DeviceInfo
from autotune.records.inspection import Support
from autotune.techniques.base import Technique
from autotune.techniques.build import Setting

CHANGES_LEARNING = "it changes what is learned"


def inspect_task(
    task: Any, *, device: str, memory_limit_bytes: int | None, absent: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Validate `task` on `device`, gather its facts, and ask every technique what it supports. Returns plain data.

    Args:
        absent: a `DeviceInfo` as a dict: inspect for a GPU that is not in this machine. No step is tried then.

    Raises:
        TaskError: the task or its baseline is not valid.
    """
    from autotune import techniques
    from autotune.devices import Device, open_device
    from autotune.devices.absent import AbsentGpu
    from autotune.probe.batch_support import batch_support
    from autotune.task.batches import map_tensors
    from autotune.task.facts import check_task, gather_facts

    opened: Device = open_device(device) if absent is None else AbsentGpu(DeviceInfo.from_dict(absent))
    info = opened.info()
    if memory_limit_bytes is not None:
        opened.limit_memory(memory_limit_bytes)
    outside_bytes = opened.current_bytes()
    if absent is None:
        check_task(task, opened.torch_device)
    facts = gather_facts(task)
    baseline = _baseline(task, facts.dataset_size)
    model = task.model().to(opened.torch_device)
    setting = techniques.Setting(
        task=task,
        device=opened,
        model=model,
        optimizer=task.optimizer(model),
        batch=map_tensors(lambda tensor: tensor.to(opened.torch_device), task.batch(2)),
        baseline=baseline.as_dict(),
        global_batch=task.global_batch,
        dataset_size=facts.dataset_size,
    )
    batch = batch_support(model, baseline.plan, global_batch=task.global_batch, dataset_size=facts.dataset_size)
    return {
        "facts": asdict(facts),
        "device": asdict(info),
        "global_batch": task.global_batch,
        "baseline": baseline.as_dict(),
        "baseline_given": task.baseline is not None,
        "batch": asdict(batch),
        "support": {name: asdict(_support(technique, setting)) for name, technique in techniques.REGISTRY.items()},
        "outside_bytes": outside_bytes,
    }


def _baseline(task: Any, dataset_size: int | None) -> Config:
    """The user's baseline as a complete config; plain training at a batch of 32 if the task has none."""
    from autotune import techniques

    given: dict[str, Any] = dict(task.baseline or {})
    if BATCH_SIZE not in given and dataset_size is not None:
        given[BATCH_SIZE] = largest_batch_size(min(DEFAULT_BATCH_SIZE, dataset_size), task.global_batch)
    stated = f"the baseline {dict(task.baseline or {})!r}"
    try:
        config = techniques.complete(given, global_batch=task.global_batch)
    except ConfigError as error:
        raise TaskError(f"{stated} is not valid: {error}; correct BASELINE") from None
    if not config.plan.keeps(task.global_batch):
        raise TaskError(
            f"{stated} makes {config.samples_per_step} samples per optimizer step ({config.batch_size} x "
            f"{config.accumulation_steps}), but the global batch is {task.global_batch}; correct accumulation_steps or "
            "leave it out"
        )
    return config


def _support(technique: Technique, setting: Setting) -> Support:
    """The choices of a technique that apply. If trying the technique raises, it is off, with the reason."""
    try:
        support = technique.support(setting)
        return _optional(technique, support) if technique.changes_learning else support
    except Exception as error:
        if setting.device.is_out_of_memory(error):
            raise
        first_line = (str(error).strip().splitlines() or [""])[0]
        what = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
        return Support(choices=(technique.off,), reason=f"trying it raised {what}"[:300])


def _optional(technique: Technique, support: Support) -> Support:
    """A technique that changes what is learned: it is searched only if the user includes it, and is labelled."""
    others = tuple(choice for choice in support.choices if choice != technique.off)
    return Support(
        choices=(technique.off,),
        optional=(*others, *support.optional),
        reason=support.reason or (CHANGES_LEARNING if others else ""),
        note=support.note or f"{CHANGES_LEARNING}: compare validation results before you use it",
    )
