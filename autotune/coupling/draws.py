"""Lets runs that are compared draw alike: dropout is the identity, and micro batches draw what their batch drew.

A diffusion model draws noise and time steps for each sample, mixup one factor for all. The loss of the whole batch and that of its
micro batches can be compared only where each sample gets the same draws both times. Masks of dropout cannot be the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
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
_RETURNED = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli", "multinomial",
    "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "exponential", "uniform", "log_normal", "geometric",
}  # fmt: skip
_IN_PLACE = {
    "normal_", "uniform_", "exponential_", "random_", "bernoulli_", "geometric_", "cauchy_", "log_normal_",
}  # fmt: skip


class RandomDraws(TorchDispatchMode):
    """Notes whether random numbers are drawn in a way that `dropout_off` does not reach.

    Attributes:
        seen: whether there was such a draw while this mode was on.
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
    tensor's layout and dtype, which otherwise decide in which order and how finely generators draw. Random numbers drawn in
    other ways stay as they are. All this holds in the backward pass too, where checkpointing recomputes.
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
    is_drawing = False  # inside `_drawn`, whose numbers are the same in each run

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
    """What `func` draws in the shape of its first argument, with the dtype and layout of plain fp32 training."""
    like = args[0]
    dtype = torch.float32 if like.is_floating_point() else like.dtype
    _DropoutOff.is_drawing = True
    try:
        return func(torch.empty(like.shape, dtype=dtype, device=like.device), *args[1:], **kwargs)
    finally:
        _DropoutOff.is_drawing = False


@dataclass(frozen=True)
class _Drawn:
    name: str
    among: tuple[Any, ...]
    values: torch.Tensor


class SameDraws(TorchDispatchMode):
    """Notes what a whole batch draws, and lets each of its micro batches draw the rows of its samples.

    Args:
        blocked: where a draw has several rows for each sample, these are not side by side, but one whole batch after the other
            (views that were concatenated).

    Attributes:
        among_samples: something was drawn among the samples of the batch: a permutation of them, say, or partners.
        unlike: a micro batch drew something for which the whole batch drew nothing alike.
        several_rows: some draw had several rows for each sample, for which `blocked` counts.
    """

    def __init__(self, *, blocked: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocked = blocked
        self._drawn: list[_Drawn] = []
        self._part: tuple[int, int, int] | None = None  # first sample, one behind the last, samples of the whole batch
        self._position = 0
        self.among_samples = self.unlike = self.several_rows = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around the forward and backward pass of the whole batch."""
        self._drawn.clear()
        self._part = None
        with self:
            yield

    @contextmanager
    def part(self, start: int, stop: int, num_samples: int) -> Iterator[None]:
        """Around the passes of the samples from `start` up to `stop` (without it) of `num_samples`."""
        self._part, self._position = (start, stop, num_samples), 0
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _RETURNED and name not in _IN_PLACE:
            return found
        among = _among(name, args)
        if self._part is None:
            self._drawn.append(_Drawn(name, among, found.clone()))
            return found
        values = self._same(name, among, found)
        if values is None:
            return found
        return found.copy_(values) if name in _IN_PLACE else values.clone()

    def _same(self, name: str, among: tuple[Any, ...], found: torch.Tensor) -> torch.Tensor | None:
        """What the whole batch drew for these samples; None where it drew nothing alike."""
        assert self._part is not None
        self._position += 1
        drawn = self._drawn[self._position - 1] if self._position <= len(self._drawn) else None
        if drawn is None or drawn.name != name or drawn.values.dim() != found.dim():
            self.unlike = True
            return None
        if drawn.among != among:
            self.among_samples = True
            return None
        start, stop, num_samples = self._part
        unequal = [dim for dim in range(found.dim()) if found.size(dim) != drawn.values.size(dim)]
        if not unequal:
            return drawn.values
        dim, rows = unequal[0], drawn.values.size(unequal[0]) // num_samples
        if len(unequal) > 1 or drawn.values.size(dim) != rows * num_samples or found.size(dim) != rows * (stop - start):
            self.unlike = True
            return None
        if rows == 1 or not self._blocked:
            self.several_rows = self.several_rows or rows > 1
            return drawn.values.narrow(dim, start * rows, (stop - start) * rows)
        blocks = [drawn.values.narrow(dim, block * num_samples + start, stop - start) for block in range(rows)]
        return torch.cat(blocks, dim)


def _among(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The numbers between which something is drawn, and other parameters of the distribution, without its shape."""
    sizes = tuple(args[0].shape[-1:]) if name == "multinomial" else ()
    return (*(arg for arg in args if isinstance(arg, Number)), *sizes)
