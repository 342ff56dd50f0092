"""Automatic mixed precision: matrix products and convolutions in bfloat16 or float16, parameters stay in fp32."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique, one_of
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import ACCELERATE, LIGHTNING, TRANSFORMERS, Table, Words

if TYPE_CHECKING:
    import torch
_CHOICES = ("off", "bf16", "fp16")
_BF16_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 tensor cores; earlier GPUs emulate it


class Amp(Technique):
    """`torch.autocast` around the forward pass; float16 with gradient scaling as well."""

    name: ClassVar[str] = "amp"
    summary: ClassVar[str] = "shorter arithmetic: faster, smaller activations; fp16 with gradient scaling"
    listed_choices: ClassVar[str] = "`off` `bf16` `fp16`"
    applies: ClassVar[str] = (
        "bf16: GPUs from compute capability 8.0; fp16: GPUs; either: CPUs with that arithmetic (others: if included)"
    )
    off: ClassVar[Choice] = "off"
    phase: ClassVar[Phase] = Phase.MODEL
    order: ClassVar[int] = 10
    exact: ClassVar[bool] = False
    likely: ClassVar[tuple[Choice, ...]] = ("bf16", "fp16")
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Table(
            {
                "off": {"bf16": False, "fp16": False},
                "bf16": {"bf16": True, "fp16": False},
                "fp16": {"bf16": False, "fp16": True},
            }
        ),
        LIGHTNING: Table(
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
        ACCELERATE: Table(
            {"off": {"mixed_precision": "no"}, "bf16": {"mixed_precision": "bf16"}, "fp16": {"mixed_precision": "fp16"}}
        ),
    }

    def support(self, setting: Setting) -> Support:
        """On a CPU what it has the arithmetic for; on GPUs fp16, and bf16 from compute capability 8.0.

        What a processor only emulates is searched if included: it is many times slower.
        """
        if setting.device.kind == "cpu":
            return _support_on_cpu(setting.device.torch_device)
        capability = setting.device.info().capability
        if capability >= _BF16_CAPABILITY:
            return Support(choices=_CHOICES)
        return Support(
            choices=("off", "fp16"),
            reason=f"bf16 needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}",
        )

    def apply(self, build: Build, choice: Choice) -> None:
        """Wrap the forward pass; fp16 gets a GradScaler, bf16 (which has fp32's range) none."""
        import torch

        dtype = torch.bfloat16 if choice == "bf16" else torch.float16
        build.forward_contexts.append(partial(torch.autocast, build.device.kind, dtype))
        if choice == "fp16":
            build.scaler = torch.amp.GradScaler(build.device.kind)

    def label(self, choice: Choice) -> str:
        """`fp32`, `bf16` or `fp16`."""
        return "fp32" if choice == self.off else str(choice)

    def mantissa_bits(self, choice: Choice) -> int:
        """8 in bf16, 11 in fp16."""
        return {"bf16": 8, "fp16": 11}.get(str(choice), super().mantissa_bits(choice))

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
        """Both types have two bytes, and a GradScaler holds a few scalars."""
        return "bf16"

    def untraceable(self, choice: Choice, device_kind: str) -> str:
        """Why not, for a type that a CPU emulates: a convolutional model in bf16 took 1.45 times the traced peak with AVX2."""
        if device_kind == "cpu" and not _has_arithmetic(str(choice)):
            return f"this processor emulates {choice}, and what oneDNN allocates for that is not known"
        return ""

    def validate(self, choice: Any) -> Choice:
        """One of `off`, `bf16`, `fp16`."""
        return one_of(choice, _CHOICES)


def _support_on_cpu(device: torch.device) -> Support:
    possible = [choice for choice in _CHOICES if choice != "fp16" or _trains_in_fp16(device)]
    emulated = tuple(choice for choice in possible if choice != "off" and not _has_arithmetic(choice))
    reasons = [] if "fp16" in possible else ["this torch build cannot train in fp16 on a CPU"]
    if emulated:
        them = "it" if len(emulated) == 1 else "them"
        reasons.append(
            f"this processor has no {' or '.join(emulated)} arithmetic, and emulating {them} is many times slower"
        )
    choices = tuple(choice for choice in possible if choice not in emulated)
    return Support(choices=choices, optional=emulated, reason="; ".join(reasons))


def _has_arithmetic(choice: str) -> bool:
    """Whether oneDNN, which computes torch's matrix products in short types on a CPU, has this processor's instructions."""
    import torch

    try:
        supports = torch.ops.mkldnn
        return bool(supports._is_mkldnn_bf16_supported() if choice == "bf16" else supports._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # a torch build without oneDNN
        return False


def _trains_in_fp16(device: torch.device) -> bool:
    import torch

    weight = torch.ones(8, 8, device=device, requires_grad=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unsupported dtype only warns and switches autocast off
            with torch.autocast(device.type, torch.float16):
                product = weight @ weight
        product.float().sum().backward()
    except RuntimeError:
        return False
    return product.dtype is torch.float16
