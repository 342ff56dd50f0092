"""Whether a precision is worth offering: by the rates that were measured of the device, for the work that the model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.records.device import CALLED, CONVOLUTION, FP32, Calibration
from autotune.techniques.build import Setting
from autotune.units import format_per_s

LEAST_RATE = 0.25  # of fp32's rate; emulated convolutions reach 0.02 to 0.11, real arithmetic much more


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What arithmetic in a type would do for a model, compared with fp32.

    Attributes:
        gain: speed of its matrix products and convolutions.
        figures: the rates behind it, in words.
        ends: whether a step would end in reasonable time. Convolutions that are emulated take minutes.
    """

    gain: float
    figures: str
    ends: bool


def forward_flops(setting: Setting) -> Mapping[str, float]:
    """FLOPs of a forward pass by kind of work; none where nothing was measured that they could be compared with."""
    if not setting.calibration.rates:
        return {}
    from autotune.devices.kernels.work import WorkCounter

    with WorkCounter() as counter:
        setting.try_step(setting.fresh_batch())
    return {work: flops for (work, _), flops in counter.work.flops.items()}


def worth(calibration: Calibration, flops: Mapping[str, float], arithmetic: str) -> Worth | None:
    """What a type would do for work with these FLOPs; None where the rates are not known."""
    gains = {work: calibration.gain(work, arithmetic) for work in flops}
    known = {work: gain for work, gain in gains.items() if gain is not None}
    if not known or len(known) < len(flops):
        return None
    slowest = min(known.values())
    gain = sum(flops.values()) / sum(flops[work] / known[work] for work in known) if slowest else 0.0
    return Worth(
        gain=gain,
        figures="; ".join(_figures(calibration, work, arithmetic) for work in known),
        ends=slowest > 0 and known.get(CONVOLUTION, 1.0) >= LEAST_RATE,
    )


def _figures(calibration: Calibration, work: str, arithmetic: str) -> str:
    rate, plain = calibration.best(work, arithmetic), calibration.best(work, FP32)
    reached = "none ended in time" if rate is None else format_per_s(rate, "FLOP")
    return f"{CALLED[work]}: {reached}, in fp32 {format_per_s(plain or 0.0, 'FLOP')}"
