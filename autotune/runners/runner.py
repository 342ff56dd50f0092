"""`Runner`: what runs inspections, probes, checks and traces. A search knows nothing else of where they run.

Local processes (`runners/local.py`) and recorded tables (`runners/replay.py`) are runners. A new one is a file of its own.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from autotune.errors import AutotuneError
from autotune.prediction.plan import Plan, plan_traces
from autotune.prediction.traces import Traces
from autotune.records.calibration import NOT_MEASURED, Calibration
from autotune.records.config import Choice, Config
from autotune.records.device import DeviceInfo
from autotune.records.explanation import Anatomy, ModuleTimes
from autotune.records.inspection import Inspection
from autotune.records.outcome import Outcome
from autotune.records.progress import COMPARING, Progress
from autotune.records.result import Check
from autotune.records.settings import ProbeSettings

CALIBRATION_TIMEOUT_S = 30.0  # 3 s of measuring, and what a context on a GPU takes
TRACE_ATTEMPTS = 3  # jobs in one call of `trace`: one that dies on a group leaves the others to the next

WATCH_S = 1.0  # between two looks at what a trace has found

R = TypeVar("R")


class ProbeFault(AutotuneError):
    """The machinery around jobs failed (a supervisor died, say): the machine is at fault, not the config.

    Args:
        tickets: of the jobs that are gone; None for every job in flight.
    """

    def __init__(self, message: str, tickets: tuple[int, ...] | None = None) -> None:
        super().__init__(message)
        self.tickets = tickets


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What the task's author states, and how the task is named in a command.

    Attributes:
        model: names the task to a command, `model.py` or `model.py:task`; empty for a task that was built in Python.
        global_batch: samples per optimizer step; None where the author leaves it open.
        baseline: the config that the author runs today, as a partial dict; None when not stated.
        trained: what that config trains (`techniques.trained`), under the names that the task has for it.
    """

    model: str = ""
    global_batch: int | None = None
    baseline: Mapping[str, Any] | None = None
    trained: Mapping[str, Choice] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CalibrateJob:
    """Measure the device itself."""

    name: ClassVar[str] = "calibrate"
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class InspectJob:
    """Validate the task and ask which techniques apply.

    Attributes:
        absent: a GPU to ask for that is not there.
        trained: what is to be trained of the task, where it is not what the task's baseline trains.
        comparing_s: for finding out whether a batch may be cut; 0 where that is not looked into.
        not_compared: why finding that out failed before.
        trains: whether a step is tried. Where not, no model is built for real either, unless its code needs values.
    """

    name: ClassVar[str] = "inspect"
    memory_limit_bytes: int | None
    timeout_s: float
    calibration: Calibration = NOT_MEASURED
    absent: DeviceInfo | None = None
    trained: Mapping[str, Choice] = field(default_factory=dict)
    comparing_s: float = 0.0
    trains: bool = True
    not_compared: str = ""


@dataclass(frozen=True, kw_only=True)
class ConfigJob:
    """What runs a config itself."""

    config: Config
    settings: ProbeSettings

    @property
    def timeout_s(self) -> float:
        """The process is killed then."""
        return self.settings.timeout_s


@dataclass(frozen=True, kw_only=True)
class ProbeJob(ConfigJob):
    """Train a few steps of a config and measure them."""

    name: ClassVar[str] = "probe"


@dataclass(frozen=True, kw_only=True)
class CheckJob(ConfigJob):
    """Compare a config's gradients with plain fp32's, on `batch_size` samples."""

    name: ClassVar[str] = "check"
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class TraceJob:
    """Trace the memory of a plan's groups, one after another; after `slice_s` none is begun but the first."""

    name: ClassVar[str] = "trace"
    plan: Plan
    target: str
    slice_s: float
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class AnatomyJob:
    """Trace what lives at the peak of each of some configs; after `slice_s` none is begun but the first."""

    name: ClassVar[str] = "anatomy"
    configs: tuple[Config, ...]
    target: str
    slice_s: float
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class ModulesJob(ConfigJob):
    """Measure where a config's time goes, module by module."""

    name: ClassVar[str] = "modules"


@dataclass(frozen=True, kw_only=True)
class EvaluateJob:
    """Measure evaluation with a config, after a training step of `num_samples`."""

    name: ClassVar[str] = "evaluate"
    config: Config
    settings: ProbeSettings
    num_samples: int

    @property
    def timeout_s(self) -> float:
        """The process is killed then."""
        return self.settings.timeout_s


@dataclass(frozen=True, kw_only=True)
class NotCompared:
    """A check that this runner cannot do, and why."""

    reason: str


