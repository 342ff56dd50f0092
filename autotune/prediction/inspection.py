"""Inspects a task without training it: its models have no values, so that they take no memory."""

from __future__ import annotations

from typing import Any

from autotune.devices import Device
from autotune.devices.targets import target_of
from autotune.prediction.fakes import Fakes
from autotune.probe.inspection import Untrained, inspect_task
from autotune.task import Task
from autotune.techniques import find_techniques


def inspect_untrained(task: Task, *, device: Device, host_bytes: int, **arguments: Any) -> dict[str, Any]:
    """As `inspect_task`, without a step and without a model that is built for real, unless its code needs values.

    Args:
        device: this machine's CPU, or an `AbsentGpu`.
        host_bytes: what this process may take of the host's memory.
    """
    fakes = Fakes(task, target_of(device.info()), find_techniques(), host_bytes)
    found = inspect_task(fakes.task, device=device, untrained=Untrained(fakes.run, fakes.inputs), **arguments)
    return found | {"built_for_real": fakes.why_real}
