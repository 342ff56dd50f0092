"""What techniques see and change: a task to judge, the session under construction, and the forward pass of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.randomness import keep_randomness
from autotune.records.config import ALONE, Choice, Config, World
from autotune.records.device import NOT_MEASURED, Calibration

if TYPE_CHECKING:
    from autotune.devices.base import Device
    from autotune.task import Task

FEW = 2  # samples of a pass that is only tried; a session that is only traced is prepared for as many


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a technique may look at to say whether and how it applies. It exists in a separate process.

    Attributes:
        model: built by the task, plain fp32, on the device, in training mode.
        optimizer: the task's own optimizer for `model`, without state; for a `train_step`, all that the task configures.
        batch: a micro batch of two samples, on the device.
        baseline: what the user runs today, as a full config.
        dataset_size: samples in the training set, or None without a dataset.
        calibration: the device's measured rates; empty where the device is not in this machine.
        world: the processes that are to train together; the model is not spread over them yet.
    """

    task: Task
    device: Device
    model: torch.nn.Module
    optimizer: Any
    batch: Any
    baseline: Mapping[str, Choice]
    dataset_size: int | None
    calibration: Calibration = NOT_MEASURED
    world: World = ALONE

    def try_step(self, batch: Any) -> None:
        """Run the model forward as training does. A task's own `train_step` is run whole, so it changes the parameters."""
        if not self.task.takes_whole_steps:
            self.task.loss(self.model, batch)
        else:
            self.task.whole_step(self.model, self.optimizer, batch)

    def run_order(self, modules: Iterable[torch.nn.Module]) -> list[Any]:
        """Those of `modules` that a forward pass enters, in the order of first entry."""
        return _in_order_of_entry(modules, lambda: self.try_step(self.fresh_batch()))

    def fresh_batch(self) -> Any:
        """A copy of `batch` to try a forward pass on: user code may change its input in place, or ask for its gradient."""
        from autotune.task.batches import fresh_copy

        return fresh_copy(self.batch)


class Spread:
    """How several processes train one model together.

    Args:
        around: runs a function of the model and a batch, with the collectives that its forward pass needs.
        synchronizing: makes the context of a micro batch's passes. Its argument tells whether this micro batch is the last of
            the step; only then are gradients put together.
        gathers: whether every forward pass needs all processes, because each holds only a shard of the parameters.
    """

    def __init__(
        self,
        around: Callable[..., Any],
        synchronizing: Callable[[bool], AbstractContextManager[Any]],
        *,
        gathers: bool,
    ) -> None:
        self.run = around
        self.synchronizing = synchronizing
        self.gathers = gathers


