"""A prober that computes instead of training, to test search logic alone: same interface, known optimum, no process."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from autotune import techniques
from autotune.records.config import Config
from autotune.records.device import DeviceInfo
from autotune.records.inspection import Inspection, Support
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.settings import ProbeSettings
from autotune.space import Space, build_space
from autotune.study.store import Store, place_of
from autotune.tuning.events import Listener
from autotune.tuning.loop import Loop

MIB = 2**20
LIMIT_BYTES = 1000 * MIB

SUPPORT = {
    "batch_size": Support(choices=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)),
    "accumulation_steps": Support(choices=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)),
    "amp": Support(choices=("off", "bf16", "fp16")),
    "checkpoint_segments": Support(choices=(0, 1, 2, 3, 6)),
    "optimizer_impl": Support(choices=("default", "fused")),
}


@dataclass
class ClosedFormProber:
    """Speed rises with the batch towards a plateau, bf16 gains 1.4x, checkpointing costs time and saves memory."""

    noise: float = 0.0
    seed: int = 0
    seconds: float = 0.0  # of real time that a probe takes
    configs: list[Config] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, config: Config, settings: ProbeSettings) -> Outcome:
        """The outcome of the closed form, with noise between processes."""
        self.configs.append(config)
        time.sleep(self.seconds)
        peak = self.peak_bytes(config)
        if peak > LIMIT_BYTES:
            return Outcome(
                kind=Kind.OOM, cause="no memory", peak_bytes=LIMIT_BYTES, attempted_bytes=peak - LIMIT_BYTES, wall_s=0.1
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
    support = {name: Support(choices=(t.off,), reason="not here") for name, t in techniques.REGISTRY.items()} | SUPPORT
    base = {
        "facts": {"name": "closed", "source_hash": "abc", "warnings": []},
        "device": DeviceInfo(name="cpu", model="test", total_bytes=2**34, free_bytes=2**33),
        "global_batch": 96,
        "baseline": techniques.complete({"batch_size": 4}, global_batch=96).as_dict(),
        "baseline_given": True,
        "support": support,
        "outside_bytes": 200 * MIB,
    }
    return Inspection(**{**base, **changes})  # type: ignore[arg-type]


def make_loop(folder: Path, prober: ClosedFormProber, **changes: object) -> Loop:
    """A loop over the closed form, with its study in `folder`."""
    fix = changes.pop("fix", {})
    found = changes.pop("inspection", inspection())
    assert isinstance(found, Inspection) and isinstance(fix, dict)
    space, _ = build_space(found, fix=fix, include=(), exclude=())
    store = Store(
        place_of(str(folder / "closed.db"), None, "closed"),
        {"task": "abc"},
        {"baseline_config": space.baseline.as_dict()},
    )
    settings = {
        "prober": prober,
        "store": store,
        "space": space,
        "objective": Objective(name="throughput", memory_limit_bytes=LIMIT_BYTES, headroom=0.05),
        "settings": ProbeSettings(device="cpu", memory_limit_bytes=LIMIT_BYTES),
        "listener": Listener(),
        "interrupted": lambda: False,
        "budget_s": 1000.0,
        "started": time.monotonic(),
        "num_trials": None,
        "sampler": "gp",
        "seed": 0,
        "timeout_s": None,
        "peaks": None,
        "outside_bytes": 200 * MIB,
    }
    return Loop(**{**settings, **changes})  # type: ignore[arg-type]
