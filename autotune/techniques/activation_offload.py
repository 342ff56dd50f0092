"""Activation offloading: tensors that some blocks keep for the backward pass wait in host memory instead of the GPU's."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Technique, UnsupportedError
from autotune.techniques.block_chains import blocks_of, numbers_up_to
from autotune.techniques.build import Forward
from autotune.techniques.frameworks import At, Lines, Unsaid, words
from autotune.units import plural

_SMALLEST_BYTES = 64 * 1024  # smaller tensors cost more to move than they are worth


class ActivationOffload(Technique):
    """Saved-tensor hooks around n of the blocks, evenly spread.

    On a GPU the copy to page-locked host memory runs on its own stream, beside the forward pass. The copy back is queued when
    the backward pass needs the tensor.
    """

    name = "activation_offload"
    summary = "blocks keep their activations in host memory: less on the GPU, copies over the bus"
    listed_choices = "0 to the number of blocks"
    applies = "repeated blocks on a GPU, without `checkpoint_segments`"
    off = 0
    phase = Phase.MODEL
    order = 40
    untraced = "how much is on its way to host memory at the peak is not traced"
    ordered = True
    loads_host = True
    keeps_random_masks = True
    frameworks = words(loop=Unsaid(), torch=Lines({At.MODEL: "offload(model, DEVICE, {places})"}))

    def label(self, choice: Choice) -> str:
        return f"{plural(int(choice), 'block')} offloaded" if choice else "nothing offloaded"

    def conflict(self, config: Config) -> str:
        return "recomputed blocks keep next to nothing" if config["checkpoint_segments"] else ""

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Copies over the bus are slower than recomputing in many models, and faster in some."""
        share = int(choice) / max(int(other) for other in choices)
        moved = Factor(typical=1 + 0.35 * share, spread=1.1 + 0.2 * share)
        return Expectation(compute=moved, launch=moved, activations=Factor(typical=1 - 0.6 * share, spread=1.3))

    def why_not(self, setting: Setting) -> str:
        return "" if setting.device.capabilities.own_memory else "on a CPU the host's memory is the device's"

    def choices_for(self, setting: Setting) -> tuple[Choice, ...]:
        return (0, *numbers_up_to(len(blocks_of(setting.task, setting.model).larger)))

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the forward of the blocks."""
        blocks, number = blocks_of(build.task, build.model).larger, int(choice)
        if number > len(blocks):
            found = plural(len(blocks), "block")
            raise UnsupportedError(f"activation_offload={choice}: the model has {found}; choose at most as many")
        spread = (blocks[index * len(blocks) // number] for index in range(number))
        offload(build.model, build.device.torch_device, **build.acting_on(self.name, spread))


def offload(model: torch.nn.Module, device: torch.device, modules: Sequence[str]) -> None:
    """Replace the forward of blocks, by their names."""
    store = _Store(device)
    for name in modules:
        block: Any = model.get_submodule(name)
        block.forward = _Offloaded(block, store)


@dataclass(eq=False)
class _Offloaded(Forward):
    store: _Store

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef

        if not self.trains():
            return self.call(*args, **kwargs)
        stays = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        # A tensor that several layers save is copied once. The key is the address of the storage object, which is not reused as
        # long as the weak reference lives; the address of its data, once freed, soon belongs to another tensor.
        seen: dict[Any, tuple[StorageWeakRef, _Moved]] = {}

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided:
                return tensor
            storage = tensor.untyped_storage()
            if tensor.nbytes < _SMALLEST_BYTES or storage.data_ptr() in stays or tensor.device != self.store.device:
                return tensor
            ref = StorageWeakRef(storage)
            place = (ref.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
            if place not in seen:
                seen[place] = ref, self.store.move(tensor)
            return seen[place][1]

        def unpack(packed: Any) -> torch.Tensor:
            return packed.back() if isinstance(packed, _Moved) else packed

        # Dynamo would try to compile `pack`, too, where it cannot compile the block as a whole
        dynamo: Any = sys.modules.get("torch._dynamo")
        with torch.autograd.graph.saved_tensors_hooks(dynamo.disable(pack) if dynamo else pack, unpack):
            return self.call(*args, **kwargs)


class _Store:
    """Moves tensors to host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Store:
        return self  # its stream cannot be copied, and copies of the model can share it

    def move(self, tensor: torch.Tensor) -> _Moved:
        """Begin to copy a tensor to the host."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.stream is not None)
        if self.stream is None:
            return _Moved(host.copy_(tensor), self.device, None)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)  # so that its memory is not reused before it is copied
            return _Moved(host, self.device, self.stream.record_event())


@dataclass(eq=False)
class _Moved:
    """A tensor in host memory."""

    host: torch.Tensor
    device: torch.device
    copied: torch.cuda.Event | None
    present: Any = lambda: None  # a weak reference to the copy on the device

    def back(self) -> torch.Tensor:
        """The tensor on the device."""
        found: torch.Tensor | None = self.present()
        if found is None:
            if self.copied is not None:
                torch.cuda.current_stream(self.device).wait_event(self.copied)
            found = self.host.to(self.device, non_blocking=True, copy=True)
            self.present = weakref.ref(found)
        return found
