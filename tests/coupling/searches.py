"""A search that inspects a real task and computes its probes, in which smaller micro batches are the faster ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.probe.inspection import inspect_task
from autotune.records.config import Config
from autotune.records.inspection import Inspection
from autotune.runners.jobs import InspectJob, Job
from autotune.task import Task
from tests.closed_form import MIB, ClosedFormRunner


@dataclass(kw_only=True)
class RewardsCutting(ClosedFormRunner):
    task: Task

    def result_of(self, job: Job[Any]) -> Any:
        if not isinstance(job, InspectJob):
            return super().result_of(job)
        found = inspect_task(self.task, device="cpu", memory_limit_bytes=None, comparing_s=job.comparing_s)
        return Inspection.from_dict(found)

    def samples_per_s(self, config: Config) -> float:
        return 1e5 / config.batch_size

    def peak_bytes(self, config: Config) -> int:
        return 100 * MIB


def rewarding_cutting(task: Task, folder: Path) -> dict[str, Any]:
    """Options of a search of `task`."""
    storage = f"sqlite:///{folder / 'cut.db'}"
    return {
        "runner": RewardsCutting(task=task),
        "listeners": (),
        "storage": storage,
        "memory_limit": "100GiB",  # the process that runs the tests inspects, and it may have grown
        "trials": 15,
    }
