"""cuDNN tries its convolution kernels on the first batches and keeps the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch
from autotune.techniques.frameworks import Argument, At, Lines, Unsaid, words


class CudnnBenchmark(Switch):
    """`torch.backends.cudnn.benchmark`, for the whole process."""

    name = "cudnn_benchmark"
    summary = "the fastest convolution kernels are found by trying: often faster, may take more memory"
    applies = "convolutions on a GPU"
    phase = Phase.PROCESS
    order = 20
    # Faster where cuDNN's own guess is poor. The workspaces of the fastest kernels cannot be foreseen.
    expected = Expectation(compute=Factor(typical=0.95, spread=1.12), untraced=Factor(spread=3.0))
    keeps_random_masks = True
    likely = (True,)
    frameworks = words(
        lightning=Argument("benchmark"),
        loop=Unsaid(),
        torch=Lines({At.PROCESS: "torch.backends.cudnn.benchmark = True"}),
    )

    def why_not(self, setting: Setting) -> str:
        from torch.nn.modules.conv import _ConvNd

        if not setting.device.capabilities.cudnn:
            return "cuDNN exists on NVIDIA GPUs only"
        if not any(isinstance(module, _ConvNd) for module in setting.model.modules()):
            return "the model has no convolution"
        return "your code switches it on itself" if torch.backends.cudnn.benchmark else ""

    def apply(self, build: Build, choice: Choice) -> None:
        torch.backends.cudnn.benchmark = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before
