"""What a task is and which techniques apply to it, found out in a process of its own and handed on as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autotune.records.device import DeviceInfo
from autotune.records.inspection import Support
from autotune.techniques.base import Setting, Technique


def inspect_task(
    task: Any, *, device: str, memory_limit_bytes: int | None, absent: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Validate `task` on `device`, gather its facts, and ask every technique what it supports. Returns plain data.

    Args:
        absent: a `DeviceInfo` as a dict: ask for a GPU that is not there, in place of `device`. No step is tried then.

    Raises:
        TaskError: the task is not valid.
        ConfigError: its baseline is not valid.
    """
    from autotune import techniques
    from autotune.devices import Device, open_device
    from autotune.devices.absent import AbsentGpu
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
    given: dict[str, Any] = dict(task.baseline or {})
    if "batch_size" not in given and facts.dataset_size is not None:
        most = min(int(techniques.REGISTRY["batch_size"].off), facts.dataset_size)
        fitting = techniques.divisors(task.global_batch) if task.global_batch is not None else [most]
        given["batch_size"] = max(size for size in fitting if size <= most)
    baseline = techniques.complete(given, global_batch=task.global_batch).as_dict()
    model = task.model().to(opened.torch_device)
    setting = techniques.Setting(
        task=task,
        device=opened,
        model=model,
        optimizer=task.optimizer(model),
        batch=map_tensors(lambda tensor: tensor.to(opened.torch_device), task.batch(2)),
        baseline=baseline,
        global_batch=task.global_batch,
        dataset_size=facts.dataset_size,
    )
    return {
        "facts": asdict(facts),
        "device": asdict(info),
        "global_batch": task.global_batch,
        "baseline": baseline,
        "baseline_given": task.baseline is not None,
        "support": {name: asdict(_support(technique, setting)) for name, technique in techniques.REGISTRY.items()},
        "outside_bytes": outside_bytes,
    }


def _support(technique: Technique, setting: Setting) -> Support:
    """What of a technique applies. One whose trial fails on a task that trains is off: it alone is not to be had."""
    try:
        return technique.support(setting)
    except Exception as error:
        if setting.device.is_out_of_memory(error):
            raise
        first_line = (str(error).strip().splitlines() or [""])[0]
        what = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
        return Support(choices=(technique.off,), reason=f"trying it raised {what}"[:300])
