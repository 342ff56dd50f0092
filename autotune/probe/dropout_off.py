"""Turns dropout into the identity, to compare two runs whose random masks cannot be the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_F = functional
_WITH_TRAINING_FLAG = {_F.dropout, _F.dropout1d, _F.dropout2d, _F.dropout3d, _F.alpha_dropout, _F.feature_alpha_dropout}
# torch.dropout(input, p, train) and its kin, below torch.nn.functional
_BELOW = {
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
_ATTENTION_DROPOUT_POSITION = 4  # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)


@contextmanager
def dropout_off(model: torch.nn.Module) -> Iterator[None]:
    """Make dropout the identity in training mode: modules, functions, attention and recurrent layers.

    Masks drawn by `bernoulli` (stochastic depth) become their mean, which the usual division by the probability turns
    into one. Random numbers drawn in other ways stay as they are. This holds in the backward pass too, where checkpointing
    recomputes.
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
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_TRAINING_FLAG:
            if len(args) > 2:
                return func(*args[:2], False, *args[3:], **kwargs)
            return func(*args, **{**kwargs, "training": False})
        if func in _BELOW:
            return args[0] if args else kwargs["input"]
        if func is _F.scaled_dot_product_attention:
            at = _ATTENTION_DROPOUT_POSITION
            if len(args) > at:
                return func(*args[:at], 0.0, *args[at + 1 :], **kwargs)
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        if func is _F.multi_head_attention_forward:  # calls dropout itself, where this mode does not reach
            call = inspect.signature(func).bind(*args, **kwargs)
            call.arguments["dropout_p"] = 0.0
            return func(*call.args, **call.kwargs)
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
