"""What a device's measured rates say of a model's own work: how long a step takes by them, and how near a measured one comes.

Each operator is limited by arithmetic or by memory (Williams, Waterman and Patterson, Roofline, CACM 2009): matrix products and
convolutions are taken to run at their measured rate, all other operators at the bandwidth of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.prediction.traces import Traces, UpdateTrace, WorkTrace
from autotune.records.config import Config
from autotune.records.device import BF16, FP16, FP32, MATMUL, Calibration
from autotune.records.result import DeviceUse
from autotune.techniques import Phase, Techniques

SHORT_TYPES = (BF16, FP16)
SHORTENED = 0.75  # of the bytes of other operators, where autocast makes about half of their tensors short
# share of a step's computing that no measured rate explains and no type changes: the mean of the three studies on a CPU (0, 0.6, 0.65)
UNACCOUNTED = 0.4
HOST_PER_LAUNCH = 3.0  # what Python and autograd add to launching an operator, in units of it


@dataclass(frozen=True)
class Roofline:
    """A model's work by the rates of a device. All figures are of plain training, recomputation apart.

    Attributes:
        work, update: of a micro batch and of an optimizer's step, with nothing switched on.
        width: how wide a sample is over one as wide as was traced.
    """

    calibration: Calibration
    work: WorkTrace
    update: UpdateTrace
    traces: Traces

    @staticmethod
    def of(calibration: Calibration, traces: Traces | None) -> Roofline | None:
        """None where the device was not measured, or the model's work is not known."""
        if traces is None or not calibration.bytes_per_s:
            return None
        model, update = traces.models.get(()), traces.updates.get(())
        if model is None or model.work is None or update is None:
            return None
        if any(calibration.best(kind, FP32) is None for kind, *_ in model.work.flops):
            return None
        return Roofline(calibration, model.work, update, traces)

    def flops(self, batch_size: int) -> float:
        """FLOPs of matrix products and convolutions per sample, forward and backward."""
        return self._width(batch_size) * sum(constant / batch_size + slope for _, _, constant, slope in self.work.flops)

    def compute_s(self, batch_size: int, arithmetic: str) -> float | None:
        """Seconds per sample with matrix products and convolutions in a type; None where its rate is not known."""
        arithmetic_s = self._arithmetic_s(batch_size, arithmetic)
        if arithmetic_s is None:
            return None
        plain_bytes = self.work.plain_bytes[0] / batch_size + self.work.plain_bytes[1]
        shortened = SHORTENED if arithmetic in SHORT_TYPES else 1.0
        moving_s = shortened * plain_bytes / (self.calibration.bytes_per_s or 0.0)
        return arithmetic_s + self._width(batch_size) * moving_s

    def _arithmetic_s(self, batch_size: int, arithmetic: str) -> float | None:
        seconds = 0.0
        for kind, _, constant, slope in self.work.flops:
            rate = self.calibration.best(kind, arithmetic) or (kind != MATMUL and self.calibration.best(kind, FP32))
            if not rate:
                return None
            seconds += (constant / batch_size + slope) / rate
        return self._width(batch_size) * seconds

    def factor(self, batch_size: int, arithmetic: str) -> float | None:
        """What a type multiplies the time of forward and backward by; None where its rates are not known."""
        plain_s, other_s = self.compute_s(batch_size, FP32), self.compute_s(batch_size, arithmetic)
        return UNACCOUNTED + (1 - UNACCOUNTED) * other_s / plain_s if plain_s and other_s else None

    def use(self, config: Config, samples_per_s: float, techniques: Techniques) -> DeviceUse | None:
        """How far from the device's limits a config runs at a speed; None where the rates of its type are not known."""
        size, arithmetic = config.batch_size, techniques.arithmetic_of(config)
        fastest_s = self._arithmetic_s(size, arithmetic)
        if not fastest_s or not self.calibration.bytes_per_s:
            return None
        own = self.traces.models.get(techniques.switched_on(config, Phase.MODEL))
        constant, slope = (own.work if own is not None and own.work is not None else self.work).moved_bytes
        bytes_per_s = self._width(size) * (constant / size + slope) * samples_per_s
        return DeviceUse(
            arithmetic=arithmetic,
            flops_per_s=self.flops(size) * samples_per_s,
            flops_share=fastest_s * samples_per_s,
            bytes_per_s=bytes_per_s,
            bandwidth_share=bytes_per_s / self.calibration.bytes_per_s,
            contention=self.calibration.contention,
        )

    def launch_s(self) -> float:
        """Seconds per micro step that do not depend on its size."""
        return self.work.num_operators * HOST_PER_LAUNCH * (self.calibration.launch_s or 0.0)

    def update_s(self) -> float:
        """Seconds per optimizer step."""
        launching_s = self.update.num_operators * HOST_PER_LAUNCH * (self.calibration.launch_s or 0.0)
        return self.update.moved_bytes / (self.calibration.bytes_per_s or 0.0) + launching_s

    def _width(self, batch_size: int) -> float:
        lengths = self.traces.lengths
        return 1.0 if lengths is None else lengths.mean_width(batch_size) / lengths.quantiles[-1]
