"""Batch normalisation over the samples of all processes."""

from __future__ import annotations

from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Setting, Switch
from autotune.techniques.frameworks import At, Lines, Table, words
from autotune.techniques.spread_option import SpreadTechnique


class SyncBatchnorm(SpreadTechnique, Switch):
    """`torch.nn.SyncBatchNorm`: statistics are those of the micro batches of all processes together."""

    name = "sync_batchnorm"
    summary = "batch normalisation sees the micro batches of all processes: another training, more over the wire"
    applies = "if included: several GPUs, a model with BatchNorm"
    changes_learning = True
    untraced = "torch has no such layer without a GPU"
    expected = Expectation(launch=Factor(typical=1.2, spread=1.3))
    frameworks = words(
        # a Trainer keeps the second
        lightning=Table({True: {"sync_batchnorm": True}}, {("layer_sync", "TorchSyncBatchNorm"): True}),
        torch=Lines({At.MODEL: "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"}),
    )

    def why_not(self, setting: Setting) -> str:
        if not any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in setting.model.modules()):
            return "the model has no BatchNorm"
        on_gpu = "" if setting.device.capabilities.own_processors else "torch has it for GPUs alone"
        return super().why_not(setting) or on_gpu

    def apply(self, build: Build, choice: Choice) -> None:
        build.model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(build.model)
