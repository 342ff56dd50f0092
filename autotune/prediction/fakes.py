"""A task whose models have shapes and types and no values: nothing large is allocated, however many parameters there are."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from autotune.devices import Device, capabilities_of
from autotune.devices.kernels import hidden_allocations
from autotune.devices.kernels.cuda_like import cuda_like
from autotune.devices.targets import Target, gpu_of, target_of
from autotune.errors import AutotuneError, TaskError, first_line, in_one_line
from autotune.prediction.storages import StorageTracker
from autotune.probe.inspection import Untrained, inspect_task
from autotune.task import Task
from autotune.task.batches import map_tensors
from autotune.task.usercode import is_allocation_failure, user_place
from autotune.techniques import Techniques, find_techniques
from autotune.units import format_bytes

MOST_ELEMENTS = 4096  # of a tensor whose values are kept while a model is built
_READ = torch.ops.aten._local_scalar_dense.default
_NO_DATA = ("its data is not allocated yet", "doesn't have storage")  # what torch says of a fake tensor's values


class Fakes:
    """Builds a task's models on fake tensors, and runs code on them.

    Small tensors have values while a model is built. Where `build_model` needs those of others, the model is built for real,
    once, and its values are dropped.

    Args:
        task: the user's task.
        target: the kind of device to behave like.
        techniques: whose settings are put back after each run.
        host_bytes: what this process may take of the host's memory; None where nothing bounds it.

    Attributes:
        task: the same task, whose models are built so. Its data stay real.
        mode: of all the fake tensors.
        why_real: why the model was built for real, and at which line; empty where it was not.
    """

    def __init__(self, task: Task, target: Target, techniques: Techniques, host_bytes: int | None = None) -> None:
        moves = capabilities_of(target).own_memory

        @functools.wraps(task.build_model)
        def build_model(*variant: str) -> Any:
            model = self._build(*variant)
            if self._tracker is not None and moves and isinstance(model, torch.nn.Module):
                self._tracker.begin_with(_as_moved(model))  # it is built on the host
            return model

        self.task = task.with_other_models(build_model=build_model)
        self.mode = OneFakeMode(allow_non_fake_inputs=True)
        self.why_real = ""
        self._target = target
        self._techniques = techniques
        self._host_bytes = host_bytes
        self._build_model = task.build_model
        self._tracker: StorageTracker | None = None  # while something runs
        self._without_values: set[tuple[str, ...]] = set()  # variants that can be built so
        self._emptied: dict[tuple[str, ...], Any] = {}  # variant -> what was built for real, without its values

    @contextmanager
    def run(self) -> Iterator[StorageTracker]:
        """Run on fake tensors, as on a device of the kind `target`. Where values are read, plausible ones stand in."""
        tracker = StorageTracker(hidden_allocations(self._target))
        with fake_run(self.mode, self._target, self._techniques), tracker:
            self._tracker = tracker
            try:
                yield tracker
            finally:
                self._tracker = None

    def inputs(self, batch: Any) -> Any:
        """Fake tensors of the batch's shapes."""
        with _disable_current_modes():
            return map_tensors(self.mode.from_tensor, batch)

    def _build(self, *variant: str) -> Any:
        """In place of the task's `build_model`."""
        if variant in self._emptied:
            with contextlib.suppress(Exception):  # some modules cannot be copied
                return copy.deepcopy(self._emptied[variant])
            return self._empty(variant)
        if self._tracker is not None and variant in self._without_values:
            with without_filling(), SmallValues():
                return self._build_model(*variant)
        with _disable_current_modes():  # where values are only plausible, what reads them would go unseen
            try:
                with fake_build(self.mode), SmallValues():
                    model = self._build_model(*variant)
            except Exception as error:
                if is_allocation_failure(error):
                    raise
                self.why_real = why_values_are_needed(error) + user_place(error)
                self._emptied[variant] = self._empty(variant)
                return self._build(*variant)
        self._without_values.add(variant)
        return model

    def _empty(self, variant: tuple[str, ...]) -> Any:
        """The model built for real, without its values."""
        with _disable_current_modes():
            try:
                model = self._build_model(*variant)
            except Exception as error:
                if not is_allocation_failure(error):
                    raise
            else:
                return to_fake(model, self.mode) if isinstance(model, torch.nn.Module) else model
        bound = "" if self._host_bytes is None else f" ({format_bytes(self._host_bytes)} of it were free)"
        # not raised from the failed allocation, which would be taken for the device's
        raise TaskError(
            f"the host has too little memory to build the model{bound}, whatever the device that is asked about. It had to be "
            f"built for real, since {self.why_real}; let build_model read no values of tensors (plain numbers in their "
            "place, weights loaded elsewhere), or predict on a host with more memory"
        )


def inspect_untrained(task: Task, *, device: Device, host_bytes: int, **arguments: Any) -> dict[str, Any]:
    """Inspect a task without training it: as `inspect_task`, but no model is built for real unless its code needs values.

    Args:
        device: this machine's CPU, or an `AbsentGpu`.
        host_bytes: what this process may take of the host's memory.
    """
    fakes = Fakes(task, target_of(device.info()), find_techniques(), host_bytes)
    found = inspect_task(fakes.task, device=device, untrained=Untrained(fakes.run, fakes.inputs), **arguments)
    return found | {"built_for_real": fakes.why_real}


