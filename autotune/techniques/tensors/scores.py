"""Scores of a large vocabulary that are not computed until their loss is needed, and then a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

# Bounds of a piece's scores. Within them a piece takes as much as the hidden states (Liger Kernel's rule). Smaller pieces make slow
# products; on a CPU, more than the least would let glibc keep pieces in its heap, whose holes then take the memory that was saved.
CHUNK_BYTES = (16 * 2**20, 256 * 2**20)
_T = torch.Tensor
_ASKED = ["size", "dim", "numel", "is_floating_point", "is_complex", "get_device", "__len__"]
_KNOWN = ["shape", "dtype", "device", "ndim", "layout", "grad_fn", "requires_grad", "is_leaf", "is_nested", "is_sparse"]
_PLACES = ["is_cuda", "is_cpu", "is_meta"]
_FACTS = {getattr(_T, name) for name in _ASKED} | {getattr(_T, name).__get__ for name in [*_KNOWN, *_PLACES]}
_VIEWS: set[Callable[..., Any]] = {_T.transpose, _T.permute, _T.movedim, _T.unsqueeze, _T.squeeze, _T.__getitem__}
_RESHAPES = {_T.view, _T.reshape, _T.flatten, torch.flatten, torch.reshape}
# functions that would act on a copy, so that their effect is lost; so would any function whose name ends like `mul_`
_OF_THE_TENSOR_ITSELF = {_T.data_ptr, _T.__setitem__, _T.register_hook, _T.retain_grad}


@dataclass
class Use:
    """How a layer's scores were used.

    Attributes:
        losses: number of cross entropies that were computed in pieces.
        computed: how often the scores were needed as an ordinary tensor.
    """

    losses: int = 0
    computed: int = 0


class Scores(_T):
    """`functional.linear(hidden, weight, bias)`, row by row, not computed yet.

    It can be cut, transposed and reshaped, as long as the scores of a row stay together, and given to `cross_entropy`. Any other
    use computes it.

    Args:
        hidden: (number of rows, width).
        rows: which row of `hidden` is where.
        dim: the dimension of the scores among those of `rows`.
        dtype: type of the scores.
        use: counts how they are used.
    """

    def __new__(
        cls, hidden: _T, weight: _T, bias: _T | None, rows: _T, dim: int, dtype: torch.dtype, use: Use
    ) -> Scores:
        """The tensor, without memory of its own."""
        made: Scores = _NotComputed.apply(hidden, weight, bias, rows, dim, dtype)  # type: ignore[no-untyped-call]
        made.parts = hidden, weight, bias
        made.rows, made.row_dim, made.use = rows, dim, use
        return made

    parts: tuple[_T, _T, _T | None]
    rows: _T
    row_dim: int
    use: Use

    @classmethod
    def of(cls, hidden: _T, weight: _T, bias: _T | None, use: Use) -> Scores:
        """The scores of a layer for its input."""
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):  # the scores may be computed outside of autocast
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        rows = torch.arange(hidden.shape[:-1].numel(), device=hidden.device).view(hidden.shape[:-1])
        return cls(hidden.flatten(0, -2), weight, bias, rows, rows.dim(), hidden.dtype, use)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Tell shapes and types, put off views and the loss, and compute the scores for anything else."""
        kwargs = kwargs or {}
        if function in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if function in _OF_THE_TENSOR_ITSELF or (name.endswith("_") and not name.endswith("__")):
            raise _refused(function)
        found = None
        if args and isinstance(args[0], Scores):
            scores, rest = args[0], args[1:]
            if function is functional.cross_entropy:
                found = scores._loss(*rest, **kwargs)
            elif function in _VIEWS or function in _RESHAPES:
                found = scores._moved(function, rest, kwargs)
            elif function is _T.contiguous and not rest:
                found = scores
            elif function is _T.float or (function is _T.to and len(rest) == 1 and isinstance(rest[0], torch.dtype)):
                found = scores._like(scores.rows, scores.row_dim, rest[0] if rest else torch.float32)
        if found is not None:
            return found
        computed = tree_map(
            lambda value: value.computed() if isinstance(value, Scores) else value, (args, dict(kwargs))
        )
        return function(*computed[0], **computed[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse calls that did not come through `__torch_function__`, since they would lose the gradient."""
        raise _refused(function)

    def computed(self) -> _T:
        """The scores as an ordinary tensor."""
        self.use.computed += 1
        hidden, weight, bias = self.parts
        rows = functional.linear(hidden[self.rows.flatten()], weight, bias).to(self.dtype)
        return rows.view(*self.rows.shape, -1).movedim(-1, self.row_dim)

    def _like(self, rows: _T, dim: int, dtype: torch.dtype) -> Scores:
        return Scores(*self.parts, rows, dim, dtype, self.use)

    def _moved(self, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores | None:
        """The scores after a view: the same view is taken of the rows' numbers, which are repeated for every score without memory."""
        rows = self.rows.contiguous() if function in _RESHAPES else self.rows
        number = self.parts[1].shape[0]
        repeated = rows.unsqueeze(self.row_dim).expand(self.shape)
        try:
            moved = function(repeated, *rest, **kwargs)
        except (RuntimeError, TypeError, IndexError):
            return None  # the computed scores will raise the same error
        if moved.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            return None
        for dim, (size, stride) in enumerate(zip(moved.shape, moved.stride(), strict=True)):
            if size == number and stride == 0:
                return self._like(moved.select(dim, 0), dim, self.dtype)
        return None

    def _loss(
        self,
        target: _T,
        weight: _T | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> _T | None:
        """The cross entropy of the scores; None where it needs all scores at once."""
        per_class = target.is_floating_point() or self.row_dim != min(1, self.dim() - 1)
        if per_class or size_average is not None or reduce is not None or reduction == "none":
            return None
        rows, targets = self.rows.flatten(), target.flatten()
        options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        self.use.losses += 1
        loss: _T = _LossInPieces.apply(*self.parts, rows, targets, self.dtype, options)  # type: ignore[no-untyped-call]
        if reduction == "sum":
            return loss
        counted = targets != ignore_index
        number = counted.sum() if weight is None else weight[targets[counted]].sum()
        some = counted.any()  # without a label the mean is not a number, but its gradient is zero, as in plain training
        return torch.where(some, loss / torch.where(some, number, 1), torch.nan)


def _refused(function: Any) -> TypeError:
    return TypeError(f"{function} takes no scores that are computed in pieces; leave loss_chunks out")


class _NotComputed(torch.autograd.Function):
    """Puts the scores into the graph as a node, for a custom function that takes them and returns their gradient."""

    @staticmethod
    def forward(context: Any, hidden: _T, weight: _T, bias: _T | None, rows: _T, dim: int, dtype: torch.dtype) -> Any:
        """A tensor without memory. What the gradient needs is kept on `context` and not saved: hooks would pack it for each view."""
        context.hidden, context.weight, context.rows, context.dim = hidden.detach(), weight.detach(), rows, dim
        shape = [*rows.shape[:dim], weight.shape[0], *rows.shape[dim:]]
        return _T._make_wrapper_subclass(Scores, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: _T) -> Any:
        """The gradients of a linear layer, in the type of its weight."""
        hidden, weight, rows = context.hidden, context.weight, context.rows.flatten()
        of_rows = gradient.movedim(context.dim, -1).flatten(0, -2).to(weight.dtype)
        of_hidden = torch.zeros_like(hidden).index_add_(0, rows, (of_rows @ weight).to(hidden.dtype))
        of_weight = of_rows.T @ hidden[rows].to(weight.dtype)
        of_bias = of_rows.sum(0) if context.needs_input_grad[2] else None
        return of_hidden, of_weight, of_bias, None, None, None


class _LossInPieces(torch.autograd.Function):
    """The sum of the rows' cross entropies. The gradient is computed together with it, while a piece's scores exist."""

    @staticmethod
    def forward(
        context: Any, hidden: _T, weight: _T, bias: _T | None, rows: _T, targets: _T, dtype: Any, options: Any
    ) -> _T:
        """Go through the rows in pieces whose scores take, in fp32, as much as the hidden states, within `CHUNK_BYTES`."""
        inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
        wanted = [tensor.requires_grad for tensor in inputs]
        # a row's gradient comes from one piece; the layer's is a sum over all pieces
        types = [hidden.dtype, *(torch.promote_types(tensor.dtype, torch.float32) for tensor in inputs[1:])]
        totals = [
            torch.zeros_like(tensor, dtype=kind) if want else None
            for tensor, kind, want in zip(inputs, types, wanted, strict=True)
        ]
        layer = [tensor.detach().requires_grad_(want) for tensor, want in zip(inputs[1:], wanted[1:], strict=True)]
        chunk_bytes = min(max(4 * hidden.numel(), CHUNK_BYTES[0]), CHUNK_BYTES[1])
        size = max(1, chunk_bytes // (4 * weight.shape[0]))
        losses = []
        for these, labels in zip(rows.split(size), targets.split(size), strict=True):
            piece = hidden.detach()[these].requires_grad_(wanted[0])
            with torch.enable_grad():
                scores = functional.linear(piece, *layer).to(dtype)
                loss = functional.cross_entropy(scores, labels, reduction="sum", **options)
            of = [tensor for tensor in (piece, *layer) if tensor.requires_grad]
            found = iter(torch.autograd.grad(loss, of))
            for number, total in enumerate(totals):
                if total is not None and number == 0:
                    total.index_add_(0, these, next(found))
                elif total is not None:
                    total += next(found)
            losses.append(loss.detach())
        context.save_for_backward(*(total for total in totals if total is not None))
        context.types = [tensor.dtype if want else None for tensor, want in zip(inputs, wanted, strict=True)]
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: _T) -> Any:
        """The gradients computed in the forward pass, times the loss's own."""
        saved = iter(context.saved_tensors)
        found = [None if kind is None else (next(saved) * gradient).to(kind) for kind in context.types]
        return (*found, *[None] * (7 - len(found)))
