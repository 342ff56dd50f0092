"""A runner that computes instead of training, to test search logic alone: a known optimum and no process."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.prediction.traces import Traces
from autotune.proposers.cost_model import CostModel
from autotune.records.check import Check
from autotune.records.config import Config, ProbeSettings
from autotune.records.device import NOT_MEASURED, DeviceInfo, Slot
from autotune.records.inspection import BatchSupport, Inspection, Support, TaskFacts
from autotune.records.objective import OBJECTIVES
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.study import Fingerprint, SearchFacts
from autotune.runners.jobs import CalibrateJob, CheckJob, EvaluateJob, InspectJob, Job, NotCompared, ProbeJob, TraceJob
from autotune.runners.runner import InstantRunner
from autotune.space import Space, build_space
from autotune.study.history import History
from autotune.study.place import place_of
from autotune.study.store import Store
from autotune.techniques import find_techniques
from autotune.tuning.budget import Budget
from autotune.tuning.events import Listener, Note
from autotune.tuning.state import Search
from autotune.tuning.trace_ahead import Tracing

techniques = find_techniques()

MIB = 2**20
LIMIT_BYTES = 1000 * MIB

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
BATCH = BatchSupport(sizes=SIZES, accumulation_steps=SIZES)
SUPPORT = {
    "amp": Support(choices=("off", "bf16", "fp16")),
    "checkpoint_segments": Support(choices=(0, 1, 2, 3, 6)),
    "optimizer_impl": Support(choices=("default", "fused")),
}


@dataclass
class ClosedFormRunner(InstantRunner):
    """Speed rises with the batch towards a plateau, bf16 gains 1.4x, checkpointing costs time and saves memory."""

    noise: float = 0.0
    seed: int = 0
    seconds: float = 0.0  # of real time that a probe takes
    configs: list[Config] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)  # their batch sizes
    waited_s: float = 0.0  # by which its clock is ahead
    num_slots: int = 1
    limit_bytes: int = LIMIT_BYTES

    task_name = "closed"

    def __post_init__(self) -> None:
        super().__init__()
        self._random = random.Random(self.seed)

    def now_s(self) -> float:
        return time.monotonic() + self.waited_s

    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(name=f"slot {number}", device=inspection().device) for number in range(self.num_slots))

    def result_of(self, job: Job[Any]) -> Any:
        match job:
            case CalibrateJob():
                return NOT_MEASURED
            case InspectJob():
                return inspection()
            case ProbeJob():
                return self.outcome_of(job.config, job.settings)
            case CheckJob():
                return self.check_of(job.config, job.settings, job.batch_size)
            case EvaluateJob():
                return self.evaluated(job.config)
            case TraceJob():
                return Traces(target=job.target, failures=dict.fromkeys(job.plan.labels(), "nothing is traced"))

    def check_of(self, config: Config, settings: ProbeSettings, batch_size: int) -> Check | Outcome | NotCompared:
        """Tests of checks say what is found."""
        return NotCompared(reason="a closed form has no gradients")

    def evaluated(self, config: Config) -> Outcome:
        """Three times as fast as training, in 10 MiB a sample."""
        self.evaluations.append(config.batch_size)
        self.waited_s += 0.1
        peak = (200 + 10 * config.batch_size) * MIB
        if peak > LIMIT_BYTES:
            return Outcome(kind=Kind.OOM, cause="no memory", peak_bytes=LIMIT_BYTES, wall_s=0.1)
        return Outcome(kind=Kind.OK, measurement=measurement(config, 3 * self.samples_per_s(config), peak), wall_s=0.1)

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        """The outcome of the closed form, with noise between processes."""
        self.configs.append(config)
        time.sleep(self.seconds)
        peak = self.peak_bytes(config)
        if peak > self.limit_bytes:
            return Outcome(
                kind=Kind.OOM,
                cause="no memory",
                peak_bytes=self.limit_bytes,
                attempted_bytes=peak - self.limit_bytes,
                wall_s=0.1,
            )
        speed = self.samples_per_s(config) * (1 + self.noise * self._random.gauss(0, 1))
        return Outcome(kind=Kind.OK, measurement=measurement(config, speed, peak), wall_s=0.1)

    def samples_per_s(self, config: Config) -> float:
        """The true throughput."""
        batch = config.batch_size
        gain = {"off": 1.0, "bf16": 1.4, "fp16": 1.2}[str(config["amp"])]
        gain *= 1 - 0.04 * int(config["checkpoint_segments"])
        gain *= 1.05 if config["optimizer_impl"] == "fused" else 1.0
        return 100 * gain * batch / (batch + 4)

    def peak_bytes(self, config: Config) -> int:
        """The true peak."""
        per_sample = {"off": 60, "bf16": 40, "fp16": 40}[str(config["amp"])] * (
            1 - 0.12 * int(config["checkpoint_segments"])
        )
        return int((200 + per_sample * config.batch_size) * MIB)

    def untraced_bytes(self, config: Config) -> int:
        """What of the peak no trace shows."""
        return 0

    def best_samples_per_s(self, space: Space, usable_bytes: float) -> float:
        """The optimum of the space."""
        return max(self.samples_per_s(config) for config in space if self.peak_bytes(config) <= usable_bytes)


def measurement(config: Config, samples_per_s: float, peak_bytes: int) -> Measurement:
    """A measurement with a 1 % interval."""
    return Measurement(
        samples_per_s=samples_per_s,
        samples_per_s_low=samples_per_s * 0.99,
        samples_per_s_high=samples_per_s * 1.01,
        step_s=config.samples_per_step / samples_per_s,
        peak_bytes=peak_bytes,
        block_samples_per_s=(samples_per_s,) * 6,
        num_steps=10,
        setup_s=0.01,
        warmup_s=0.04,
        timed_s=0.05,
    )


def inspection(**changes: object) -> Inspection:
    """What a small task on a CPU would report."""
    support = {name: Support(choices=(t.off,), reason="not here") for name, t in techniques.items()} | SUPPORT
    base = {
        "facts": TaskFacts(name="closed", source_hash="abc"),
        "device": DeviceInfo(name="cpu", model="test", total_bytes=2**34, free_bytes=2**33),
        "global_batch": 96,
        "baseline": techniques.complete({"batch_size": 4}, global_batch=96).as_dict(),
        "baseline_given": True,
        "batch": BATCH,
        "support": support,
        "outside_bytes": 200 * MIB,
    }
    return Inspection(**{**base, **changes})  # type: ignore[arg-type]


def make_search(folder: Path, runner: ClosedFormRunner, **changes: Any) -> Search:
    """A search over the closed form, with its study in `folder`, or at the URL `storage`; `changes` are options, or parts of the search."""
    found = changes.pop("inspection", inspection())
    peaks = changes.pop("peaks", None)
    options = SearchOptions(
        budget_s=changes.pop("budget_s", 1000.0),
        probe_timeout_s=changes.pop("timeout_s", None),
        **{name: changes.pop(name) for name in ("num_trials", "seed", "fix", "objective") if name in changes},
        sampler=changes.pop("sampler", "random"),
    )
    space, _ = build_space(found, find_techniques(), fix=options.fix)
    objective = OBJECTIVES[options.objective](
        memory_limit_bytes=changes.pop("limit_bytes", LIMIT_BYTES),
        headroom=0.05,
        train_samples=changes.pop("train_samples", None),
    )
    budget = Budget(
        budget_s=options.budget_s,
        probe_timeout_s=options.probe_timeout_s,
        now_s=runner.now_s,
        started_s=runner.now_s(),
        num_trials=options.num_trials,
    )
    store = Store(
        place_of(changes.pop("storage", str(folder / "closed.db")), None, "closed"),
        SearchFacts(
            fingerprint=Fingerprint(task="abc"),
            baseline_config=space.baseline.as_dict(),
            objective=options.objective,
        ),
    )
    listener = changes.pop("listener", Listener())
    cost_model = CostModel(
        lambda: peaks, 200 * MIB, options.seed, tell=lambda text: listener.on(Note(text=text, warning=True))
    )
    return Search(
        runner=runner,
        store=store,
        history=History(space, objective, store.trials(), budget.timeout_s, setup_left_s=budget.setup_left_s),
        inspection=found,
        options=options,
        settings=ProbeSettings(memory_limit_bytes=LIMIT_BYTES),
        budget=budget,
        tracing=Tracing(runner, lambda: (), "cpu", None, 0.0),
        cost_model=cost_model,
        listener=listener,
        interrupted=changes.pop("interrupted", lambda: False),
        **changes,
    )
