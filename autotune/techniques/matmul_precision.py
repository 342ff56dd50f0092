"""TF32: fp32 matrix products with 10 bits of mantissa, on the tensor cores of NVIDIA GPUs since Ampere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.amp import one_of
from autotune.techniques.base import Expectation, Factor, Phase, Setting, Technique

if TYPE_CHECKING:
    from autotune.session import Build

_CHOICES = ("highest", "tf32")
_TF32_CAPABILITY = (8, 0)


class MatmulPrecision(Technique):
    """The precision of fp32 matrix products, for the whole process; convolutions use TF32 by default."""

    name: ClassVar[str] = "matmul_precision"
    summary: ClassVar[str] = "fp32 matrix products in TF32: faster, inputs rounded to 10 bits of mantissa"
    off: ClassVar[Choice] = "highest"
    phase: ClassVar[Phase] = Phase.PROCESS
    exact: ClassVar[bool] = False

    def support(self, setting: Setting) -> Support:
        """CUDA with compute capability 8.0 or newer."""
        if setting.device.kind != "cuda":
            return Support(choices=("highest",), reason="TF32 exists on NVIDIA GPUs only")
        capability = setting.device.info().capability
        if capability < _TF32_CAPABILITY:
            return Support(
                choices=("highest",),
                reason=f"TF32 needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}",
            )
        if getattr(*_setting()) in ("tf32", True):
            return Support(choices=("highest",), reason="the model file switches TF32 on itself")
        return Support(choices=_CHOICES)

    def apply(self, build: Build, choice: Choice) -> None:
        """Switch TF32 on for the rest of the process."""
        matmul, name = _setting()
        setattr(matmul, name, "tf32" if name == "fp32_precision" else True)

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Faster matrix products; nothing is left to gain where they are computed in bf16 or fp16 already."""
        return Expectation(compute=Factor(typical=0.85, spread=1.2))

    def validate(self, choice: Any) -> Choice:
        """`highest` or `tf32`."""
        return one_of(choice, _CHOICES)


@contextmanager
def kept_matmul_precision() -> Iterator[None]:
    """Put the process-wide setting back at the end."""
    matmul, name = _setting()
    before = getattr(matmul, name)
    try:
        yield
    finally:
        if getattr(matmul, name) != before:
            setattr(matmul, name, before)


def _setting() -> tuple[Any, str]:
    """Where torch keeps it, and under which name.

    torch 2.9 and newer have `fp32_precision`; once that was written, reading the older `allow_tf32` raises. So one of
    them is used throughout.
    """
    import torch

    matmul = torch.backends.cuda.matmul
    return matmul, "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
