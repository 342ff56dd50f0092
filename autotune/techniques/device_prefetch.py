"""The next batch is copied to the GPU, on its own stream, while the current one is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch
from autotune.techniques.frameworks import At, Lines, words


class DevicePrefetch(Switch):
    """The session's loader yields batches that are on the device already, or on their way there."""

    name = "device_prefetch"
    summary = "the next batch is copied while the GPU computes: hides the copy, holds one batch more"
    applies = "with a dataset, without accumulation, on a GPU"
    phase = Phase.LOADER
    order = 25
    # Training waits less for the copy, and one more batch is on the device.
    expected = Expectation(
        launch=Factor(typical=0.97, spread=1.05), data=Factor(typical=0.9, spread=1.15), untraced=Factor(spread=1.2)
    )
    keeps_random_masks = True
    frameworks = words(torch=Lines({At.BATCHES: "ahead(Copier(DEVICE), batches)"}))

    def conflict(self, config: Config) -> str:
        accumulates = config.accumulation_steps > 1
        return "all micro batches of a step would be on the device at once" if accumulates else ""

    def why_not(self, setting: Setting) -> str:
        if not setting.device.capabilities.streams:
            return "there is no copy to a GPU to hide"
        return "the task has no train_dataset, so nothing is loaded" if setting.task.dataset() is None else ""

    def apply(self, build: Build, choice: Choice) -> None:
        """Let the loader run one micro batch ahead."""
        build.batch_streams.append(partial(ahead, Copier(build.device.torch_device)))


def ahead(copier: Copier, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield each batch on the device, after the copy of the next one has begun."""
    coming: list[Callable[[], Any]] = []
    for batch in batches:
        coming.append(copier.begin(batch))
        if len(coming) > 1:
            yield coming.pop(0)()
    for arrive in coming:
        yield arrive()


class Copier:
    """Copies batches to a device; to a GPU on its own stream, while the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch. The returned function gives the copy; work that is queued after its call waits for it."""
        from autotune.task.batches import to_device

        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            copied = to_device(batch, self.device)
            done = None if self.stream is None else self.stream.record_event()

        def arrive() -> Any:
            if done is not None:
                present = torch.cuda.current_stream(self.device)
                present.wait_event(done)
                for tensor in memory_on(self.device.type, copied):
                    tensor.record_stream(present)  # else its memory could be reused while the step still reads it
            return copied

        return arrive


def memory_on(kind: str, batch: Any) -> Iterator[torch.Tensor]:
    """The strided tensors of a batch on this kind of device, also those inside sparse and jagged ones."""
    from autotune.task.batches import strided_parts, tensors

    for tensor in tensors(batch):
        if tensor.device.type == kind:
            yield from strided_parts(tensor)
