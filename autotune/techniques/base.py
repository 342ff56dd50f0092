"""What a technique is: its name, its choices, when it applies, and what it does to a session that is being built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice, Config
from autotune.records.inspection import Support

if TYPE_CHECKING:
    import torch

    from autotune.devices.base import Device
    from autotune.session import Build
    from autotune.task import Task


class Phase(IntEnum):
    """When a technique is applied while a session is built; phases run in this order."""

    PROCESS = 0  # process-wide settings, before the model exists
    MODEL = 1  # the model is on its device; the optimizer does not exist yet
    OPTIMIZER = 2  # the optimizer exists and has no state
    LOADER = 3  # options of the data loader

    @property
    def shapes_memory(self) -> bool:
        """Whether its techniques change what a training step holds on the device."""
        return self in (Phase.MODEL, Phase.OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a technique may look at to say whether and how it applies. Lives in a process of its own, never in the search.

    Attributes:
        model: built by the task, plain fp32, on the device, in training mode.
        optimizer: the task's own optimizer for `model`, no state yet.
        batch: a micro batch of two samples, on the device.
        baseline: what the user runs today, complete.
        global_batch: samples per optimizer step, or None when the user left it open.
        dataset_size: samples in the training set, or None without a dataset.
    """

    task: Task
    device: Device
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    baseline: Mapping[str, Choice]
    global_batch: int | None
    dataset_size: int | None

    def fresh_batch(self) -> Any:
        """A copy of `batch` to try a forward pass on: user code may change its input in place, or ask for its gradient."""
        import torch

        from autotune.task.batches import map_tensors

        return map_tensors(torch.clone, self.batch)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """What a choice multiplies something by, known only roughly: lognormal, with this median.

    Attributes:
        typical: the median.
        spread: of one standard deviation: two thirds of all models lie within `typical / spread` to `typical * spread`.
    """

    typical: float = 1.0
    spread: float = 1.0


UNTOUCHED = Factor()


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a choice is expected to do, beside the technique being off, before this model was seen with it.

    The predictors in `autotune.predict` start from it and correct it by every probe.

    Attributes:
        compute: on the time of forward and backward per sample, once the device is busy.
        launch: on the time of a micro step that does not depend on its size.
        update: on the time of the optimizer's step.
        data: on the time that training waits for samples.
        state: on the memory of parameters, gradients and optimizer state.
        activations: on the memory that grows with the micro batch.
        untraced: on the memory that tracing does not show: libraries' workspaces, kernels that they compile and keep.
    """

    compute: Factor = UNTOUCHED
    launch: Factor = UNTOUCHED
    update: Factor = UNTOUCHED
    data: Factor = UNTOUCHED
    state: Factor = UNTOUCHED
    activations: Factor = UNTOUCHED
    untraced: Factor = UNTOUCHED


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """A choice that runs some blocks of the model again in the backward pass, and does nothing else to memory.

    Attributes:
        blocks: all that the technique may recompute, in the order in which they run.
        segments: (first, last + 1) number of the blocks that are recomputed together; others are not recomputed.
        each: the choice that recomputes every block alone.
    """

    blocks: tuple[torch.nn.Module, ...]
    segments: tuple[tuple[int, int], ...]
    each: Choice


class Technique(ABC):
    """One thing that can be switched. Stateless; one instance each in `autotune.techniques.REGISTRY`."""

    name: ClassVar[str]  # the key in the config dict
    summary: ClassVar[str]  # one line: what it does and what it trades
    off: ClassVar[Choice]  # plain training
    phase: ClassVar[Phase]
    exact: ClassVar[bool] = True  # gradients equal plain fp32's up to rounding
    ordered: ClassVar[bool] = False  # choices are numbers on a scale

    @abstractmethod
    def support(self, setting: Setting) -> Support:
        """Say what of this technique applies to the task on the device.

        It may try things on the setting's model, with gradients, as training does. What it raises, except for want of
        memory, is taken as the reason why it does not apply.
        """

    @abstractmethod
    def apply(self, build: Build, choice: Choice) -> None:
        """Switch `choice` on in the session being built. Called only when `choice != off`.

        Raises:
            UnsupportedError: the choice cannot be applied to this model on this device, with the reason.
        """

    def validate(self, choice: Any) -> Choice:
        """Return `choice` if it can be a choice of this technique, whatever the task.

        Raises:
            ValueError: the message says what was expected.
        """
        if type(choice) is not type(self.off):
            raise ValueError(f"expected {type(self.off).__name__}")
        return choice

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """What `choice` is expected to do to time and memory; asked only for `choice != off`.

        Args:
            choices: all that are searched, in order.
        """
        return Expectation(compute=Factor(spread=1.1), update=Factor(spread=1.1), activations=Factor(spread=1.1))

    def traced_as(self, choice: Choice) -> Choice:
        """The choice whose trace serves for `choice`, too, since it takes the same memory."""
        return choice

    def recomputation(self, task: Task, model: torch.nn.Module, choice: Choice) -> Recomputation | None:
        """What `choice`, or `off`, recomputes, where that is all it does: then one trace of each block serves every choice."""
        return None

    def is_redundant(self, config: Config) -> bool:
        """Whether `config` is the same training as one with this technique off, and so need not be searched."""
        return False


class UnsupportedError(Exception):
    """A technique's choice cannot be applied to this model on this device."""
