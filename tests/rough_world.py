"""A nastier world than the closed form, and traced peaks for both: what the cost models have to cope with."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from autotune.prediction.traces import Group, ModelTrace, TracedPeak
from autotune.records.capacity import Breakdown
from autotune.records.config import Config
from autotune.records.inspection import Inspection, Support
from autotune.task.unequal_samples import LengthDistribution
from autotune.techniques import Techniques, find_techniques
from tests.closed_form import MIB, SUPPORT, ClosedFormRunner, inspection

techniques = find_techniques()

OUTSIDE_BYTES = 200 * MIB
CHANNELS_LAST = SUPPORT | {"channels_last": Support(choices=(False, True))}


@dataclass
class RoughRunner(ClosedFormRunner):
    """Smaller batches are faster but for a cache's worth of exceptions, bf16 is slow, and techniques get in each other's way.

    `world` draws the figures: how much bf16, fp16, channels_last, checkpointing and the batch size gain or cost, and how much
    every batch size and every combination of techniques departs from that.
    """

    world: int = 0

    def samples_per_s(self, config: Config) -> float:
        draw = random.Random(self.world)
        gains: dict[object, float] = {
            "bf16": draw.choice((0.83, 0.9, 1.3)),
            "fp16": draw.choice((0.6, 1.1, 1.5)),
            "fused": draw.choice((1.0, 1.02, 1.06)),
        }
        recompute, layout = draw.uniform(0.02, 0.4), draw.choice((0.9, 0.97, 1.1))
        per_octave, floor = draw.choice((-0.1, -0.05, 0.0, 0.05, 0.1)), draw.choice((0.1, 1.0, 4.0))
        batch = config.batch_size
        speed = 100 * gains.get(config["amp"], 1.0) * gains.get(config["optimizer_impl"], 1.0)
        speed *= layout if config["channels_last"] else 1.0
        speed /= 1 + recompute * int(config["checkpoint_segments"]) / 6
        group = config.replace(batch_size=1, accumulation_steps=1)
        own = random.Random(f"{self.world} {batch}").gauss(0, 0.025) + random.Random(
            f"{self.world} {drawn_for(group)}"
        ).gauss(0, 0.02)
        return speed * batch / (batch + floor) * math.exp(per_octave * math.log2(batch / 4) + own)

    def peak_bytes(self, config: Config) -> int:
        activations = 60 * (1.0 if config["amp"] == "off" else 0.7)
        activations *= 1 - 0.5 * (int(config["checkpoint_segments"]) / 6) ** 0.5
        return int((230 + activations * config.batch_size) * MIB) + self.untraced_bytes(config)

    def untraced_bytes(self, config: Config) -> int:
        return techniques.untraced_bytes(config)


def drawn_for(group: Config) -> str:
    """A seed for what is drawn once for a group of techniques, whatever the order and number of those switched off."""
    on = {name: group[name] for name, technique in techniques.items() if group[name] != technique.off}
    return str(sorted(on.items()))


@cache
def traced_share(config: Config) -> float:
    """Of what a process of this config shows: off by some 4 % in each technique group."""
    group = config.replace(batch_size=1, accumulation_steps=1)
    return 0.94 + random.Random(drawn_for(group)).gauss(0, 0.04)


def rough_inspection() -> Inspection:
    """The closed form's task with images."""
    found = inspection()
    return inspection(support=found.support | CHANNELS_LAST)


@dataclass(frozen=True)
class NoisyPeaks:
    """A prober's own peaks as a tracer would find them: less than the process shows, off by some 4 % in each technique group."""

    prober: ClosedFormRunner
    lengths: LengthDistribution | None = None
    target: str = "cpu"
    models: Mapping[Group, ModelTrace] = field(default_factory=dict)  # every config is known without them

    def peak(self, config: Config, techniques: Techniques) -> TracedPeak:
        trained = self.prober.peak_bytes(config) - OUTSIDE_BYTES - 10 * MIB - self.prober.untraced_bytes(config)
        traced = max(MIB, int(trained * traced_share(config)))
        breakdown = Breakdown(
            parameters_bytes=MIB,
            gradients_bytes=0,
            optimizer_bytes=0,
            activations_bytes=traced - MIB,
            temporaries_bytes=0,
        )
        return TracedPeak(peak_bytes=traced, uncertainty=0.0, breakdown=breakdown, volume_bytes=0)
