"""A search with a known answer, for integrations: micro batches of 24 in bf16 by a fused AdamW, found without a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.records.inspection import TaskFacts
from autotune.runners.jobs import InspectJob, Job
from tests.closed_form import ClosedFormRunner, inspection

FACTS = TaskFacts(name="closed", source_hash="abc", optimizer="AdamW")


class Known(ClosedFormRunner):
    def result_of(self, job: Job[Any]) -> Any:
        return inspection(facts=FACTS) if isinstance(job, InspectJob) else super().result_of(job)


def known(folder: Path) -> dict[str, Any]:
    """Options of a search of what trains 96 samples a step in micro batches of 4."""
    storage = f"sqlite:///{folder / 'closed.db'}"
    return {"runner": Known(), "listeners": (), "storage": storage, "memory_limit": "1000MiB", "trials": 10}