def _as_moved(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers in the order in which `Module.to` moves them."""
    for child in model.children():
        yield from _as_moved(child)
    yield from (tensor for tensor in (*model._parameters.values(), *model._buffers.values()) if tensor is not None)


def why_values_are_needed(error: Exception) -> str:
    """Why code on fake tensors raised an exception, in one line and without a full stop."""
    if found := what_reads_values(error):
        return found
    message = first_line(error) if isinstance(error, AutotuneError) else in_one_line(error)
    return f"without the values of tensors it raises {message}"[:300].removesuffix(".")


def what_reads_values(error: Exception) -> str:
    """What needed the values of a tensor, in one line; empty where the exception does not say that anything did."""
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return f"what {error.func} returns depends on the values of a tensor"
    return "an operator of it reads the values of a tensor" if any(s in first_line(error) for s in _NO_DATA) else ""


class OneFakeMode(FakeTensorMode):
    """Stays itself when a module is deep-copied, whose fake parameters refer to it: two modes do not mix."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self


@contextmanager
def fake_build(mode: FakeTensorMode) -> Iterator[None]:
    """Build a model on fake tensors; what reads their values raises."""
    with (
        warnings.catch_warnings(action="ignore"),
        without_filling(),
        mock.patch.object(torch.utils, "swap_tensors", _take_data),
        mode,
    ):
        yield


@contextmanager
def without_filling() -> Iterator[None]:
    """Let torch's initialisers leave large fake tensors as they are. Some draw again until the values suit them."""

    def unless_fake(fill: Callable[..., Any]) -> Callable[..., Any]:
        def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if isinstance(tensor, FakeTensor) and tensor.numel() > MOST_ELEMENTS:
                return tensor
            return fill(tensor, *args, **kwargs)  # type: ignore[no-any-return]

        return filled

    fills = {name: fill for name, fill in vars(torch.nn.init).items() if name.startswith("_no_grad_")}
    with mock.patch.dict(vars(torch.nn.init), {name: unless_fake(fill) for name, fill in fills.items()}):
        yield


class SmallValues(TorchDispatchMode):
    """Computes for real, too, what follows from small tensors alone: a constructor may read drop-path rates, sizes, switches.

    Entered inside a `FakeTensorMode`. What is small and depends on a tensor whose values are not known has none either.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of `StorageTracker`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        known = all(tensor in self._values for tensor in given)
        if func is _READ and known:
            return self._really(func, args, kwargs)
        result = func(*args, **kwargs)
        if not known:
            self._forget(func, args, kwargs)
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if made and all(tensor.numel() <= MOST_ELEMENTS for tensor in made):
            real = [leaf for leaf in tree_leaves(self._really(func, args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for fake, value in zip(made, real, strict=True):
                self._values[fake] = value
        return result

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator does with the values."""
        args, kwargs = tree_map_only(FakeTensor, self._values.__getitem__, (args, kwargs))
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop the values of what an operator writes to, and of what shares its memory."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            tensor = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(tensor, FakeTensor) and (value := self._values.get(tensor)) is not None:
                storage = value.untyped_storage()._cdata
                for other in [t for t, v in self._values.items() if v.untyped_storage()._cdata == storage]:
                    del self._values[other]


@contextmanager
def fake_run(mode: FakeTensorMode, target: Target, techniques: Techniques) -> Iterator[None]:
    """Run on fake tensors, as on a device of the kind `target`. Puts torch back at the end."""
    on_gpu = capabilities_of(target).own_processors
    with (
        warnings.catch_warnings(action="ignore"),
        techniques.keep_settings(),
        cuda_like(flash_attention=gpu_of(target).has_flash_attention) if on_gpu else nullcontext(),
        mock.patch.object(torch.utils, "swap_tensors", _take_data),
        mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _always_step),
        _usual_masks(),
        _biases_in_place(),
        mode,
    ):
        yield


@contextmanager
def _biases_in_place() -> Iterator[None]:
    """Let `linear` add its bias in place where it is no part of the product, as it does on real tensors (ATen's Linear.cpp).

    For fake ones, which are a subclass, it makes another tensor.
    """
    linear = torch.ops.aten.linear.default

    def in_place(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if bias is None or input.dim() == 2 or input.is_contiguous():
            return linear.decompose(input, weight, bias)
        return torch.matmul(input, weight.t()).add_(bias)

    with torch.library._scoped_library("aten", "IMPL") as library:
        for key in ("AutogradCPU", "CPU"):
            library.impl("linear", in_place, key)
        yield


@contextmanager
def _usual_masks() -> Iterator[None]:
    """Let Transformers leave out the attention masks that it leaves out on real tensors: it makes all of them for fake ones.

    Where a mask would say only that positions follow each other, their values tell it. They are taken to.
    """
    ways = {
        "transformers.utils.import_utils": ("is_fake_tensor", lambda tensor: False),
        "transformers.masking_utils": ("find_packed_sequence_indices", lambda positions: None),
    }
    with ExitStack() as stack:
        for module, (name, way) in ways.items():
            if hasattr(sys.modules.get(module), name):
                stack.enter_context(mock.patch.object(sys.modules[module], name, way))
        yield


def _take_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """What `Module.to` does with real parameters; it would exchange fake ones, whose weak references forbid it."""
    tensor.data = other.data


def _always_step(self: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `GradScaler._maybe_opt_step`, to which every fake gradient seems infinite."""
    return optimizer.step(*args, **kwargs)


def to_fake(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """The model with fake parameters and buffers in place of its own; what was shared stays shared."""
    for module in model.modules():
        owners: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for owned in owners:
            for name, tensor in owned.items():
                if tensor is not None:
                    owned[name] = mode.from_tensor(tensor)
    return model
