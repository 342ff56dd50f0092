"""TF32: fp32 matrix products with 10 bits of mantissa, on the tensor cores of NVIDIA GPUs since Ampere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique, one_of
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import TRANSFORMERS, Table, Words

_CHOICES = ("highest", "tf32")
_TF32_CAPABILITY = (8, 0)


class MatmulPrecision(Technique):
    """The precision of fp32 matrix products, for the whole process; convolutions use TF32 by default."""

    name: ClassVar[str] = "matmul_precision"
    summary: ClassVar[str] = "fp32 matrix products on tensor cores, inputs rounded to 10 bits of mantissa: faster"
    listed_choices: ClassVar[str] = "`highest` `tf32`"
    applies: ClassVar[str] = "GPUs from compute capability 8.0"
    off: ClassVar[Choice] = "highest"
    phase: ClassVar[Phase] = Phase.PROCESS
    order: ClassVar[int] = 10
    exact: ClassVar[bool] = False
    likely: ClassVar[tuple[Choice, ...]] = ("tf32",)
    frameworks: ClassVar[Mapping[str, Words]] = {
        TRANSFORMERS: Table({"highest": {"tf32": False}, "tf32": {"tf32": True}}),
    }

    def support(self, setting: Setting) -> Support:
        """It applies to CUDA devices of compute capability 8.0 or newer."""
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

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the precision back."""
        matmul, name = _setting()
        before = getattr(matmul, name)
        try:
            yield
        finally:
            if getattr(matmul, name) != before:
                setattr(matmul, name, before)

    def label(self, choice: Choice) -> str:
        """`tf32`, or `highest matmul`."""
        return f"{choice} matmul" if choice == self.off else str(choice)

    def mantissa_bits(self, choice: Choice) -> int:
        """11 in TF32."""
        return 11 if choice == "tf32" else super().mantissa_bits(choice)

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Matrix products are faster. Nothing is left to gain where they are computed in bf16 or fp16 already."""
        return Expectation(compute=Factor(typical=0.85, spread=1.2))

    def validate(self, choice: Any) -> Choice:
        """`highest` or `tf32`."""
        return one_of(choice, _CHOICES)


def _setting() -> tuple[Any, str]:
    """The object that holds the setting, and the attribute's name.

    torch 2.9 and newer have `fp32_precision`. Reading the older `allow_tf32` raises once the newer one was written, so
    only one of them is ever used.
    """
    import torch

    matmul = torch.backends.cuda.matmul
    return matmul, "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