Job = CalibrateJob | InspectJob | ProbeJob | CheckJob | TraceJob | AnatomyJob | ModulesJob | EvaluateJob
Anatomies = tuple[Anatomy | str, ...]  # of each config, or why it cannot be traced; of those begun
JobResult = Calibration | Inspection | Outcome | Check | NotCompared | Traces | Anatomies | ModuleTimes


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A job that ended.

    Attributes:
        ticket: as `submit` gave it.
        result: of a `CalibrateJob` a `Calibration`, of an `InspectJob` an `Inspection`, of a `ProbeJob` an `Outcome`, of a
            `CheckJob` a `Check` or `NotCompared`, of a `TraceJob` the `Traces` that it added, of an `AnatomyJob` `Anatomies`, of a
            `ModulesJob` `ModuleTimes`, of an `EvaluateJob` an `Outcome`. What failed is an `Outcome`.
    """

    ticket: int
    result: JobResult


class Runner(ABC):
    """Runs jobs on one task and one device. A context manager: leaving it leaves no process behind.

    Attributes:
        num_slots: jobs that may be in flight.
        keeps_traces: whether its traces and calibrations hold for this machine, and may be kept for other searches.
        slowest_start: times the longest start so far that a probe's own may take: more where the user's code starts.
        task_name: of the task; it names the study.
        stated: what the task's author states; known after entering.
        notes: what the user should know of this runner; known after entering.
    """

    num_slots: int = 1
    keeps_traces: bool = True
    slowest_start: float = 1.0
    task_name: str
    stated: Stated = Stated()
    notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *exc_info: object) -> None:
        """End every job in flight."""

    @property
    def default_study(self) -> str:
        """Name of the study unless the user gives one."""
        return self.task_name

    def command(self, config: Config) -> str:
        """The command line that trains with a config; empty where `autotune.prepare` does."""
        return ""

    @abstractmethod
    def now_s(self) -> float:
        """The runner's own clock, in seconds from any start; budgets are spent on it."""

    @abstractmethod
    def device(self) -> DeviceInfo:
        """The device that jobs run on, as it is now."""

    @abstractmethod
    def submit(self, job: Job) -> int:
        """Start a job. Returns its ticket.

        Raises:
            RuntimeError: no slot is free.
            ProbeFault: the machinery failed.
        """

    @abstractmethod
    def collect(self, timeout_s: float | None = None) -> Finished | None:
        """Wait for the next job to end; None when none did within `timeout_s`.

        Raises:
            RuntimeError: nothing is in flight.
            ProbeFault: the machinery failed; the job that it ran is gone.
        """

    @abstractmethod
    def progress(self, ticket: int) -> Progress | None:
        """How far a probe in flight has come; None for a ticket that is not in flight."""

    def found(self, ticket: int) -> Traces | None:
        """What a trace in flight has found so far; None where that is not known."""
        return None

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """End a job early. `collect` still returns it: a probe as a time-out, with the bound that it leaves."""

    def beside(self) -> Runner | None:
        """Another runner of the task, to be entered, whose tracing disturbs no probe; None where it would."""
        return None

    def calibrate(self) -> Calibration | Outcome:
        """Measure the device itself; an `Outcome` when that failed."""
        result = self._run(CalibrateJob(timeout_s=CALIBRATION_TIMEOUT_S))
        assert isinstance(result, Calibration | Outcome), result
        return result

    def inspect(
        self,
        *,
        memory_limit_bytes: int | None,
        timeout_s: float,
        calibration: Calibration = NOT_MEASURED,
        absent: DeviceInfo | None = None,
        trained: Mapping[str, Choice] | None = None,
        comparing_s: float = 0.0,
        trains: bool = True,
    ) -> Inspection | Outcome:
        """Validate the task and ask which techniques apply to it; an `Outcome` when that failed.

        Args:
            calibration: of the runner's device, which decides what is worth trying.
            absent: a GPU that is not there, to ask for in place of the runner's device.
            trained: what is to be trained of the task, by techniques; where it says nothing, what the baseline trains.
            comparing_s: for finding out whether micro batches give the gradient of a whole batch; 0 to leave that out.
            trains: whether to try a step on a model that is built for real.
        """
        job = InspectJob(
            memory_limit_bytes=memory_limit_bytes,
            timeout_s=timeout_s,
            calibration=calibration,
            absent=absent,
            trained=trained or {},
            comparing_s=comparing_s,
            trains=trains,
        )
        result = self._run_undisturbed(job)
        # whatever the user's code does while batches are compared, the task may train
        if isinstance(result, Outcome) and result.stage == COMPARING:
            result = self._run_undisturbed(replace(job, comparing_s=0.0, not_compared=result.cause))
        assert isinstance(result, Inspection | Outcome), result
        return result

    def in_all_that_is_free(self, run: Callable[[int], R], limit_bytes: int) -> R | None:
        """Run what a memory limit was too small for with all that is free as its limit; None where that is no more."""
        free_bytes = self.device().free_bytes
        return run(free_bytes) if free_bytes > limit_bytes else None

    def probe(self, config: Config, settings: ProbeSettings) -> Outcome:
        """Train a few steps of a config. Never raises for what the config or the user's code does."""
        result = self._run(ProbeJob(config=config, settings=settings))
        assert isinstance(result, Outcome), result
        return result

    def check(self, config: Config, settings: ProbeSettings, batch_size: int) -> Check | Outcome | NotCompared:
        """Compare a config's gradients with plain fp32's on `batch_size` samples; an `Outcome` when that failed."""
        result = self._run_undisturbed(CheckJob(config=config, settings=settings, batch_size=batch_size))
        assert isinstance(result, Check | Outcome | NotCompared), result
        return result

    def anatomies(
        self, configs: Iterable[Config], target: str, timeout_s: float, *, slice_s: float = math.inf
    ) -> Anatomies | Outcome:
        """Find what lives at the peak of each config, without running them; an `Outcome` when that failed.

        Args:
            target, slice_s: as in `trace`.
        """
        job = AnatomyJob(configs=tuple(configs), target=target, slice_s=slice_s, timeout_s=timeout_s)
        result = self._run(job)
        assert isinstance(result, tuple | Outcome), result
        return result

    def modules(self, config: Config, settings: ProbeSettings) -> ModuleTimes | Outcome:
        """Measure where a config's time goes, module by module; an `Outcome` when that failed."""
        result = self._run(ModulesJob(config=config, settings=settings))
        assert isinstance(result, ModuleTimes | Outcome), result
        return result

    def evaluate(self, config: Config, settings: ProbeSettings, num_samples: int) -> Outcome:
        """Measure evaluation in batches of `config.batch_size` samples, beside the optimizer's state.

        Args:
            num_samples: of the training step that makes that state.
        """
        result = self._run_undisturbed(EvaluateJob(config=config, settings=settings, num_samples=num_samples))
        assert isinstance(result, Outcome), result
        return result

    def trace(
        self,
        configs: Iterable[Config],
        target: str,
        timeout_s: float,
        *,
        known: Traces | None = None,
        slice_s: float = math.inf,
        watch: Callable[[Traces], None] | None = None,
    ) -> Traces:
        """Find the memory that configs need without running them; each group of techniques is traced once. Never raises.

        Args:
            target: the kind of device to predict for (`autotune.devices.targets`). No GPU is needed or touched.
            timeout_s: tracing is killed then, and the group that it was at has failed.
            known: traces that are there already and are not traced again.
            slice_s: no group is begun after that, but for the first one.
            watch: is told now and then what is known so far.

        Returns:
            `known` and what was found, in `failures` what cannot be traced. What is left when the time is up is in
            neither: another call goes on with it.
        """
        traces = known or Traces(target=target)
        plan = plan_traces(configs)
        started = self.now_s()
        why = ""
        for attempt in range(TRACE_ATTEMPTS):
            left, spent_s = plan.without(traces), self.now_s() - started
            if not left.labels() or spent_s >= timeout_s or (attempt and spent_s >= slice_s):
                return traces
            job = TraceJob(plan=left, target=target, slice_s=slice_s - spent_s, timeout_s=timeout_s - spent_s)
            try:
                found = self._run(job, None if watch is None else partial(_tell, watch, traces))
            except ProbeFault as fault:
                why = str(fault)
                continue
            assert isinstance(found, Traces), found
            traces = traces.merged(found)
            why = next(reversed(list(found.failures.values())), "tracing ended early")
        left = plan.without(traces)
        if self.now_s() - started >= min(slice_s, timeout_s):
            return traces
        return traces.merged(Traces(target=target, failures=dict.fromkeys(left.labels(), why)))

    def _run_undisturbed(self, job: Job) -> JobResult:
        """Run one job to its end, once more if others held the memory that its limit allows."""
        result = self._run(job)
        return self._run(job) if isinstance(result, Outcome) and result.crowded else result

    def _run(self, job: Job, watch: Callable[[Traces | None], None] | None = None) -> JobResult:
        """Run one job to its end, while nothing else is in flight. `watch` is told what a trace has found so far."""
        ticket = self.submit(job)
        try:
            while (finished := self.collect(None if watch is None else WATCH_S)) is None and watch is not None:
                watch(self.found(ticket))
        except KeyboardInterrupt:
            self.cancel(ticket)
            with contextlib.suppress(ProbeFault):
                self.collect()  # frees the slot
            raise
        if finished is None or finished.ticket != ticket:
            raise RuntimeError("another job was in flight; collect it before running one alone")
        return finished.result


def _tell(watch: Callable[[Traces], None], known: Traces, found: Traces | None) -> None:
    if found is not None:
        watch(known.merged(found))
