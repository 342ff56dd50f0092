"""How far a probe has come, and what it found. Plain frozen data that survives JSON; names carry the units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from autotune.records.config import ALONE, ShapeGrowth, World
from autotune.records.energy import Counted, power_w
from autotune.records.formats import Record
from autotune.units import format_bytes, format_seconds, plural


class Kind(StrEnum):
    """How a probe ended."""

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    ERROR = "error"
    NONFINITE = "nonfinite"
    UNSUPPORTED = "unsupported"


THROTTLED = "clock throttled: "  # begins the text of a disturbance that comes from the device itself


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Tensors of one kind that each micro batch leaves behind: a leak.

    Attributes:
        num_tensors, num_bytes: what one micro batch leaves behind.
        shape, dtype: `(32, 512)`, `float32`.
        place: file and line of the user's code that made them, or of a library where no user's code did; empty where they
            were made in the backward pass.
        in_graph: whether only the autograd graph of another kept tensor holds them; otherwise a Python object does.
        has_graph: whether their own autograd graph is kept with them.
    """

    num_tensors: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    place: str
    in_graph: bool
    has_graph: bool

    def __str__(self) -> str:
        """`1 float32 tensor of shape (32, 512) made in model.py, line 12`."""
        made = f"made in {self.place}" if self.place else "made in the backward pass"
        number = plural(self.num_tensors, f"{self.dtype} tensor")
        graph = ", with its autograd graph," if self.has_graph else ""
        return f"{number} of shape {self.shape}{graph} {made}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a probe that ended `ok` measured.

    The throughput is the median over the timed blocks, with the distribution-free 95 % interval of the median. Where samples
    come from a dataset, blocks differ in their work: the throughput is then all samples over all the time, with Student's interval.
    """

    samples_per_s: float
    samples_per_s_low: float
    samples_per_s_high: float
    step_s: float  # one optimizer step
    peak_bytes: int  # over the whole run, first steps included; comparable with the memory limit
    block_samples_per_s: tuple[float, ...]  # every timed block, in order
    num_steps: int  # optimizer steps taken, warm-up included
    setup_s: float  # building model, optimizer and loader
    warmup_s: float
    timed_s: float
    explained_s: float = 0.0  # in the steps from which `phases_s` was taken
    # by which the first warm-up step, and those that compiled again, were longer than a typical one; with a filled cache
    compile_s: float = 0.0
    compile_cold_s: float = 0.0  # the same with an empty cache, where techniques of the config compile
    num_graph_breaks: int = 0  # places where compiled code goes back to Python
    # graphs compiled after the first optimizer step: batches differ in something that compiled code depends on
    num_recompilations: int = 0
    # of one optimizer step: data, forward, backward, optimizer; imbalance and communication, where ranks hold copies of the model
    phases_s: dict[str, float] = field(default_factory=dict)
    # at the start of each pass over the training set, where data workers load; counted in throughput and interval
    start_wait_s: float = 0.0
    waits_s: tuple[float, ...] = ()  # how long each rank waits when gradients of copies are averaged
    slow_rank: int | None = None  # the rank that others wait for by more than the noise
    final_loss: float = 0.0
    num_shapes: int = 0  # different shapes of the micro batches; 0 where they were not seen
    shapes_recur: bool = False  # there are several, and no more than a few that come again and again
    # of a whole training: by the run's own, and where memory grows with shapes by those of further batches
    num_shapes_expected: float = 0.0
    # when clearly above zero: a leak in the user's code, or what libraries cache for each shape
    growth_bytes_per_step: float = 0.0
    shape_growth: ShapeGrowth | None = None  # None where it was not told, or something leaks
    long_run_growth_bytes: int = 0  # further growth of the peak, for all shapes that are yet to come
    growth_s: float = 0.0  # seconds that it took to find out what grows; outside the training steps
    leaks: tuple[Kept, ...] = ()  # what is kept where memory grows: first what Python objects hold; the largest first
    skipped_steps: int = 0  # optimizer steps that GradScaler skipped
    num_alloc_retries: int = 0  # CUDA allocator: cache flushed to satisfy an allocation
    num_ooms: int = 0  # CUDA allocator: out of memory that something swallowed
    contention: float = 0.0  # share of the timed wall time in which others held the processor or GPU
    cut_short: bool = False  # too slow to be worth timing: its blocks are warm-up steps
    disturbances: tuple[str, ...] = ()  # what was seen to disturb the timing, in words
    memory: dict[str, float] = field(default_factory=dict)  # device-specific detail, bytes
    # device-specific: gpu_utilization, temperature_c, power_w
    telemetry: dict[str, float] = field(default_factory=dict)
    counted: tuple[Counted, ...] = ()  # by the counters of energy, of all devices that train together
    joules_per_sample: float | None = None  # of all these devices; None where it is not known
    no_energy: str = ""  # why it is not known, in words
    places: dict[str, dict[str, Any]] = field(default_factory=dict)  # technique -> modules that it acted on, by role

    @property
    def long_run_peak_bytes(self) -> int:
        """The peak that is expected of a long training. It exceeds `peak_bytes` where libraries cache something for each new shape."""
        return self.peak_bytes + self.long_run_growth_bytes

    @property
    def train_s(self) -> float:
        """Seconds inside training steps."""
        return self.warmup_s + self.timed_s + self.explained_s

    def with_start_wait(self, start_wait_s: float, num_samples: int, *, within: bool) -> Self:
        """The measurement where training waits at the start of each pass over so many samples: time for data.

        Args:
            within: whether the throughput is that within a pass; otherwise it knows of these waits.
        """
        if not start_wait_s:
            return self
        each_s = start_wait_s / num_samples
        per_step_s = each_s * self.step_s * self.samples_per_s
        phases_s = {name: s + per_step_s if name == "data" else s for name, s in self.phases_s.items()}
        told = replace(self, phases_s=phases_s, start_wait_s=start_wait_s)
        if not within:
            return told
        speeds = (self.samples_per_s, self.samples_per_s_low, self.samples_per_s_high)
        speed, low, high = (1 / (1 / one + each_s) for one in speeds)
        step_s = self.step_s + per_step_s
        return replace(told, samples_per_s=speed, samples_per_s_low=low, samples_per_s_high=high, step_s=step_s)

    def with_energy(self, counted: Iterable[Counted], why_none: str = "") -> Self:
        """The measurement with what the counters of energy told.

        Args:
            why_none: why there is a device that nothing was counted of; empty where there is none.
        """
        found = tuple(counted)
        watts, why = (None, why_none) if why_none else power_w(found)
        joules = None if watts is None else watts / self.samples_per_s
        return replace(self, counted=found, joules_per_sample=joules, no_energy=why)

    @property
    def unequal(self) -> str:
        """The slow rank and who waits for it, in words; empty if no rank is clearly slower."""
        if self.slow_rank is None:
            return ""
        most_s = max(self.waits_s)
        waited = format_seconds(most_s - min(self.waits_s))
        return f"rank {self.slow_rank} is the last to have its gradients: rank {self.waits_s.index(most_s)} waits {waited} for it each time"

    @property
    def compile_trouble(self) -> str:
        """What keeps compiled code from its full speed, in words; empty where nothing was seen."""
        breaks = plural(self.num_graph_breaks, "graph break") if self.num_graph_breaks else ""
        again = f"{plural(self.num_recompilations, 'graph')} compiled after the first step"
        return " and ".join(filter(None, (breaks, again if self.num_recompilations else "")))

    @property
    def kept(self) -> str:
        """What each micro batch leaves behind, in words; empty where nothing was found."""
        held = [kind for kind in self.leaks if not kind.in_graph]
        behind = [kind for kind in self.leaks if kind.in_graph]
        words = [" and ".join(map(str, held))] if held else []
        if behind:
            number = plural(sum(kind.num_tensors for kind in behind), "tensor")
            size = format_bytes(sum(kind.num_bytes for kind in behind))
            words.append(f"{number} of {size} in an autograd graph (the largest: {behind[0]})")
        return ", and ".join(words)


INPUT, FORWARD, LOSS, BACKWARD = "input", "forward", "loss", "backward"  # phases of an `Overflow`


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """Where a training step first made a value that is not finite.

    Attributes:
        phase: the `forward` or `backward` pass of a module, the `loss` (code outside of the model's modules), or `input`: the
            value was in what a module was given, by such code or by the batch.
        value: `nan`, `inf`, `-inf`.
        module: the module's qualified name in the model; empty for the model itself, and where no module was involved.
        kind: the module's class; empty where no module was involved.
        operator: the autograd graph's node whose derivative the value was.
        finite_in_fp32: whether the module's output is finite in fp32, for the same inputs; None where that is not known.
    """

    phase: str
    value: str
    module: str = ""
    kind: str = ""
    operator: str = ""
    finite_in_fp32: bool | None = None

    def __str__(self) -> str:
        """Where the value arose, and what to do about it."""
        named = f"{self.module} ({self.kind})" if self.module else f"the model itself ({self.kind})"
        if self.phase == INPUT:
            return f"{self.value} was in what {named} is given: look at the batch, and at the code between modules"
        if self.phase == LOSS:
            return (
                f"{self.value} was first in the loss, outside of the model's modules: compute it in fp32 (`output.float()`) or, "
                "where that is done, look for a division by zero, a logarithm or a mean of nothing in it"
            )
        where = f"{self.phase} pass of {named}" if self.kind else "backward pass, outside of the model's modules"
        by = f" by {self.operator}" if self.operator else ""
        made = f"{self.value} was first made in the {where}{by}"
        if self.finite_in_fp32 is False:
            return f"{made}; in fp32 it is not finite either, so look at the values that it is given"
        keep = "keep it in fp32: `with torch.autocast(device, enabled=False)` in its forward, on `x.float()`"
        return f"{made}; {'in fp32 it is finite, so ' if self.finite_in_fp32 else ''}{keep}"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a probe that was ended early still says of its config.

    Attributes:
        samples_per_s_high: the config trains at most so fast; None where nothing is known.
        peak_bytes_low: it needs at least this much memory, comparable with the limit; 0 where no micro step was done.
    """

    samples_per_s_high: float | None
    peak_bytes_low: int


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """One probe's result, whatever it was.

    Attributes:
        cause: one line in plain words; empty when `kind` is `ok`.
        detail: the traceback in the user's code, or other evidence; may be empty.
        stage: where the probe was: `setup`, `warmup`, `timing`, `checks`.
        log: path of the file that holds what the user's code printed.
        own_fault: whether the exception arose in a line of autotune itself; `cause` says so, too.
        device_fault: whether torch cannot use the device at all, for any task.
        waited_for: for `timeout` in a world: the rank for which the others waited, and where it was, in words; empty where none
            was seen to hang. `cause` says so, too.
        too_few_samples: for `error`: a pass over the training set gives no batch as large as the config's.
        crowded: other processes held memory that the limit allows, or, where the kernel killed it, the host's. A disturbance, which
            says nothing of the config.
        on_host: for `oom` on a GPU: it was the host's memory that ran out.
        attempted_bytes: for `oom`: what the failed allocation asked for, when known.
        train_s: seconds spent inside training steps, also in a probe that failed.
        compiling_s: the part of `wall_s` that a separate process took to compile before.
        bound: for a probe whose process was ended after some micro steps: what these say of the config.
        overflow: for `nonfinite`: where it began, if that was found.
        world: the processes that trained the config together.
        slot, device: where it ran, by the runner's names; empty where that was not kept.
        beside: labels of the jobs that ran on the same host at some time during the probe.
    """

    kind: Kind
    measurement: Measurement | None = None
    cause: str = ""
    detail: str = ""
    stage: str = ""
    log: str = ""
    wall_s: float = 0.0
    train_s: float = 0.0
    compiling_s: float = 0.0
    peak_bytes: int = 0
    attempted_bytes: int = 0
    own_fault: bool = False
    device_fault: bool = False
    waited_for: str = ""
    too_few_samples: bool = False
    crowded: bool = False
    on_host: bool = False
    bound: Bound | None = None
    overflow: Overflow | None = None
    world: World = ALONE
    slot: str = ""
    device: str = ""
    beside: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the probe ran to its end and was measured."""
        return self.kind is Kind.OK

    @property
    def disturbances(self) -> tuple[str, ...]:
        """What was seen to disturb the timing, in words; empty also where nothing was measured."""
        return self.measurement.disturbances if self.measurement else ()

    @property
    def running_s(self) -> float:
        """Seconds that its own process took, without the process that compiled before."""
        return self.wall_s - self.compiling_s

    @property
    def communicators_seen(self) -> tuple[int, int] | None:
        """The communicators that a process had, and the bytes that they took of its device; None where none was seen to take any."""
        memory = self.measurement.memory if self.measurement else {}
        seen = int(memory.get("num_communicators", 0)), int(memory.get("communicators_bytes", 0))
        return seen if all(seen) else None

    @property
    def samples_per_s_high(self) -> float | None:
        """How fast the config trains at most, where the probe was ended early; None where that is not known."""
        return self.bound.samples_per_s_high if self.bound else None

    @property
    def spent_training_s(self) -> float:
        """Seconds inside training steps, whether the probe was measured or not."""
        return self.measurement.train_s if self.measurement else self.train_s


def calmer(first: Outcome, second: Outcome) -> Outcome:
    """The less disturbed of two probes of one config; the first where they are equally disturbed."""
    if first.measurement is None:  # others held its memory
        return second
    if second.measurement is None:
        return first
    return min(first, second, key=_unrest)


def _unrest(outcome: Outcome) -> tuple[int, float]:
    assert outcome.measurement is not None
    return len(outcome.measurement.disturbances), outcome.measurement.contention


COMPILING = "compiling"  # the stage before all others, in a separate process
COMPARING = "comparing a batch with its micro batches"  # a stage of an inspection


@dataclass(frozen=True, kw_only=True)
class Progress(Record):
    """What a probe had done when it last reported.

    Attributes:
        stage: `compiling`, `setup`, `warmup` or `timing`; of an inspection `setup` or `COMPARING`.
        train_s: seconds inside training steps.
        num_micro_steps: micro batches trained on.
        peak_bytes: the most memory held so far, comparable with the memory limit; 0 before the first micro step.
        samples_per_s_high: throughput of the fastest micro step so far; a whole step, with its update, is no faster. The first
            optimizer step does not count, since it compiles and allocates, nor do the largest batches of a dataset; None before others.
    """

    stage: str = "setup"
    train_s: float = 0.0
    num_micro_steps: int = 0
    peak_bytes: int = 0
    samples_per_s_high: float | None = None

    @property
    def bound(self) -> Bound | None:
        """What is known of the config if the probe ends here; None before its first micro step is done."""
        if not self.num_micro_steps:
            return None
        return Bound(samples_per_s_high=self.samples_per_s_high, peak_bytes_low=self.peak_bytes)
