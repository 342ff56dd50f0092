"""What a search knows of a task before its first probe, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autotune.records.config import Choice
from autotune.records.device import DeviceInfo


@dataclass(frozen=True, kw_only=True)
class Support:
    """Whether a technique applies to a task on a device, as plain data.

    Attributes:
        choices: what may be searched, `off` included, in increasing order where there is an order. Only `off`: not applicable.
        reason: why it does not apply, or why some choices are left out; empty when all is as usual.
        optional: choices that are searched only when the user includes the technique (they change what is learned).
        note: what a reader of the answer has to know; goes to the result's warnings when the technique is used.
    """

    choices: tuple[Choice, ...]
    reason: str = ""
    optional: tuple[Choice, ...] = field(default=())
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the search knows before its first probe.

    Attributes:
        facts: `autotune.task.facts.TaskFacts` as a dict.
        baseline: the user's baseline, complete; `baseline_given` when the task states one.
        support: per technique what may be searched.
        outside_bytes: what a process held before the model was built, on the scale of a probe's peak: libraries, the
            user's module, a CUDA context.
    """

    facts: dict[str, Any]
    device: DeviceInfo
    global_batch: int | None
    baseline: dict[str, Choice]
    baseline_given: bool
    support: dict[str, Support]
    outside_bytes: int

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Inspection:
        """Rebuild an inspection from the plain data that a process sent."""
        support = {
            name: Support(**item | {"choices": tuple(item["choices"]), "optional": tuple(item["optional"])})
            for name, item in data["support"].items()
        }
        return Inspection(**{**data, "device": DeviceInfo.from_dict(data["device"]), "support": support})
