"""A search with a known answer, for integrations: micro batches of 24 in bf16 by a fused AdamW, found without a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.records.config import ALONE, World
from autotune.records.inspection import TaskFacts
from autotune.report.study import study_sections
from autotune.report.terminal import as_text
from autotune.runners.jobs import InspectJob, Job
from autotune.session import Session
from autotune.study.reading import load_study
from tests.closed_form import ClosedFormRunner, inspection, techniques

LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # what a launcher sets
FACTS = TaskFacts(name="closed", source_hash="abc", optimizer="AdamW")


@dataclass
class Known(ClosedFormRunner):
    """`today` is what the baseline has beside its batch size."""

    today: dict[str, Any] = field(default_factory=dict)

    def result_of(self, job: Job[Any]) -> Any:
        if not isinstance(job, InspectJob):
            return super().result_of(job)
        whole = 96 * self.world.size
        baseline = techniques.complete({"batch_size": 4, **self.today}, global_batch=whole, world=self.world)
        return inspection(facts=FACTS, world=self.world, global_batch=whole, baseline=baseline.as_dict())


def known(folder: Path, world: World = ALONE, **today: Any) -> dict[str, Any]:
    """Options of a search of what trains 96 samples a step, in each process of a world, in micro batches of 4; `today` as of `Known`."""
    storage, runner = f"sqlite:///{folder / 'closed.db'}", Known(today=today)
    runner.world = world
    return {"runner": runner, "listeners": (), "storage": storage, "memory_limit": "1000MiB", "trials": 10}


def shown(folder: Path) -> str:
    """What `autotune show` prints of the study that a search with `known` has left."""
    study = load_study(folder / "closed.db")
    return as_text(study_sections(study, model=study.facts.model), 100)


def run_as_printed(text: str, **names: Any) -> Session:
    """Run the lines under `Run it`, the recommended config before them, in a script that has the given names. Returns the session."""
    config = text[text.index("config = {") : text.index("}", text.index("config = {")) + 1]
    lines = text[text.index("Run it") :].split("\n\n")[0].splitlines()[1:]
    script = "\n".join([*(line.strip() for line in config.splitlines()), *(line.removeprefix("  ") for line in lines)])
    exec(script, names)
    session: Session = names["session"]
    assert names["loss"].isfinite()
    return session
