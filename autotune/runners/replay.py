"""`ReplayRunner`: a recorded table in the place of a device, so that a whole search runs without one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.prediction.traces import Traces
from autotune.records.config import Config, ProbeSettings
from autotune.records.device import NOT_MEASURED, Slot
from autotune.records.outcome import Kind, Outcome
from autotune.runners import jobs
from autotune.runners import table as table_file
from autotune.runners.runner import InstantRunner, Stated
from autotune.runners.table import Row, Table, TableError


class ReplayRunner(InstantRunner):
    """Answers from a table: each probe of a config is one of its recorded repeats, drawn without replacement.

    Nothing is trained. Inspection, device, baseline and traces are the table's, on the clock each probe takes the seconds that were
    recorded, several at once in as many slots, and checks are not compared.

    Args:
        table: a table, or its file.
        memory_limit_bytes: what the device is to have free; None for what the probes were allowed when they were recorded.
        seed: of the order in which repeats are drawn. When all have been drawn, they are drawn again.
        num_slots: probes that may run at once. What was recorded alone is taken to hold beside others, too.

    Raises:
        TableError: the file is not a table.
    """

    keeps_traces = False

    def __init__(
        self, table: Table | str | Path, *, memory_limit_bytes: int | None = None, seed: int = 0, num_slots: int = 1
    ) -> None:
        super().__init__()
        self._table = table if isinstance(table, Table) else table_file.read(table, self.techniques)
        self._memory_limit_bytes = memory_limit_bytes
        self._seed = seed
        self._drawn: dict[Config, list[Row]] = {}
        self._num_slots = num_slots
        header = self._table.header
        self.task_name, self.world = header.task, header.world
        self.stated = Stated(
            global_batch=header.global_batch,
            baseline=header.baseline if header.baseline_given else None,
            trained=self.techniques.trained(header.baseline),
        )

    @property
    def default_study(self) -> str:
        """A study of its own: what was recorded must not be taken for what was measured here."""
        return f"{self.task_name}-replay"

    def now_s(self) -> float:
        return self.passed_s

    def takes_s(self, job: jobs.Job[Any], result: Any) -> float:
        """The recorded seconds of a probe."""
        return result.wall_s if isinstance(job, jobs.ProbeJob) else 0.0

    def slots(self) -> tuple[Slot, ...]:
        """Of the kind of the device that the table was recorded on."""
        info = replace(self._table.header.device_info(), no_energy=self._table.no_energy)
        if self._memory_limit_bytes is not None:
            info = replace(info, free_bytes=self._memory_limit_bytes)
        if self._num_slots == 1:
            return (Slot(name=info.name, device=info),)
        return tuple(Slot(name=f"{info.name} {number}", device=info) for number in range(self._num_slots))

    def result_of(self, job: jobs.Job[Any]) -> Any:
        """The recorded result of a job. Raises TableError for a config that the table does not hold."""
        match job:
            case jobs.CalibrateJob():
                return NOT_MEASURED
            case jobs.InspectJob():
                return replace(
                    self._table.header.inspection(self.techniques), device=self.slots()[0].device, comparable=False
                )
            case jobs.ProbeJob():
                return self._probe(job.config, job.settings)
            case jobs.CheckJob():
                return jobs.NotCompared(reason="the search ran over a recorded table, which holds no gradients")
            case jobs.EvaluateJob():
                return Outcome(
                    kind=Kind.UNSUPPORTED, cause="a recorded table holds no evaluation; search the model itself"
                )
            case jobs.TraceJob():
                return self._traces(job)
            case _:
                raise TableError(f"the table {self._table.path} holds no anatomy of a config; explain the model itself")

    def _traces(self, job: jobs.TraceJob) -> Traces:
        """The table's traces; what they lack counts as failed."""
        found = self._table.traces
        beside = table_file.traces_path(self._table.path).name
        why = f"{beside} holds no trace of it" if found else f"there is no {beside} with traces beside the table"
        found = found or Traces(target=job.target)
        missing = dict.fromkeys(job.plan.without(found).labels(), why)
        return found.merged(Traces(target=found.target, failures=missing))

    def _probe(self, config: Config, settings: ProbeSettings) -> Outcome:
        """One recorded repeat, within the settings' memory limit."""
        rows = self._table.repeats.get(config)
        if rows is None:
            raise TableError(
                f"the table {self._table.path} has no probe of {config.as_dict()}: {self._why_missing(config)}; "
                "search what was swept, or sweep it as well"
            )
        if not self._drawn.get(config):
            self._drawn[config] = list(rows)
            random.Random(f"{self._seed} {config}").shuffle(self._drawn[config])
        outcome = self._drawn[config].pop().outcome
        limits = [limit for limit in (settings.memory_limit_bytes, self._memory_limit_bytes) if limit is not None]
        limit_bytes = min(limits, default=None)
        measured = outcome.measurement
        if measured is None or limit_bytes is None or measured.peak_bytes <= limit_bytes:
            return outcome
        return Outcome(
            kind=Kind.OOM,
            cause="more than the memory limit when it was recorded",
            stage="warmup",
            wall_s=outcome.wall_s,
            peak_bytes=limit_bytes,
        )

    def _why_missing(self, config: Config) -> str:
        for name, choices in self._table.header.choices.items():
            derived = name == "accumulation_steps" and self._table.header.global_batch is not None
            if not derived and config[name] not in choices:
                return f"{name} was swept over {', '.join(map(str, choices))}"
        return "this combination was not swept"
