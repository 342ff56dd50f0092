"""How many samples a comparison needs where the model normalises over them."""

from __future__ import annotations

import contextlib
import math

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from autotune.devices import Device
from autotune.task import Task
from autotune.task.batches import to_device

FEWEST = 4
NUM_VALUES = 64  # behind each statistic: those of fewer make any rounding look large


def enough_samples(task: Task, device: Device, most: int) -> int:
    """As few samples as give each batch statistic enough values: an image has many for each channel, a vector one.

    Args:
        most: the answer where nothing is normalised over samples, or where so few samples are an error.
    """
    if most <= FEWEST:
        return most
    seen: list[int] = []

    def see(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0].numel() // inputs[0].shape[1])

    model = task.model().to(device.torch_device)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.training:
            module.register_forward_pre_hook(see)
    with contextlib.suppress(Exception), torch.no_grad():
        task.loss(model, to_device(task.batch(FEWEST), device.torch_device))
        return min(most, FEWEST * math.ceil(NUM_VALUES / min(seen))) if seen else most
    return most
