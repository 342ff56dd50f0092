"""TF32: fp32 matrix products with 10 bits of mantissa, on the tensor cores of NVIDIA GPUs since Ampere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.records.device import FP32, MATMUL, TF32
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Technique
from autotune.techniques.amp import worth
from autotune.techniques.frameworks import At, Lines, Table, Unsaid, words

_TF32_CAPABILITY = (8, 0)
WORTH = 1.05  # times fp32's rate


class MatmulPrecision(Technique):
    """The precision of fp32 matrix products, for the whole process.

    cuDNN's convolutions have their own switch for TF32, which is on by default. "Plain fp32" means torch's default, and so TF32 in
    convolutions; only a comparison of gradients switches that off (`autotune.probe.runs`).
    """

    name = "matmul_precision"
    summary = "fp32 matrix products on tensor cores, inputs rounded to 10 bits of mantissa: faster"
    choices = ("highest", "tf32")
    applies = "GPUs from compute capability 8.0"
    off = "highest"
    phase = Phase.PROCESS
    order = 10
    # Matrix products are faster. Nothing is left to gain where they are computed in bf16 or fp16 already.
    expected = Expectation(compute=Factor(typical=0.85, spread=1.2))
    exact = False
    likely = ("tf32",)
    frameworks = words(
        # False would switch it off in convolutions, too
        transformers=Table({"highest": {"tf32": None}, "tf32": {"tf32": True}}, aliases={("tf32", False): "highest"}),
        loop=Unsaid(),
        torch=Lines({At.PROCESS: 'torch.set_float32_matmul_precision("high")'}),
    )

    def label(self, choice: Choice) -> str:
        return f"{choice} matmul" if choice == self.off else str(choice)

    def arithmetic(self, choice: Choice) -> str:
        return TF32 if choice == "tf32" else FP32

    def why_not(self, setting: Setting) -> str:
        if not setting.device.capabilities.tf32:
            return "TF32 exists on NVIDIA GPUs only"
        capability = setting.device.info().capability
        if capability < _TF32_CAPABILITY:
            return f"TF32 needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
        own = _precision() != "highest" and not self.why_optional(setting)
        return "your code sets the precision of fp32 products itself" if own else ""

    def why_optional(self, setting: Setting) -> str:
        found = worth(setting.calibration, {MATMUL: 1.0}, TF32)
        return f"TF32 gains nothing on this GPU ({found.figures})" if found and found.gain < WORTH else ""

    def apply(self, build: Build, choice: Choice) -> None:
        """Set the precision, but not by `fp32_precision`: after that the older getters, which inductor and Lightning use, raise."""
        torch.set_float32_matmul_precision("high")

    @contextmanager
    def restored(self) -> Iterator[None]:
        before = _precision()
        try:
            yield
        finally:
            if before is not None and _precision() != before:
                torch.set_float32_matmul_precision(before)


def _precision() -> str | None:
    """`highest`, `high` or `medium`; None where the user's code has set a backend's `fp32_precision`, after which the getter raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
