"""Probes and whole searches over a faked card: the real device, judgement and search; training is allocations on paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.devices.cuda import CudaDevice
from autotune.prediction.traces import Traces
from autotune.probe.observers.base import Observers
from autotune.records.config import ALONE, Config, ProbeSettings
from autotune.records.device import NOT_MEASURED, Slot
from autotune.records.inspection import BatchSupport, TaskFacts
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome, Progress
from autotune.records.result import Result
from autotune.runners.failure import outcome_of_failure
from autotune.runners.jobs import CalibrateJob, CheckJob, InspectJob, Job, NotCompared, ProbeJob, TraceJob
from autotune.runners.runner import InstantRunner
from autotune.techniques import find_techniques
from autotune.tuning.search import search
from autotune.units import GIB, MIB
from tests.closed_form import inspection, measurement
from tests.devices.fake_card import Machine

techniques = find_techniques()

MODEL_BYTES = 2 * GIB  # weights, gradients and the optimizer's state
SAMPLE_BYTES = 750 * MIB
SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192)


def train(
    machine: Machine,
    limit_bytes: int,
    batch_size: int,
    *,
    index: int = 0,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:
    """One probe in the process that runs: within the limit, `MODEL_BYTES` and `SAMPLE_BYTES` a sample.

    Args:
        meanwhile: happens once the limit is set, before the activations are allocated.
    """
    assert machine.process is not None
    device: CudaDevice | None = None
    config = techniques.complete({"batch_size": batch_size})
    try:
        opened = CudaDevice(index)
        opened.limit_memory(limit_bytes)
        device = opened
        machine.process.allocate(MODEL_BYTES)
        meanwhile()
        activations = [machine.process.allocate(SAMPLE_BYTES) for _ in range(batch_size)]
        observers = Observers(device, ALONE)
        observers.start()
        for number in range(6):
            observers.sample(number)
        observers.end()
        for key in activations:
            machine.process.free(key)
    except Exception as error:
        return replace(outcome_of_failure(error, device, "warmup"), wall_s=0.1)
    speed = 1000 * batch_size / (batch_size + 8)
    measured = measurement(config, speed, device.peak_bytes())
    return Outcome(kind=Kind.OK, wall_s=0.1, measurement=observers.stop(measured))


@dataclass
class FakeCardRunner(InstantRunner):
    """Each job is a new process on the card.

    Attributes:
        before: happens before the probe of a number.
        during: happens in an inspection or a check, within its limit, before it allocates.
    """

    machine: Machine
    before: Callable[[int], None] = lambda number: None
    during: Callable[[Job[Any], int], None] = lambda job, number: None
    index: int = 0
    releases_in: int = 0

    task_name = "faked"

    def __post_init__(self) -> None:
        super().__init__()
        self.outcomes: list[tuple[int, Outcome]] = []
        self.settings: list[ProbeSettings] = []
        self.crowded: dict[str, list[bool]] = {InspectJob.name: [], CheckJob.name: []}
        self._device = CudaDevice(self.index)
        self._clock_s = 0.0

    def now_s(self) -> float:
        return self._clock_s

    def slots(self) -> tuple[Slot, ...]:
        return (Slot(name=self._device.name, device=self._device.info()),)

    def result_of(self, job: Job[Any]) -> Any:
        self._clock_s += 1.0
        match job:
            case CalibrateJob():
                return NOT_MEASURED
            case InspectJob():
                return self._within_limit(job, job.memory_limit_bytes, self._inspect)
            case ProbeJob():
                return self._probe(job.config, job.settings)
            case CheckJob():
                return self._within_limit(job, job.settings.memory_limit_bytes, self._check)
            case TraceJob():
                return Traces(target=job.target, failures=dict.fromkeys(job.plan.labels(), "nothing is traced"))

    def _within_limit(
        self, job: InspectJob | CheckJob, limit_bytes: int | None, result_of: Callable[[CudaDevice], Any]
    ) -> Any:
        """An inspection's or a check's result, if weights and two samples find room."""
        assert limit_bytes is not None
        process = self.machine.process_of(self.index)
        self._device.settle()
        device = CudaDevice(self.index)
        try:
            device.limit_memory(limit_bytes)
            result = result_of(device)
            self.during(job, len(self.crowded[job.name]))
            process.allocate(MODEL_BYTES + 2 * SAMPLE_BYTES)
        except Exception as error:
            result = outcome_of_failure(error, device, "setup")
        self.crowded[job.name].append(isinstance(result, Outcome) and result.crowded)
        self.machine.process_of(self.index)
        return result

    def _check(self, device: CudaDevice) -> Any:
        return NotCompared(reason="allocations on paper have no gradients")

    def _inspect(self, device: CudaDevice) -> Any:
        return inspection(
            facts=TaskFacts(name="faked", source_hash="abc"),
            device=device.info(),
            global_batch=None,
            baseline=techniques.complete({"batch_size": 8}).as_dict(),
            batch=BatchSupport(sizes=SIZES),
            support={name: t for name, t in inspection().support.items() if t.choices == (techniques[name].off,)}
            | {name: replace(t, choices=t.choices[:1]) for name, t in inspection().support.items()},
            outside_bytes=device.current_bytes(),
        )

    def _probe(self, config: Config, settings: ProbeSettings) -> Outcome:
        self.machine.process_of(self.index, releases_in=self.releases_in)
        self._device.settle()
        self.before(len(self.outcomes))
        assert settings.memory_limit_bytes is not None
        self.settings.append(settings)
        outcome = train(self.machine, settings.memory_limit_bytes, config.batch_size, index=self.index)
        self.outcomes.append((config.batch_size, outcome))
        self.machine.process_of(self.index, releases_in=self.releases_in)
        return outcome

    def progress(self, ticket: int) -> Progress | None:
        return None


def found(folder: Path, runner: FakeCardRunner, **options: object) -> Result:
    """The result of a whole search."""
    asked = SearchOptions(**{"budget_s": 60.0, "storage": str(folder / "faked.db"), **options})  # type: ignore[arg-type]
    return search(None, asked, runner=runner)


def fits(limit_bytes: int, headroom: float = 0.05) -> int:
    """The largest batch of `SIZES` within the limit less headroom, the context included."""
    usable = limit_bytes * (1 - headroom)
    return max(size for size in SIZES if MODEL_BYTES + size * SAMPLE_BYTES + 420 * MIB <= usable)
