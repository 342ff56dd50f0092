"""`Job`: what a runner is asked for. Each kind is one class: what the worker must know, and how its answer is read.

A new kind is a class here, and in `runners/worker.py` the function of its `name`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from autotune.errors import AutotuneError
from autotune.prediction.traces import Plan, Traces
from autotune.records.check import Check
from autotune.records.config import ALONE, Choice, Config, ProbeSettings, World, describe_batch
from autotune.records.device import NOT_MEASURED, Calibration, DeviceInfo
from autotune.records.explanation import Anatomy, ModuleTimes
from autotune.records.formats import encode
from autotune.records.inspection import Inspection
from autotune.records.outcome import COMPARING, Kind, Outcome

CALIBRATION_TIMEOUT_S = 30.0  # 3 s of measuring, and what a context on a GPU takes

R = TypeVar("R")
Message = Mapping[str, Any]  # of a worker
Anatomies = tuple[Anatomy | str, ...]  # of each config, or why it cannot be traced; of those begun


class JobFailed(AutotuneError):
    """A job failed, by what the config or the user's code does, or for want of memory or time: `outcome` says how."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.cause, frames=outcome.detail)
        self.outcome = outcome


class Job(Generic[R]):
    """One thing to do with a task, in a process of its own. `R` is what comes of it, where it does not fail.

    Attributes:
        name: of the worker's function.
        again_where_crowded: whether it is run once more where others held the memory that its limit allows.
        timeout_s: the process is killed then.
        world: the processes that train together.
    """

    name: ClassVar[str]
    again_where_crowded: ClassVar[bool] = True

    if TYPE_CHECKING:  # a subclass's field would take it for its default

        @property
        def timeout_s(self) -> float: ...

        @property
        def world(self) -> World: ...
    else:
        world = ALONE

    @property
    def label(self) -> str:
        """What it is, in a few words."""
        return self.name

    def arguments(self) -> dict[str, Any]:
        """What the worker's function takes beside the device: the fields as plain data."""
        return {name: encode(value) for name, value in vars(self).items() if name != "timeout_s"}

    def read(self, answer: Message, earlier: Sequence[Message] = ()) -> R | Outcome:
        """What the worker's answer says.

        Args:
            earlier: what the worker has sent before.
        """
        if "outcome" in answer:
            return self.failed(Outcome.from_dict(answer["outcome"]), earlier)
        return self.decode(answer)

    def decode(self, answer: Message) -> R:
        """What an answer says that is no outcome."""
        raise NotImplementedError(f"a {self.name} answers with an outcome")

    def failed(self, outcome: Outcome, earlier: Sequence[Message]) -> R | Outcome:
        """What is left where it ended with an outcome."""
        return outcome

    def found(self, earlier: Sequence[Message]) -> R | None:
        """What is known while it runs; None where nothing is."""
        return None

    def after(self, outcome: Outcome) -> Self | None:
        """The job to run in place of this one, which failed; None for none."""
        return None

    def result(self, found: R | Outcome) -> R:
        """What comes of it, once it has ended.

        Raises:
            JobFailed: it failed, and how is no result of it.
        """
        if isinstance(found, Outcome):
            raise JobFailed(found)
        return found


@dataclass(frozen=True, kw_only=True)
class CalibrateJob(Job[Calibration]):
    """Measure the device itself."""

    name: ClassVar[str] = "calibrate"
    timeout_s: float = CALIBRATION_TIMEOUT_S

    def decode(self, answer: Message) -> Calibration:
        return Calibration.from_dict(answer["calibration"])


@dataclass(frozen=True, kw_only=True)
class InspectJob(Job[Inspection]):
    """Validate the task and ask which techniques apply.

    Attributes:
        calibration: of the runner's device, which decides what is worth trying.
        absent: a GPU that is not there, to ask for in place of the runner's device.
        trained: what is to be trained of the task, by techniques; where it says nothing, what the task's baseline trains.
        comparing_s: for finding out whether micro batches give the gradient of a whole batch; 0 to leave that out.
        not_compared: why finding that out failed before.
        world: the processes that are to train together.
        trains: whether a step is tried. Where not, no model is built for real either, unless its code needs values.
    """

    name: ClassVar[str] = "inspect"
    memory_limit_bytes: int | None
    timeout_s: float
    calibration: Calibration = NOT_MEASURED
    absent: DeviceInfo | None = None
    trained: Mapping[str, Choice] = field(default_factory=dict)
    comparing_s: float = 0.0
    world: World = ALONE
    trains: bool = True
    not_compared: str = ""

    def decode(self, answer: Message) -> Inspection:
        return Inspection.from_dict(answer["inspection"])

    def after(self, outcome: Outcome) -> Self | None:
        """Whatever the user's code does while batches are compared, the task may train."""
        if not self.comparing_s or outcome.stage != COMPARING:
            return None
        return replace(self, comparing_s=0.0, not_compared=outcome.cause)


