"""Sees every storage that is allocated and freed under `FakeTensorMode`: the allocator's events, in program order.

Operators whose results on fake tensors are unlike the real ones have stand-ins. Most of them make sparse gradients, which would have
no elements. How many rows a gradient really touches depends on the indices; here none occurs twice.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.devices.kernels.rules import Hidden, Scratch
from autotune.devices.kernels.work import count
from autotune.group import shard_types
from autotune.prediction.passes import Event
from autotune.records.device import Work
from autotune.task.batches import strided_parts

_READ_DEVICE = torch.ops.prim.device.default  # half of what a fake tensor dispatches, and no allocation
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
_NO_SCRATCH = Scratch()
_SHARDS = shard_types()


_aten = torch.ops.aten


def _new(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return _aten._sparse_coo_tensor_with_dims_and_tensors(  # type: ignore[no-any-return]
        indices.shape[0],
        values.dim() - 1,
        list(shape),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
    )


def _clone(tensor: torch.Tensor, **_: Any) -> Any:
    """No copy of contiguous values: the autograd engine asks for one only because Python refers to them as well.

    Without Python it takes a gradient as it is (torch/csrc/autograd/functions/accumulate_grad.h).
    """
    if tensor.layout is not torch.sparse_coo:
        return NotImplemented
    indices, values = tensor._indices(), tensor._values()
    if indices.is_contiguous() and values.is_contiguous():
        return _new(indices, values, tensor.shape)
    return _new(indices.clone(), values.contiguous(), tensor.shape)


def _coalesce(tensor: torch.Tensor) -> torch.Tensor:
    parts = tensor._indices().clone(), tensor._values().clone()
    return _new(*parts, tensor.shape)._coalesced_(True)


def _add_(tensor: torch.Tensor, other: Any, **_: Any) -> Any:
    """The sum, for the tracker to put in the tensor's place: sparse tensors are added by joining their elements."""
    if tensor.layout is not torch.sparse_coo or not isinstance(other, torch.Tensor):
        return NotImplemented
    indices = torch.cat([tensor._indices(), other._indices()], 1)
    values = torch.cat([tensor._values(), other._values()])
    return _new(indices, values, tensor.shape)


def _embedding_bag_backward(*args: Any, **_: Any) -> Any:
    """A row of values for each index."""
    gradient, indices, num_weights, sparse = args[0], args[1], args[6], args[9]
    if not sparse:
        return NotImplemented
    dim = gradient.shape[1]
    values = torch.empty((indices.numel(), dim), dtype=gradient.dtype, device=gradient.device)
    return _new(indices.reshape(1, -1), values, (num_weights, dim))


def _group_norm_backward(*args: Any, **_: Any) -> Any:
    """In the input's type; in float32 it would be where that is a short one."""
    tensor, weight, wanted = args[1], args[4], args[9]
    like_weight = torch.empty_like(weight) if weight is not None else tensor.new_empty(args[6])
    results = (torch.empty_like(tensor), like_weight, torch.empty_like(like_weight))
    return tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))


def _plausible_value(tensor: torch.Tensor) -> bool | int | float | complex:
    """What is read of a fake tensor: a constant's true value, else what keeps a step on its usual path."""
    if (constant := getattr(tensor, "constant", None)) is not None:
        return constant.item()  # type: ignore[no-any-return]
    if tensor.dtype is torch.bool:
        return False
    if tensor.dtype.is_complex:
        return 1 + 0j
    return 1.0 if tensor.dtype.is_floating_point else 1


# Operator -> what stands in for it; `NotImplemented` where the operator itself will do.
SUBSTITUTES: Mapping[Any, Callable[..., Any]] = {
    _aten.clone.default: _clone,
    _aten._local_scalar_dense.default: _plausible_value,
    _aten._coalesce.default: _coalesce,
    _aten.add_.Tensor: _add_,
    _aten._embedding_bag_backward.default: _embedding_bag_backward,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}


