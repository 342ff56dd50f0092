"""cuDNN tries its convolution kernels on the first batches and keeps the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Switch
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.frameworks import LIGHTNING, LOOP, TORCH, Argument, At, Lines, Unsaid, Words


class CudnnBenchmark(Switch):
    """`torch.backends.cudnn.benchmark`, for the whole process."""

    name = "cudnn_benchmark"
    summary = "the fastest convolution kernels are found by trying: often faster, may take more memory"
    applies = "convolutions on a GPU"
    phase = Phase.PROCESS
    order = 20
    # Faster where cuDNN's guess was poor. The workspaces of the fastest kernels cannot be foreseen.
    expected = Expectation(compute=Factor(typical=0.95, spread=1.12), untraced=Factor(spread=3.0))
    keeps_random_masks = True
    likely = (True,)
    frameworks: ClassVar[Mapping[str, Words]] = {
        LIGHTNING: Argument("benchmark"),
        LOOP: Unsaid(),
        TORCH: Lines({At.PROCESS: "torch.backends.cudnn.benchmark = True"}),
    }

    def support(self, setting: Setting) -> Support:
        """It applies to models with convolutions on CUDA, unless the model file switches it on already."""
        from torch.nn.modules.conv import _ConvNd

        if not setting.device.capabilities.cudnn:
            return Support(choices=(False,), reason="cuDNN exists on NVIDIA GPUs only")
        if not any(isinstance(module, _ConvNd) for module in setting.model.modules()):
            return Support(choices=(False,), reason="the model has no convolution")
        if torch.backends.cudnn.benchmark:
            return Support(choices=(False,), reason="the model file switches it on itself")
        return Support(choices=(False, True))

    def apply(self, build: Build, choice: Choice) -> None:
        """Switch it on for the rest of the process."""
        torch.backends.cudnn.benchmark = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before
