"""Automatic mixed precision: matrix products and convolutions in bfloat16 or float16, while parameters stay in fp32.

Whether a type is worth offering follows from the device's measured rates for the kinds of work that the model does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from autotune.devices import capabilities_of
from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.records.device import BF16, CALLED, CONVOLUTION, FP16, FP32, Calibration
from autotune.techniques import (
    REACHES_INTO_STEP,
    Build,
    Expectation,
    Factor,
    Phase,
    Setting,
    Support,
    Technique,
    UnsupportedError,
)
from autotune.techniques.frameworks import At, Table, Unsaid, words
from autotune.units import MIB, format_per_s

if TYPE_CHECKING:
    from autotune.devices.base import Device

_BF16_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 tensor cores; earlier GPUs emulate it
_TRAVEL = "it is said, and shards travel in it there, too"
_SCALER = "torch.amp.GradScaler(DEVICE.type)"
LEAST_RATE = 0.25  # times fp32's rate; emulated convolutions reach 0.02 to 0.11 times, real arithmetic much more
# What oneDNN keeps for another type on a processor: five models of 60 to 110 MiB took 4 to 16 MiB more than their tensors, 12 in the mean.
KERNEL_BYTES = 12 * MIB
WORTH = 0.9  # times fp32's rate; shorter activations may make up for the rest


class Amp(Technique):
    """`torch.autocast` around the forward pass; float16 with gradient scaling as well."""

    name = "amp"
    summary = "shorter arithmetic: faster, smaller activations; fp16 with gradient scaling"
    choices = ("off", "bf16", "fp16")
    applies = "where the measured rate of the device is worth it (emulated: if included)"
    off = "off"
    phase = Phase.MODEL
    # Autocast lies around a step. fp16's GradScaler does reach into it, so `support` and `apply` refuse fp16 there.
    reaches_into_step = False
    order = 10
    exact = False
    likely = ("bf16", "fp16")
    frameworks = words(
        transformers=Table(
            {choice: {"bf16": choice == "bf16", "fp16": choice == "fp16"} for choice in ("off", "bf16", "fp16")},
            on_shards=_TRAVEL,
        ),
        lightning=Table(
            {"off": {"precision": "32-true"}, "bf16": {"precision": "bf16-mixed"}, "fp16": {"precision": "16-mixed"}},
            aliases={
                ("precision", None): "off",
                ("precision", 32): "off",
                ("precision", "32"): "off",
                ("precision", "bf16"): "bf16",
                ("precision", 16): "fp16",
                ("precision", "16"): "fp16",
            },
        ),
        accelerate=Table(
            {
                "off": {"mixed_precision": "no"},
                "bf16": {"mixed_precision": "bf16"},
                "fp16": {"mixed_precision": "fp16"},
            },
            on_shards=_TRAVEL,
        ),
        # DeepSpeed's own `bf16` and `fp16` convert the parameters, which autocast does not.
        deepspeed=Table(
            {
                "off": {"torch_autocast": {"enabled": False}},
                "bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
                "fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            },
            on_shards=_TRAVEL,
        ),
        loop=Unsaid(("off", "bf16")),  # fp16 scales the loss
        torch=Table(
            {
                "bf16": {
                    At.FORWARD: "torch.autocast(DEVICE.type, torch.bfloat16)",
                    At.OWN_STEP: "torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False)",
                },
                "fp16": {At.FORWARD: "torch.autocast(DEVICE.type, torch.float16)", At.SCALER: _SCALER},
            }
        ),
    )

    def label(self, choice: Choice) -> str:
        return "fp32" if choice == self.off else str(choice)

    def arithmetic(self, choice: Choice) -> str:
        return {"bf16": BF16, "fp16": FP16}.get(str(choice), FP32)

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Faster where the device has the arithmetic, a little slower where it does not; fp16 pays for its scaler, too."""
        return Expectation(
            compute=Factor(typical=0.7 if choice == "bf16" else 0.75, spread=1.4),
            launch=Factor(typical=1.3, spread=2.5),
            update=Factor(typical=1.0 if choice == "bf16" else 1.3, spread=1.1),
            activations=Factor(typical=0.7, spread=1.2),
            untraced=Factor(spread=2.0),
        )

    def traced_as(self, choice: Choice) -> Choice:
        """Both types take two bytes, and a GradScaler adds only a few scalars."""
        return "bf16"

    def untraced_bytes_per_shape(self, choice: Choice) -> int:
        return 0 if choice == self.off else KERNEL_BYTES

    def untraceable(self, choice: Choice, device_kind: str) -> str:
        """A type that a CPU emulates is not traced: a convolutional model in bf16 took 1.45 times the traced peak with AVX2."""
        if capabilities_of(device_kind).own_processors or _has_arithmetic(str(choice)):
            return ""
        return f"this processor emulates {choice}, and what oneDNN allocates for that is not known"

    def support(self, setting: Setting) -> Support:
        """The types that are worth it by the measured rates. A type that is slower than fp32 is searched only if included.

        Without measured rates, a GPU's compute capability decides, or whether oneDNN finds the processor's instructions.
        """
        choices, optional, reasons = [self.off], [], []
        flops = forward_flops(setting)
        for choice in self.choices[1:]:
            found = worth(setting.calibration, flops, str(choice))
            if choice == "fp16" and setting.task.takes_whole_steps:
                reasons.append(f"fp16 needs gradient scaling: {REACHES_INTO_STEP}")
            elif not setting.device.capabilities.own_processors and (reason := _impossible(setting, str(choice))):
                reasons.append(reason)
            elif found is not None and not found.ends:
                reasons.append(f"{choice} is left out: a step in it would take too long here ({found.figures})")
            elif found is not None and found.gain < WORTH:
                optional.append(choice)
                reasons.append(f"{choice} is {1 / found.gain:.3g} times slower than fp32 here ({found.figures})")
            elif found is None and (reason := _hint(setting.device, choice)):
                if not setting.device.capabilities.own_processors:
                    optional.append(choice)
                reasons.append(reason)
            else:
                choices.append(choice)
        return Support(choices=tuple(choices), optional=tuple(optional), reason="; ".join(reasons))

    def apply(self, build: Build, choice: Choice) -> None:
        """Wrap the forward pass; fp16 gets a GradScaler, bf16 (which has fp32's range) none.

        A whole step of the user's may update weights between two forward passes, and autocast's copies of them would stay as they were:
        there it keeps none.
        """
        dtype = torch.bfloat16 if choice == "bf16" else torch.float16
        is_own_step = build.task.takes_whole_steps
        build.forward_contexts.append(partial(torch.autocast, build.device.kind, dtype, cache_enabled=not is_own_step))
        if choice == "fp16":
            if is_own_step:
                raise UnsupportedError(f"amp=fp16 needs gradient scaling: {REACHES_INTO_STEP}")
            build.scaler = torch.amp.GradScaler(build.device.kind)


