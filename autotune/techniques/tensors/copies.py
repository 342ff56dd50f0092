"""Lets a task's own optimizer take its steps in another way, while the object, its groups, its hooks and its state stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch

Tensor = torch.Tensor
_PORTION = 2**22  # elements copied at a time: 16 MiB in fp32, as much for gradients and for intermediate results
_HALF = 0x8000  # half a unit in bf16's last place, in the bits of fp32
_UPPER = -0x10000
_ALL_AT_ONCE = ("LBFGS",)  # optimizers of torch.optim that do not update each parameter by itself


def why_not_apart(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot update some parameters now and others later; empty where it can."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return f"{kind.__name__} is no optimizer of torch.optim, and may need all gradients at once"
    return f"{kind.__name__} needs all gradients at once" if kind.__name__ in _ALL_AT_ONCE else ""


def take_steps_by(optimizer: torch.optim.Optimizer, update: Callable[[torch.optim.Optimizer], None]) -> None:
    """Let `optimizer.step()` call `update`. Hooks still run around it, and references to the optimizer stay valid."""

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            update(self)
        return loss

    # a fused optimizer would divide by the gradient scaler's scale itself
    vars(optimizer).pop("_step_supports_amp_scaling", None)
    optimizer.step = MethodType(torch.optim.Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]


class CopySteps:
    """Takes an optimizer's steps on copies of its parameters, a portion at a time. The optimizer's state is kept for the copies.

    A parameter in bf16 has the upper half of the bits of its value in fp32, rounded. The lower half is kept here, so that the
    copy has all bits and no update is too small for it (Split-SGD, https://arxiv.org/abs/2005.04680). Where there is no lower
    half yet, or user code has written to the parameter, the copy is off by a rounding at most.

    Args:
        device: device of copies, state and lower halves; None for the parameter's own, where only bf16 is copied.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.lower: dict[Tensor, Tensor] = {}

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Step every parameter that has a gradient, and leave the gradients as they are."""
        for group in optimizer.param_groups:
            for portion in _portions(p for p in group["params"] if p.grad is not None):
                self._step(optimizer, group, portion)

    def _step(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
        near = self._moved(parameters)
        gradients = self._moved([p.grad for p in parameters if p.grad is not None])
        copies = [self._copy(p, value) for p, value in zip(parameters, near, strict=True)]
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.to(copy.dtype)
        state, groups = optimizer.state, optimizer.param_groups
        pairs = list(zip(parameters, copies, strict=True))
        for p, copy in pairs:
            if p in state:
                state[copy] = {name: _beside(value, p, copy) for name, value in state.pop(p).items()}
        optimizer.param_groups = [{**group, "params": copies}]
        try:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # the hooks are around it
        finally:
            optimizer.param_groups = groups
            for p, copy in pairs:
                if copy in state:
                    state[p] = state.pop(copy)
        for p, value, copy in zip(parameters, near, copies, strict=True):
            if p.dtype is torch.bfloat16:
                bits = copy.view(torch.int32)
                upper = (bits + _HALF).bitwise_and_(_UPPER)
                self.lower[p] = bits.sub_(upper).to(torch.int16)
                value.copy_(upper.view(torch.float32))
            if value is not p:
                p.copy_(value, non_blocking=True)

    def _moved(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, or where a device is given their copies there."""
        if self.device is None:
            return tensors
        moved = [_begin_to_move(tensor, self.device) for tensor in tensors]
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return moved

    def _copy(self, p: Tensor, value: Tensor) -> Tensor:
        """The tensor that stands in for a parameter: its value in fp32 if the parameter is in bf16, else the value itself."""
        if p.dtype is not torch.bfloat16:
            return value
        copy = value.float()
        if p in self.lower:  # added to zero, a lower half would not undo a rounding but make another number
            copy.view(torch.int32).add_(self.lower[p] * (copy != 0))
        return copy


def _portions(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    portion: list[Tensor] = []
    for parameter in parameters:
        if portion and sum(p.numel() for p in portion) + parameter.numel() > _PORTION:
            yield portion
            portion = []
        portion.append(parameter)
    if portion:
        yield portion


def _begin_to_move(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`; from a GPU into page-locked memory, without waiting."""
    if tensor.is_sparse:
        return tensor.to(device)
    moved = torch.empty_like(tensor, device=device, pin_memory=tensor.is_cuda, requires_grad=False)
    return moved.copy_(tensor, non_blocking=True)


def _beside(value: Any, p: Tensor, copy: Tensor) -> Any:
    """A value of a parameter's state, for its copy: `load_state_dict` has given it the parameter's type and device."""
    if not isinstance(value, Tensor) or value.device != p.device:
        return value
    like_parameter = value.shape == p.shape and value.is_floating_point()
    return value.to(copy.device, copy.dtype if like_parameter else value.dtype)