@dataclass(frozen=True, kw_only=True)
class ConfigJob(Job[R]):
    """What runs a config itself."""

    config: Config
    settings: ProbeSettings

    @property
    def label(self) -> str:
        return f"{self.name} of {describe_batch(self.config)}"

    @property
    def timeout_s(self) -> float:
        return self.settings.timeout_s

    @property
    def world(self) -> World:
        return self.settings.world


@dataclass(frozen=True, kw_only=True)
class MeasureJob(ConfigJob[Outcome]):
    """What measures a config: how it ended is the result, however that was."""

    def result(self, found: Outcome) -> Outcome:
        return found


@dataclass(frozen=True, kw_only=True)
class ProbeJob(MeasureJob):
    """Train a few steps of a config and measure them."""

    name: ClassVar[str] = "probe"
    again_where_crowded: ClassVar[bool] = False  # who probes keeps both outcomes


@dataclass(frozen=True, kw_only=True)
class EvaluateJob(MeasureJob):
    """Measure evaluation in batches of `config.batch_size` samples, beside the state that a training step makes.

    Attributes:
        num_samples: of that training step.
    """

    name: ClassVar[str] = "evaluate"
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class NotCompared:
    """A check that this runner cannot do, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckJob(ConfigJob[Check | NotCompared | Outcome]):
    """Compare a config's gradients with plain fp32's, on `batch_size` samples. What keeps it from that is a result, too."""

    name: ClassVar[str] = "check"
    batch_size: int

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "memory_limit_bytes": self.settings.memory_limit_bytes}

    def decode(self, answer: Message) -> Check | NotCompared:
        return Check.from_dict(answer["check"]) if "check" in answer else NotCompared(reason=answer["not_compared"])

    def result(self, found: Check | NotCompared | Outcome) -> Check | NotCompared | Outcome:
        return found


@dataclass(frozen=True, kw_only=True)
class ModulesJob(ConfigJob[ModuleTimes]):
    """Measure where a config's time goes, module by module."""

    name: ClassVar[str] = "modules"

    def decode(self, answer: Message) -> ModuleTimes:
        return ModuleTimes.from_dict(answer["modules"])


@dataclass(frozen=True, kw_only=True)
class TracingJob(Job[R]):
    """What runs no config, and takes nothing of the device.

    Attributes:
        target: the kind of device to predict for (`autotune.devices.targets`).
        slice_s: after that none is begun but the first.
    """

    target: str
    slice_s: float = math.inf
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class TraceJob(TracingJob[Traces]):
    """Trace the memory of a plan's groups, one after another. It finds the traces that it adds."""

    name: ClassVar[str] = "trace"
    plan: Plan

    def read(self, answer: Message, earlier: Sequence[Message] = ()) -> Traces | Outcome:
        return super().read(answer, earlier) if "outcome" in answer else self.found(earlier)

    def found(self, earlier: Sequence[Message]) -> Traces:
        found = Traces(target=self.target)
        for message in earlier:
            if "traces" in message:
                found = found.merged(Traces.from_dict(message["traces"]))
        return found

    def failed(self, outcome: Outcome, earlier: Sequence[Message]) -> Traces:
        """The group that it had begun has failed. Where it did not get to one, none if its time was up, and else all."""
        begun = [message["begun"] for message in earlier if "begun" in message][-1:]
        if not begun and outcome.kind is not Kind.TIMEOUT:
            begun = self.plan.labels()
        return self.found(earlier).merged(Traces(target=self.target, failures=dict.fromkeys(begun, outcome.cause)))


@dataclass(frozen=True, kw_only=True)
class AnatomyJob(TracingJob[Anatomies]):
    """Trace what lives at the peak of each of some configs, in rank 0 of a world."""

    name: ClassVar[str] = "anatomy"
    configs: tuple[Config, ...]
    world: World = ALONE

    def decode(self, answer: Message) -> Anatomies:
        return tuple(one if isinstance(one, str) else Anatomy.from_dict(one) for one in answer["anatomies"])
