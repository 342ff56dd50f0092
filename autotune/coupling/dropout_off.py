"""Turns dropout into the identity, to compare two runs whose random masks cannot be the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_F = functional
_WITH_TRAINING_FLAG = {
    _F.dropout, _F.dropout1d, _F.dropout2d, _F.dropout3d, _F.alpha_dropout, _F.feature_alpha_dropout,
    _F.multi_head_attention_forward,  # calls dropout itself, where this mode does not reach
}  # fmt: skip
# torch.dropout(input, p, train) and its kin, below torch.nn.functional
_BELOW = {
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
_DRAWN_LIKE = {torch.randn_like, torch.rand_like, torch.randint_like}
_DRAWN_IN_PLACE = {torch.Tensor.normal_, torch.Tensor.uniform_}
_ATTENTION_DROPOUT_POSITION = 4  # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)


class RandomDraws(TorchDispatchMode):
    """Notes whether random numbers are drawn in a way that `dropout_off` does not reach.

    Attributes:
        seen: whether that happened while this was entered.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or (torch.Tag.nondeterministic_seeded in func.tags and not _DropoutOff.is_drawing)
        return func(*args, **(kwargs or {}))


@contextmanager
def dropout_off(model: torch.nn.Module) -> Iterator[None]:
    """Make dropout the identity in training mode: modules, functions, attention and recurrent layers.

    Masks drawn by `bernoulli` (stochastic depth) become their mean, which the usual division by the probability turns
    into one. Noise that is drawn in the shape of a tensor (diffusion models, variational ones) is the same whatever that
    tensor's layout and dtype: they decide in which order and how finely generators draw. Random numbers drawn in other ways
    stay as they are. This holds in the backward pass too, where checkpointing recomputes.
    """
    recurrent = [(module, module.dropout) for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module, _ in recurrent:
        module.dropout = 0.0
    try:
        with _DropoutOff():
            yield
    finally:
        for module, probability in recurrent:
            module.dropout = probability


class _DropoutOff(TorchFunctionMode):
    is_drawing = False  # what stays the same

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_TRAINING_FLAG:
            call = inspect.signature(func).bind(*args, **kwargs)
            call.arguments["training"] = False
            return func(*call.args, **call.kwargs)
        if func in _BELOW:
            return args[0] if args else kwargs["input"]
        if func in _DRAWN_LIKE and kwargs.keys() <= {"dtype", "memory_format"}:
            return _drawn(func, args, {}).to(kwargs.get("dtype") or args[0].dtype)
        if func in _DRAWN_IN_PLACE:
            return args[0].copy_(_drawn(func, args, kwargs))
        if func is _F.scaled_dot_product_attention:
            at = _ATTENTION_DROPOUT_POSITION
            if len(args) > at:
                return func(*args[:at], 0.0, *args[at + 1 :], **kwargs)
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        if func is torch.Tensor.bernoulli_:
            probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return args[0].copy_(probability) if isinstance(probability, torch.Tensor) else args[0].fill_(probability)
        if func in (torch.bernoulli, torch.Tensor.bernoulli):
            probability = args[1] if len(args) > 1 else kwargs.get("p")
            values = args[0] if args else kwargs["input"]
            return values.clone() if probability is None else torch.full_like(values, probability)
        if func is torch.Tensor.backward:
            with self:
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] = (),
) -> None:
    """`Tensor.backward` with the mode on. It would be off inside, where checkpointing runs forward passes again."""
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    torch.autograd.Variable._execution_engine.run_backward(
        (tensor,), (gradient,), keep, create_graph, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True
    )


def _drawn(func: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What `func` draws in the shape of its first argument, as plain fp32 training has that."""
    like = args[0]
    dtype = torch.float32 if like.is_floating_point() else like.dtype
    _DropoutOff.is_drawing = True
    try:
        return func(torch.empty(like.shape, dtype=dtype, device=like.device), *args[1:], **kwargs)
    finally:
        _DropoutOff.is_drawing = False
