"""Watches the optimizer's steps in a process of the user's own command: warm-up, timed blocks, peak, and how it ends.

The rules are those of a probe (`autotune.probe`), as far as they hold for a loop that is another's: steps are seen when they
have ended, and what a step consists of is not.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

from autotune.devices import Device, capabilities_of, device_named
from autotune.errors import DeviceError
from autotune.lazy import torch
from autotune.probe.observers.base import Observers
from autotune.probe.timing import MIN_BLOCK_S, MIN_WARMUP_STEPS, Reporter, Timing
from autotune.probe.waiting import NUM_TOLD, RankTimes, find_copies, last_times, tell_of_each_pass
from autotune.records.config import Config, ProbeSettings, World
from autotune.records.formats import Record
from autotune.records.inspection import optimizer_name
from autotune.records.outcome import Kind, Measurement, Outcome, Progress
from autotune.runners.failure import outcome_of_failure
from autotune.task.source import imported_hash

FEWEST_BLOCKS = 3  # of a run that ended by itself
LOOK_EVERY_S = 10.0  # whether the process that started the command is still there


@dataclass(frozen=True, kw_only=True)
class RankReport(Record):
    """One process of a command.

    Attributes:
        began_s: when it began to be watched, on the monotonic clock.
        outside_bytes: what it held of the device's memory that is not the model's, as `Inspection.outside_bytes`.
        optimizer: class of the optimizer whose steps count, as `TaskFacts.optimizer`; empty before its first step.
        has_batchnorm: as `TaskFacts.has_batchnorm`, from its first step on.
        code: `imported_hash` at its first step, or where it failed before; empty until then.
        times: of steps of a rank that holds a copy of the model.
        outcome: how it failed; None where it did not.
        is_done: it knows enough, and waits to be ended.
    """

    world: World = field(default_factory=World)
    began_s: float
    outside_bytes: int = 0
    optimizer: str = ""
    has_batchnorm: bool = False
    code: str = ""
    progress: Progress = field(default_factory=Progress)
    num_steps: int = 0
    times: tuple[RankTimes, ...] = ()
    measurement: Measurement | None = None
    outcome: Outcome | None = None
    is_done: bool = False

    @property
    def known_world(self) -> World | None:
        """Its place among the ranks; None while a process that seems alone has not taken a step."""
        return self.world if self.optimizer or self.world.size > 1 else None


class Watch:
    """One process's steps. What it knows lies in a file of its own, which is replaced as a whole.

    Args:
        probe: `config`, `settings`, `device`, `reports` (folder), `started_s` (monotonic, of the command), and
            `outside_bytes`, what the process held of the host's memory before it built a model.
    """

    def __init__(self, probe: dict[str, Any]) -> None:
        self._settings = ProbeSettings.from_dict(probe["settings"])
        self._config = Config(tuple(probe["config"].items()))
        self._kind = probe["device"].partition(":")[0]
        self._file = Path(probe["reports"]) / f"{os.getpid()}.json"
        self._started_s: float = probe["started_s"]
        self._launcher = Path(probe["reports"]).with_name("probe.json")
        self._looked_s = time.monotonic()
        self._device: Device | None = None
        self._world = _place()
        self._samples = self._config.plan_in(self._world).samples_per_step
        self._reporter = Reporter(self._send, self._peak_bytes, self._config.batch_size * self._world.data_parallel)
        on_host_bytes = 0 if capabilities_of(self._kind).own_memory else probe.get("outside_bytes", 0)
        self._report = RankReport(world=self._world, began_s=time.monotonic(), outside_bytes=on_host_bytes)
        self._optimizer: Any = None  # whose steps count: the first that steps
        self._first_s = self._last_s = 0.0
        self._steps_s: list[float] = []  # of the warm-up, without the first, whose beginning was not seen
        self._num_steps = self._in_block = 0
        self._warmup_s = self._setup_s = 0.0
        self._timing = Timing(self._settings, self._samples, self._peak_bytes, unequal=True)  # the samples are real

    def stepped(self, optimizer: Any) -> None:
        """Count a step that has just been taken. Returns, unless enough is known: then this process has nothing more to do."""
        if self._optimizer is None:
            self._begin(optimizer)
        elif optimizer is not self._optimizer:
            return
        self._num_steps += 1
        self._in_block += 1
        self._look_at_rank()
        timing = self._reporter.stage == "timing"
        if timing and time.perf_counter() - self._last_s < MIN_BLOCK_S and not self._settings.num_steps:
            return
        assert self._device is not None
        self._device.synchronize()
        now_s = time.perf_counter()
        step_s, count, is_first = (now_s - self._last_s), self._in_block, self._num_steps == 1
        if is_first:
            self._setup_s, step_s = time.monotonic() - self._started_s, 0.0
            self._first_s = now_s
        self._reporter.trained(step_s, count * self._config.accumulation_steps, tells_speed=not is_first)
        if timing:
            self._timing.blocks.add(count * self._samples / step_s, step_s)
            self._observers.sample(self._num_steps)
        elif not is_first:
            self._steps_s.append(step_s)
            self._observers.sample_warmup(self._num_steps)
        self._decide(timing=timing)
        self._look_for_launcher()
        self._last_s, self._in_block = time.perf_counter(), 0

    def failed(self, error: BaseException) -> None:
        """Tell of an exception that ends the process."""
        if self._device is None and not capabilities_of(self._kind).own_processors:
            self._enter(self._kind)
        elif self._device is None and (gpus := getattr(torch, self._kind)).is_initialized():
            # else a lack of memory is taken for others'; but a context that an error has broken tells nothing
            with contextlib.suppress(RuntimeError, DeviceError):
                self._enter(f"{self._kind}:{gpus.current_device()}")
        outcome = outcome_of_failure(error, self._device, self._reporter.stage, self._reporter.train_s)
        code = self._report.code or imported_hash()
        self._report = replace(self._report, outcome=outcome, measurement=None, code=code)
        self._send(self._reporter.progress)

    def _begin(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = parameters[0].device
        if found.type != self._kind:
            cause = (
                f"the command trains on {found.type}, and the search is for {self._kind}: "
                f"add --device {found.type}, or let the command train on {self._kind}"
            )
            self._end(outcome=Outcome(kind=Kind.ERROR, cause=cause))
        has_number = capabilities_of(found.type).own_processors
        self._enter(f"{found.type}:{found.index or 0}" if has_number else found.type)
        self._report = replace(
            self._report,
            optimizer=optimizer_name(type(optimizer)),
            has_batchnorm=_has_batchnorm(),
            code=imported_hash(),
        )
        assert self._device is not None
        self._observers = Observers(self._device, self._world)
        self._copies = find_copies() if self._world.size > 1 else None
        if self._copies is not None:
            tell_of_each_pass(self._copies)
        self._reporter.enter("warmup")
        self._last_s = time.perf_counter()
        if self._world.rank == 0:
            atexit.register(self._told_at_the_end)
            # a child of multiprocessing may leave without atexit
            Finalize(None, self._told_at_the_end, exitpriority=0)

    def _look_at_rank(self) -> None:
        """Note what this rank alone took until its last wait but one, in some of the first steps."""
        if self._copies is None or self._num_steps <= MIN_WARMUP_STEPS:
            return
        times = last_times(self._copies, self._num_steps * self._config.accumulation_steps)
        if times is not None:
            self._report = replace(self._report, times=(*self._report.times, times))
        if self._num_steps > NUM_TOLD:
            tell_of_each_pass(self._copies, each=False)
            self._copies = None

    def _enter(self, name: str) -> None:
        self._device = device_named(name)
        self._device.adopt()
        if self._device.capabilities.own_memory:
            self._report = replace(self._report, outside_bytes=self._device.outside_bytes())
        if self._settings.memory_limit_bytes is not None:
            self._device.limit_memory(self._settings.memory_limit_bytes)

    def _decide(self, *, timing: bool) -> None:
        """Go from one stage to the next, and end when there is nothing more to learn. Only the first rank ends."""
        assert self._device is not None
        if timing:
            # where an exact number of steps is timed, each is a block of its own
            num_timed, spent_s = len(self._timing.blocks.samples_per_s), time.monotonic() - self._started_s
            if not self._world.rank and self._timing.is_done(num_timed, spent_s):
                self._end(measurement=self._measurement())
        elif self._timing.is_warm(self._num_steps, self._steps_s, self._reporter.train_s):
            self._warmup_s = self._reporter.train_s
            if not self._world.rank and self._timing.cut_short(self._steps_s):
                self._end(measurement=self._measurement(cut_short=True))
            self._observers.start()
            self._reporter.enter("timing")

    def _end(self, **known: Outcome | Measurement) -> NoReturn:
        """Go no further in the user's code, which might write or upload: whoever reads the report, with what is known, ends it."""
        self._report = replace(self._report, is_done=True, **known)  # type: ignore[arg-type]
        self._send(self._reporter.progress)
        while True:
            time.sleep(LOOK_EVERY_S)
            self._look_for_launcher()

    def _look_for_launcher(self) -> None:
        """Leave if nobody is there any more who would end this process: its lock says so, whatever became of its number."""
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        try:
            with self._launcher.open() as locked:
                fcntl.flock(locked, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except OSError:  # it holds the lock, or nothing can be known
            return
        os._exit(1)

    def _told_at_the_end(self) -> None:
        """The command ended before enough was known."""
        if len(self._timing.blocks.samples_per_s) >= FEWEST_BLOCKS and self._report.outcome is None:
            self._report = replace(self._report, measurement=self._measurement())
        self._send(self._reporter.progress)

    def _measurement(self, *, cut_short: bool = False) -> Measurement:
        measured = self._timing.measurement(
            num_steps=self._num_steps,
            setup_s=self._setup_s,
            warmup_s=self._warmup_s,
            timed_s=self._reporter.train_s - self._warmup_s,
            cut_short=cut_short,
        )
        if not cut_short:
            self._observers.end()
        return self._observers.stop(measured)

    def _peak_bytes(self) -> int:
        return 0 if self._device is None else self._device.peak_bytes()

    def _send(self, progress: Progress) -> None:
        self._report = replace(self._report, progress=progress, num_steps=self._num_steps)
        whole = self._file.with_suffix(".part")
        whole.write_text(json.dumps(self._report.to_dict()))
        whole.replace(self._file)


def _place() -> World:
    """This process's place among the ranks; what the environment says holds for nothing unless torch took it up."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return World(size=distributed.get_world_size(), rank=distributed.get_rank())
    return World()


def _has_batchnorm() -> bool:
    """Whether a model of this process normalises over the samples of a micro batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(issubclass(type(one), _BatchNorm) and one.training for one in gc.get_objects())