@dataclass(kw_only=True)
class Build:
    """A session while techniques are being applied to it; `Technique.apply` changes what it needs to.

    Attributes:
        task: what is trained; a technique of `Phase.TASK` replaces it by a narrower one.
        world: the processes that train the model together, this one among them.
        forward_contexts: entered around every forward pass, outermost first.
        batch_transforms: applied in order to every micro batch once it is on the device.
        scaler: scales the loss and unscales the gradients, or None.
        loader_options: keyword arguments for the data loader.
        batch_streams: applied in order to the stream of micro batches that the data loader yields.
        one_micro_batch: why a step can take only one micro batch; empty where it can take several.
        unrepeatable: why a step that ran out of memory cannot be taken again; empty where it can.
        places: technique -> the modules that it acts on: role -> names. For `parallel` also what
            frameworks want to know: the classes of these modules, or whether the loss leaves parameters out.
        ddp_options: keyword arguments for `DistributedDataParallel`, where each process has a copy of the model.
        fsdp_options: keyword arguments for `fully_shard`.
        spread: how the model is spread over the processes of a world; None in a world of one.
        optimizers: applied in order to the optimizer once techniques have set it up; each returns its replacement.
    """

    task: Task
    device: Device
    config: Config
    world: World = ALONE
    model: torch.nn.Module = field(init=False)
    optimizer: Any = field(init=False)
    forward_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    batch_transforms: list[Callable[[Any], Any]] = field(default_factory=list)
    scaler: torch.amp.GradScaler | None = None
    loader_options: dict[str, Any] = field(default_factory=dict)
    batch_streams: list[Callable[[Iterator[Any]], Iterator[Any]]] = field(default_factory=list)
    one_micro_batch: str = ""
    unrepeatable: str = ""
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    ddp_options: dict[str, Any] = field(default_factory=dict)
    fsdp_options: dict[str, Any] = field(default_factory=dict)
    spread: Spread | None = None
    optimizers: list[Callable[[Any], Any]] = field(default_factory=list)

    @contextmanager
    def tried_loss(self, batch: Any) -> Iterator[torch.Tensor]:
        """The loss of a micro batch, which is on the CPU, as training would compute it by now. At the end random states, and what the pass
        has changed of the model beside what is trained, are as they were; gradients are left to the caller.
        """
        from autotune.task.adapters import uncounted
        from autotune.task.batches import to_device

        device = self.device.torch_device
        with keep_randomness(device), uncounted(self.model):
            batch = to_device(batch, device)
            for transform in self.batch_transforms:
                batch = transform(batch)
            with _unchanged(self.model):
                with ExitStack() as stack:
                    for context in self.forward_contexts:
                        stack.enter_context(context())
                    loss = self.task.loss(self.model, batch)
                yield loss

    def run_order(self, modules: Iterable[torch.nn.Module]) -> list[Any]:
        """As of `Setting`, by a pass of a few samples of which nothing is left. Not for a task that takes whole steps of its own."""

        def run() -> None:
            with (
                keep_randomness(self.device.torch_device),  # of what makes the batch
                self.tried_loss(self.task.small_batch(min(FEW, self.config.batch_size))),
            ):
                pass

        return _in_order_of_entry(modules, run)

    def acting_on(self, technique: str, modules: Iterable[torch.nn.Module], **one: torch.nn.Module) -> dict[str, Any]:
        """Write into `places` which modules a technique acts on, by their names for `get_submodule`, and return its entry.

        Args:
            modules: the modules with the role `modules`, which every technique has.
            one: further roles, each with one module.
        """
        names = {id(module): name for name, module in self.model.named_modules()}
        found = {"modules": [names[id(module)] for module in modules]}
        self.places[technique] = {**found, **{role: names[id(module)] for role, module in one.items()}}
        return self.places[technique]


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """At the end buffers, frozen parameters and the modules' own attributes are as they were: a pass may move a teacher towards what is
    trained, or set something up by its first batch and note that it has.

    Where more is frozen than trained, as below an adapter, nothing moves the frozen part.
    """
    from autotune.task.batches import own_elements, strided_parts

    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    moving = frozen if sum(parameter.numel() for parameter in frozen) <= num_trained else []
    parts = [part for tensor in (*model.buffers(), *moving) for part in strided_parts(tensor)]
    # not on the device, where a pass of a whole micro batch may follow: memory that training does not hold is no part of its peak
    values = [(part, part.detach().to("cpu", copy=True)) for part in parts]
    namespaces = [space for module in model.modules() for space in (vars(module), module._buffers)]
    # a scripted module's `_buffers` is no dict
    attributes = [(held, dict(held)) for held in namespaces if isinstance(held, dict)]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, before in values:
                own = own_elements(part)
                part[own].copy_(before[own])
        for held, known in attributes:
            for name in held.keys() - known.keys():
                del held[name]
            held.update(known)


def _in_order_of_entry(modules: Iterable[torch.nn.Module], run: Callable[[], object]) -> list[Any]:
    """Those of `modules` that `run` enters, in the order of first entry."""
    entered: list[Any] = []
    hooks = [module.register_forward_pre_hook(lambda m, _: entered.append(m)) for module in modules]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(entered))


@dataclass(eq=False)
class Forward:
    """A replacement of one module's `forward`. It is an object, so that a deep copy of the model computes with its own modules.

    Attributes:
        original: the forward that the user or a technique had set on this very instance before; else None.
    """

    module: torch.nn.Module

    def __post_init__(self) -> None:
        self.original = vars(self.module).get("forward")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass as it was before."""
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def trains(self) -> bool:
        """Whether a backward pass may follow."""
        return self.module.training and torch.is_grad_enabled()
