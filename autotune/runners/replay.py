"""`ReplayRunner`: a recorded table in the place of a device, so that a search strategy is measured without one."""

from __future__ import annotations

import random

from autotune.predict.traces import Traces
from autotune.records.config import Config
from autotune.records.device import DeviceInfo
from autotune.records.outcome import Kind, Outcome
from autotune.records.settings import ProbeSettings
from autotune.runners.instant import InstantRunner
from autotune.runners.runner import CheckJob, Job, JobResult, NotCompared, ProbeJob, Stated, TraceJob
from autotune.runners.table import Row, Table, TableError


class ReplayRunner(InstantRunner):
    """Answers from a table: each probe of a config is one of its recorded repeats, drawn without replacement.

    A memory limit below a config's recorded peak makes it run out of memory, as it would have.

    Args:
        seed: of the order in which repeats are drawn. When all have been drawn, they are drawn again.
    """

    def __init__(self, table: Table, *, seed: int = 0) -> None:
        super().__init__()
        header = table.header
        self.task_name = header.task
        self.stated = Stated(global_batch=header.global_batch, baseline=header.baseline)
        self._table = table
        self._seed = seed
        self._drawn: dict[Config, list[Row]] = {}
        self._now_s = 0.0

    def now_s(self) -> float:
        """Recorded seconds of the probes so far."""
        return self._now_s

    def device(self) -> DeviceInfo:
        """The device that the table was recorded on."""
        header = self._table.header
        return DeviceInfo(
            name=header.device,
            model=header.model,
            total_bytes=header.total_bytes,
            free_bytes=header.memory_limit_bytes,
            num_threads=header.num_threads,
            driver=header.driver,
            torch_version=header.torch,
        )

    def result_of(self, job: Job) -> JobResult:
        """The recorded result of a job. Raises TableError when the table does not hold it."""
        match job:
            case ProbeJob():
                outcome = self._probe(job.config, job.settings)
                self._now_s += outcome.wall_s
                return outcome
            case CheckJob():
                return NotCompared(reason="a recorded table holds no gradients")
            case TraceJob():
                why = "a recorded table holds no traces"
                return Traces(target=job.target, failures=dict.fromkeys(job.plan.labels(), why))
            case _:
                raise NotImplementedError

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
        limit_bytes = settings.memory_limit_bytes
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