class StorageTracker(TorchDispatchMode):
    """Records the storages of fake tensors. Entered inside a `FakeTensorMode`, so that it sees every operator first.

    A fake tensor has no values, and yet training steps read some (a loss to log, a norm to compare). They get what keeps
    a step on its usual path: False, 1 or 1.0, and a constant's true value.

    Args:
        hidden: what fake tensors do not show.

    Attributes:
        events: so far, in program order.
        last_key: the key that was given last; keys count up from 1.
        scopes: key of a storage -> `scope` when it was allocated.
        scope: the module whose forward pass runs, "" for the model as a whole, None outside of forward passes. Set by the owner.
        work: to which operators are added, where the owner sets one.
        in_backward: whether the backward pass runs, which may run forward passes again. Set by the owner.
    """

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.scopes: dict[int, str | None] = {}
        self.scope: str | None = None
        self.work: Work | None = None
        self.in_backward = False
        self._streams: dict[Any, int] = {
            torch.cpu.current_stream(): 0
        }  # numbers; FSDP2 enters those of a GPU on a CPU, too
        self._is_blind = self._is_elsewhere = False
        self._workspace_of = functools.cache(hidden.workspace)
        self._results = hidden.results
        self._living: dict[int, _Reference] = {}  # by the address of the storage
        self.last_key = 0
        self._unpatched = ExitStack()
        self._sum: _Sum | None = None  # of the operator that ran last

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs more than this class

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READ_DEVICE:
            return args[0].fake_device
        if any(issubclass(kind, _SHARDS) for kind in types):
            return NotImplemented  # what it does to its own part comes here next
        result = NotImplemented
        if func in SUBSTITUTES:
            result = SUBSTITUTES[func](*args, **(kwargs or {}))
            if func is _ADD_IN_PLACE and result is not NotImplemented:
                self.see(result)  # while what it replaces is still there
                args[0].data = result
                result = args[0]
        if result is NotImplemented:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if self._is_blind:
            return result
        if self.work is not None:
            count(self.work, func, args, kwargs or {}, result)
        rule = self._workspace_of(func)
        scratch = rule(args, result) if rule is not None else _NO_SCRATCH
        around = self._allocate_all(scratch.before)
        self._free_all(self._allocate_all(scratch.early), scratch.early)
        self._sum = None
        if func in self._results:
            for tensor, size_bytes in self._results[func](args, result):
                self._see_dense(tensor, size_bytes)
        position = len(self.events)
        if isinstance(result, torch.Tensor):
            self.see(result)
        elif isinstance(result, tuple | list):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self.see(item)
        beside = self._allocate_all(scratch.beside)
        for group in scratch.after:
            self._free_all(self._allocate_all(group), group)
        self._free_all(beside, scratch.beside)
        self._free_all(around, scratch.before)
        if self.in_backward and self.scope is None and _is_made_in_place(func, args, result):
            first = self._living.get(_address(args[0]))
            self._sum = _Sum(self._living[_address(result)], first, position, len(self.events))
        return result

    def __enter__(self) -> Self:
        """FSDP2 frees what it has gathered, and fills it again, by resizing the storage, which is no operator."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = resize(storage, size_bytes)
            if storage._cdata in self._living:
                self._see_storage(storage)
            return result

        self._unpatched.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exc_info: Any) -> None:
        self._unpatched.close()
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What runs inside, and is gone in the end, is not recorded."""
        was_blind, self._is_blind = self._is_blind, True
        try:
            yield
        finally:
            self._is_blind = was_blind

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made inside lies in other memory, as of `see_elsewhere`."""
        was_elsewhere, self._is_elsewhere = self._is_elsewhere, True
        try:
            yield
        finally:
            self._is_elsewhere = was_elsewhere

    def begin_with(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget all that was seen: these alone are there, allocated in this order."""
        self.events.clear()
        self._living.clear()
        for tensor in tensors:
            self.see(tensor)

    def see(self, tensor: torch.Tensor) -> None:
        """Record the storages of a tensor, unless they are known and have the size that they had."""
        if type(tensor) is FakeTensor and tensor.layout is torch.strided:
            self._see_dense(tensor)
        else:
            for part in strided_parts(tensor):
                self._see_dense(part)

    def _see_dense(self, tensor: torch.Tensor, real_bytes: int | None = None) -> None:
        self._see_storage(tensor.untyped_storage(), real_bytes)

    def _see_storage(self, storage: torch.UntypedStorage, real_bytes: int | None = None) -> None:
        address, shown_bytes = storage._cdata, storage.nbytes()
        known = self._living.get(address)
        if known is not None:
            if known.shown_bytes == shown_bytes:
                return
            self._free(known.key, known.size_bytes)  # resized, or `set_` to another size
        if self._is_elsewhere:
            real_bytes = 0
        reference = _Reference(storage, self._freed)
        reference.address, reference.shown_bytes = address, shown_bytes
        reference.size_bytes = shown_bytes if real_bytes is None else real_bytes
        reference.key = self._allocate(reference.size_bytes)
        self._living[address] = reference

    def see_elsewhere(self, tensor: torch.Tensor) -> None:
        """Take note that the storage of a dense tensor lies in other memory, and so does what looks at it."""
        self._see_dense(tensor, real_bytes=0)

    def move_elsewhere(self, tensor: torch.Tensor) -> None:
        """Take note that a dense tensor, which was seen, has gone to other memory."""
        known = self._living.pop(_address(tensor))
        self._free(known.key, known.size_bytes)
        self.see_elsewhere(tensor)

    def keys_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The keys of the tensors' storages, as far as they were seen."""
        parts = (part for tensor in tensors for part in strided_parts(tensor))
        return {self._living[address].key for part in parts if (address := _address(part)) in self._living}

    def living(self) -> dict[int, int]:
        """Key -> bytes of all storages that are held now, in the order of their allocation."""
        return {reference.key: reference.size_bytes for reference in sorted(self._living.values(), key=lambda r: r.key)}

    def _allocate(self, size_bytes: int) -> int:
        self.last_key += 1
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        self.events.append(Event(self.last_key, size_bytes, True, stream))
        self.scopes[self.last_key] = self.scope
        return self.last_key

    def _allocate_all(self, sizes: Sequence[int]) -> list[int]:
        return [self._allocate(size_bytes) for size_bytes in sizes]

    def _free_all(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        for key, size_bytes in zip(keys, sizes, strict=True):
            self._free(key, size_bytes)

    def _free(self, key: int, size_bytes: int) -> None:
        self.events.append(Event(key, size_bytes, False))

    def _freed(self, dead: weakref.ref[torch.UntypedStorage]) -> None:
        reference = cast(_Reference, dead)
        if self._living.get(reference.address) is not reference:
            return  # resized since, under another key
        del self._living[reference.address]
        if self._sum is not None and self._sum.first is reference and self._undo(self._sum, reference):
            return
        self._free(reference.key, reference.size_bytes)

    def _undo(self, made: _Sum, first: _Reference) -> bool:
        """Undo the allocation of a sum that is made in place, as is known when its first summand is freed at once."""
        self._sum = None
        if len(self.events) != made.end or self.events[made.position][:3] != (made.result.key, first.size_bytes, True):
            return False
        del self.events[made.position]
        made.result.key = first.key
        return True


# What the gradients of indexing, gathering and the like are: zeros to which is added.
_ADD_TO_ZEROS = frozenset({
    _aten.index_add.default,
    _aten.put.default,
    _aten.scatter.src,
    _aten.scatter_add.default,
})  # fmt: skip


def _is_made_in_place(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a backward pass makes a sum in place that it makes anew of fake tensors, but for who else holds the first summand.

    Where gradients of several uses of a tensor meet, the autograd engine adds to the first one, unless that is a view, which holds
    what it looks at (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp). The gradients of indexing and gathering are
    added to zeros (`index_backward` of TensorAdvancedIndexing.cpp; `areAnyTensorSubclassLike` asks for such as fake tensors there).
    """
    if func is _aten.index_put.default:
        return len(args) > 3 and bool(args[3])
    if func is _aten.add.Tensor:
        return isinstance(result, torch.Tensor) and result.layout is torch.strided and not args[0]._is_view()
    return func in _ADD_TO_ZEROS


class _Sum(NamedTuple):
    """A sum that was just made.

    Attributes:
        position: among the events, of the allocation of the result.
        end: how many events there are once it is made.
    """

    result: _Reference
    first: _Reference | None
    position: int
    end: int


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A storage without keeping it, and what is known of it."""

    __slots__ = ("address", "key", "shown_bytes", "size_bytes")
    address: int
    key: int
    shown_bytes: int  # by the fake tensor
    size_bytes: int  # in truth


def _address(tensor: Any) -> int:
    """Of its storage; 0 where it is no tensor or has none of its own."""
    dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    return int(tensor.untyped_storage()._cdata) if dense else 0
