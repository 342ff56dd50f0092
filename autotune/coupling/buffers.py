"""Notes what forward passes change of a model, and puts it back: buffers, frozen parameters, counters. Holds batch statistics still."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


class Buffers:
    """The buffers of a model, and its frozen parameters: a forward pass may move a target network towards the one that is trained.

    Where more is frozen than trained, as below an adapter, the frozen part is a base that nothing moves, and is left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        frozen, trained = 0, 0
        for parameter in model.parameters():
            frozen += 0 if parameter.requires_grad else parameter.numel()
            trained += parameter.numel() if parameter.requires_grad else 0
        self._all = [
            _Buffer(f"{path}.{name}".lstrip("."), holder, name)
            for path, module in model.named_modules()
            for holder in (module._buffers, module._parameters)
            for name, tensor in holder.items()
            if holder is module._buffers or (tensor is not None and not tensor.requires_grad and frozen <= trained)
        ]
        self._has_learned = False

    def note(self) -> None:
        """Remember the buffers as they are now."""
        for buffer in self._all:
            buffer.note()

    def learn(self) -> None:
        """After the first step: find out which buffers it changed."""
        if not self._has_learned:
            self._has_learned = True
            for buffer in self._all:
                buffer.learn()

    def lost(self) -> str:
        """A buffer that cannot be restored; empty where all can."""
        return next((buffer.path for buffer in self._all if buffer.is_lost()), "")

    def changed(self) -> str:
        """A buffer that has another value than was noted; empty where none has."""
        return next((buffer.path for buffer in self._all if buffer.has_another_value()), "")

    def restore(self) -> None:
        """Give every buffer the value that it had."""
        with torch.no_grad():
            for buffer in self._all:
                buffer.restore()


class _Buffer:
    """A buffer, and the value that it had before a step, where forward passes change it.

    At the first step values are compared to find out whether they do, as some code changes a buffer behind torch's back
    (`buffer.data`). Later, a buffer that was constant until then is known to have changed by its version. Of a sparse or nested
    buffer only the version is looked at.
    """

    def __init__(self, path: str, holder: MutableMapping[str, Any], name: str) -> None:
        self.path = path
        self._holder = holder
        self._name = name
        self._changes: bool | None = None  # None before the first step
        self._before: torch.Tensor | None = None
        self._version: int | None = None
        self._copy: torch.Tensor | None = None

    def note(self) -> None:
        if self._changes is not None and self.has_changed():
            self._changes = True
        if self._changes is False:
            return
        self._before = before = self._holder.get(self._name)
        self._version = version_of(before)
        self._copy = None
        if before is not None and before.layout is torch.strided and not before.is_nested and not before.is_inference():
            self._copy = before.detach().clone() if self._changes else before.detach().to("cpu", copy=True)

    def learn(self) -> None:
        self._changes = self.has_changed() or self._differs()
        if not self._changes:
            self._copy = None

    def is_lost(self) -> bool:
        return self._copy is None and version_of(self._before) != self._version

    def restore(self) -> None:
        if self._before is not None and self._copy is not None and self._differs():
            self._before.copy_(self._copy)
        self._holder[self._name] = self._before

    def has_changed(self) -> bool:
        """Whether another tensor stands in the buffer's place, or torch saw it change."""
        return self._holder.get(self._name) is not self._before or version_of(self._before) != self._version

    def has_another_value(self) -> bool:
        """As `has_changed`; but where the value is known, a buffer that was changed and put back does not count."""
        if self._holder.get(self._name) is self._before and self._copy is not None:
            return self._differs()
        return self.has_changed()

    def _differs(self) -> bool:
        """Whether the noted tensor has another value by now."""
        if self._before is None or self._copy is None:
            return False
        return not torch.equal(self._copy.to("cpu"), self._before.to("cpu"))


_NUMBERS = (int, float)


class Counters:
    """The numbers among the attributes of a model's modules, as they were: a forward pass may count its calls, and anneal a loss by them.

    Where a pass changed another attribute of the module, too, its numbers stay as they are: they may be the length of the positions that
    it keeps there, or go with a flag that it is set up.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._all = [(path, vars(module), dict(vars(module))) for path, module in model.named_modules()]

    def changed(self) -> str:
        """A counter that has another value; empty where none has."""
        for path, attributes, numbers in self._counting():
            for name, number in numbers.items():
                if attributes.get(name) != number:
                    return f"{path}.{name}".lstrip(".")
        return ""

    def restore(self) -> None:
        """Give every counter the value that it had."""
        for _, attributes, numbers in self._counting():
            attributes.update(numbers)

    def _counting(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        for path, attributes, before in self._all:
            numbers = {name: value for name, value in before.items() if type(value) in _NUMBERS}
            others_stay = all(attributes.get(name) is value for name, value in before.items() if name not in numbers)
            if others_stay and all(type(attributes.get(name)) in _NUMBERS for name in numbers):
                yield path, attributes, numbers


class State:
    """What forward passes change of a model beside what is trained: its buffers, frozen parameters and counters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers, self._counters = Buffers(model), Counters(model)

    def note(self) -> None:
        """Remember the buffers as they are now; counters are remembered as this was made."""
        self._buffers.note()

    def changed(self) -> str:
        """A buffer or counter that has another value; empty where none has."""
        return self._buffers.changed() or self._counters.changed()

    def restore(self) -> None:
        """Put everything back."""
        self._buffers.restore()
        self._counters.restore()


def version_of(tensor: torch.Tensor | None) -> int | None:
    """The tensor's version, which grows with each change in place; None for tensors made in inference mode."""
    return None if tensor is None or tensor.is_inference() else tensor._version


@contextmanager
def hold_still(model: torch.nn.Module, run: Callable[[], object]) -> Iterator[None]:
    """Let each batch normalisation use, for every batch, the statistics that it saw last in `run`, a forward pass.

    What it normalises over is a question apart: micro batches of such a model learn something else, whatever the loss is.
    """
    modules = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    if not modules:
        yield
        return
    before = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        for module in modules:
            like = next(module.parameters(), torch.empty(0, device=next(model.parameters()).device))
            module.running_mean = torch.zeros(module.num_features, dtype=like.dtype, device=like.device)
            module.running_var = torch.ones_like(module.running_mean)
            module.num_batches_tracked = None
            module.track_running_stats, module.momentum = True, 1.0  # the last batch alone counts
        with torch.no_grad():
            run()
        for module in modules:
            module.training = False
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, before, strict=True):
            vars(module).update(attributes)
            module._buffers.update(buffers)
