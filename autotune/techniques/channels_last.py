"""channels_last: images stored with the channels innermost, the layout that convolution kernels prefer."""

from __future__ import annotations

from typing import Any

from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch
from autotune.techniques.frameworks import At, Lines, Unsaid, words


class ChannelsLast(Switch):
    """Four-dimensional parameters and inputs in `torch.channels_last`."""

    name = "channels_last"
    summary = "images with the channels innermost, as convolution kernels prefer: often faster"
    applies = "2-D convolutions"
    phase = Phase.MODEL
    reaches_into_step = False  # the layout of the model and of its input is set before any step
    order = 20
    likely = (True,)
    # Most fast convolutions use this layout, yet some kernels do not have it.
    expected = Expectation(compute=Factor(typical=0.93, spread=1.2), activations=Factor(spread=1.05))
    frameworks = words(
        loop=Unsaid(),
        torch=Lines(
            {
                At.MODEL: "model.to(memory_format=torch.channels_last)",
                At.BATCH: "batch = images_to_channels_last(batch)",
            }
        ),
    )

    def why_not(self, setting: Setting) -> str:
        """It applies to models with 2-D convolutions, unless the model's code calls `view` where the new layout does not allow it.

        Whether the batch has images does not matter: models stack lists of images, and make spectrograms of sound.
        """
        if not any(isinstance(m, torch.nn.Conv2d | torch.nn.ConvTranspose2d) for m in setting.model.modules()):
            return "the model has no 2-D convolution"
        layouts = [(parameter, parameter.data) for parameter in setting.model.parameters()]
        buffers = [(module, {**module._buffers}) for module in setting.model.modules()]  # whose tensors are replaced
        try:
            setting.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            setting.try_step(images_to_channels_last(setting.fresh_batch()))
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            return "the model calls .view() where channels_last is not contiguous; .reshape() there would do"
        finally:
            for parameter, data in layouts:
                parameter.data = data
            for module, before in buffers:
                module._buffers.update(before)
        return ""

    def apply(self, build: Build, choice: Choice) -> None:
        """Convert the model in place and every micro batch as it arrives."""
        build.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        build.batch_transforms.append(images_to_channels_last)


def images_to_channels_last(batch: Any) -> Any:
    """The batch with every floating-point tensor of four dimensions in channels_last."""
    from autotune.task.batches import map_tensors

    return map_tensors(_to_channels_last, batch)


def _to_channels_last(tensor: torch.Tensor) -> Any:
    is_image = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.to(memory_format=torch.channels_last) if is_image else tensor