def _hint(device: Device, choice: str) -> str:
    """Why a type is not worth it on devices of this kind; empty where it may be worth it."""
    if not device.capabilities.own_processors:
        emulates = f"this processor has no {choice} arithmetic, and emulating it is many times slower"
        return "" if _has_arithmetic(choice) else emulates
    capability = device.info().capability
    if choice == "fp16" or capability >= _BF16_CAPABILITY:
        return ""
    return f"bf16 needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"


def _has_arithmetic(choice: str) -> bool:
    """Whether this processor has instructions for a type, by oneDNN, which computes torch's products in short types on a CPU."""
    try:
        supports = torch.ops.mkldnn
        return bool(supports._is_mkldnn_bf16_supported() if choice == "bf16" else supports._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # a torch build without oneDNN
        return False


def _impossible(setting: Setting, choice: str) -> str:
    """Try whether a CPU can train the model in a type at all. Returns why not; empty where it can."""
    from torch.utils._python_dispatch import _disable_current_modes

    if not any(isinstance(module, torch.nn.LSTM) for module in setting.model.modules()):
        return ""
    try:  # torch asks oneDNN for an LSTM, which may have none; only real tensors show that
        with _disable_current_modes(), torch.autocast("cpu", torch.bfloat16 if choice == "bf16" else torch.float16):
            torch.nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        return f"torch has no LSTM in {choice} on a processor that emulates it"
    return ""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What arithmetic in a type would do for a model, compared with fp32.

    Attributes:
        gain: speed of the model's matrix products and convolutions in the type, over fp32's.
        figures: the rates behind the gain, in words.
        ends: whether a step would end in reasonable time; with emulated convolutions it takes minutes.
    """

    gain: float
    figures: str
    ends: bool


def forward_flops(setting: Setting) -> Mapping[str, float]:
    """FLOPs of a forward pass by kind of work; empty where no rates were measured to compare them with."""
    if not setting.calibration.rates:
        return {}
    from autotune.devices.kernels.work import WorkCounter

    with WorkCounter() as counter:
        setting.try_step(setting.fresh_batch())
    return {work: flops for (work, _), flops in counter.work.flops.items()}


def worth(calibration: Calibration, flops: Mapping[str, float], arithmetic: str) -> Worth | None:
    """What a type would do for a model with these FLOPs; None where the rates are not known."""
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
