"""What a technique is, and what it is expected to do to time and memory before it was tried on a model.

A technique's file owns everything about it; the rest of the package knows techniques by this protocol only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice, Config, World
from autotune.records.device import BF16, FP16, FP32, TF32
from autotune.records.inspection import Support
from autotune.techniques.build import Build, Setting
from autotune.techniques.frameworks import Words

if TYPE_CHECKING:
    import torch

    from autotune.task import Task


@dataclass(frozen=True, kw_only=True)
class Factor:
    """What a choice multiplies a quantity by. It is known only roughly, as a lognormal distribution.

    Attributes:
        typical: the median.
        spread: one standard deviation, as a factor: two thirds of all models lie between `typical / spread` and
            `typical * spread`.
    """

    typical: float = 1.0
    spread: float = 1.0


UNTOUCHED = Factor()


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a choice is expected to do, compared with the technique switched off.

    The predictors in `autotune.prediction` start from this and correct it with every probe.

    Attributes:
        compute: the time of forward and backward per sample, once the device is busy.
        launch: the time of a micro step that does not depend on its size.
        update: the time of the optimizer's step.
        data: the time that training waits for samples.
        state: the memory of parameters, gradients and optimizer state.
        activations: the memory that grows with the micro batch.
        untraced: the memory that tracing does not show, such as libraries' workspaces and kernels compiled at run time.
        setup_s: seconds of preparation before the first step that plain training does not need, such as compiling.
    """

    compute: Factor = UNTOUCHED
    launch: Factor = UNTOUCHED
    update: Factor = UNTOUCHED
    data: Factor = UNTOUCHED
    state: Factor = UNTOUCHED
    activations: Factor = UNTOUCHED
    untraced: Factor = UNTOUCHED
    setup_s: float = 0.0


MANTISSA_BITS = {FP32: 24, TF32: 11, FP16: 11, BF16: 8}  # the hidden bit included; the longest type first
_ANYTHING = Factor(spread=1.1)
REACHES_INTO_STEP = "it would reach into a step of the task's own, which is run as it is"


class Phase(IntEnum):
    """When a technique is applied while a session is built; phases run in this order."""

    TASK = 0  # before anything exists: what is trained at all (`Partition`)
    PROCESS = 1  # process-wide settings, before the model exists
    MODEL = 2  # the model is on its device; the optimizer does not exist yet
    SPREAD = 3  # the model is spread over the processes of a world, which may replace its parameters
    OPTIMIZER = 4  # the optimizer exists and has no state
    LOADER = 5  # options of the data loader


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """A choice that runs some blocks of the model again in the backward pass, and does nothing else to memory.

    Attributes:
        blocks: all blocks that the technique may recompute, in the order in which they run.
        segments: (first, last + 1) of the blocks that are recomputed together, by number; others are not recomputed.
        each: the choice that recomputes every block alone.
    """

    blocks: tuple[torch.nn.Module, ...]
    segments: tuple[tuple[int, int], ...]
    each: Choice


class Technique(ABC):
    """One thing that can be switched. Stateless: `autotune.techniques.Techniques` holds one instance of each.

    An inspection calls `support` once, with a model that the technique may try things on. A search calls `is_redundant`, `expectation`
    and `label` for every config that it considers. A probe's process, and `prepare`, call `apply` in the order of the phases, inside
    `restored`. A complete technique:

        class Deterministic(Switch):
            name = "deterministic"
            summary = "kernels that add in the same order each time: slower, and runs can be repeated to the last bit"
            applies = "everywhere, if included"
            phase = Phase.PROCESS

            def why_optional(self, setting: Setting) -> str:
                return "it is slower"

            def apply(self, build: Build, choice: Choice) -> None:
                torch.use_deterministic_algorithms(True)

            @contextmanager
            def restored(self) -> Iterator[None]:
                before = torch.are_deterministic_algorithms_enabled()
                yield None  # the process trains
                torch.use_deterministic_algorithms(before)

    Its file need only lie in this package, and `python -m autotune.techniques` prints its row of the README. `LOOP: Unsaid()` in
    `frameworks` says that a user's own training loop need not change for it. A technique that changes what is trained is a
    `Partition`. Another package offers a technique as an entry point in the group `autotune.techniques`.

    Attributes:
        name: the key in the config dict.
        summary: what it does and what it trades, for the README's table, in one line.
        listed_choices: its choices as the README's table lists them, where `choices` does not.
        applies: where it applies, for the README's table.
        choices: the choices that do not depend on the task.
        off: the choice that is plain training.
        least: the smallest choice, where choices are numbers.
        leanest: choices whose purpose is to save memory, the one that saves the most first.
        order: place among the techniques of its phase when they are applied and listed; names decide between equals.
        exact: its gradients equal plain fp32's up to rounding.
        changes_learning: it trains something else than the user does. Searched only when included, and labelled.
        ordered: its choices are numbers on a scale.
        keeps_random_masks: a forward pass draws the same random numbers as plain training, so that a comparison of
            gradients can keep dropout on.
        check_steps: optimizer steps that a comparison with plain training takes; more than 1 if it acts on the optimizer.
        traced_in_whole_steps: a trace of whole steps at one batch size shows its memory, whatever `untraceable` says.
        untraced: why its memory cannot be traced without running it, where that holds for every choice but `off`.
        expected: what every choice but `off` is expected to do to time and memory. By default it may act on any part of them;
            a technique that is said to act on no part that takes time here is never probed.
        loads_host: every choice but `off` keeps the host's memory, bus or processors busy beside a device of its own, so that
            probes with it disturb others that run at once.
        against_shortage: its optional choices are searched as well where plain training ran out of memory at inspection.
        likely: choices that usually win, best first. The first supported one is probed at the start of a search.
        frameworks: what other frameworks call it; see `autotune.techniques.frameworks`.
        said_of: the class of torch.optim that the words in `frameworks` also name; empty where they name none.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    listed_choices: ClassVar[str] = ""
    applies: ClassVar[str]
    choices: ClassVar[tuple[Choice, ...]] = ()
    off: ClassVar[Choice]
    least: ClassVar[int] = 0
    leanest: ClassVar[tuple[Choice, ...]] = ()
    phase: ClassVar[Phase]
    order: ClassVar[int] = 100
    exact: ClassVar[bool] = True
    changes_learning: ClassVar[bool] = False
    ordered: ClassVar[bool] = False
    keeps_random_masks: ClassVar[bool] = False
    check_steps: ClassVar[int] = 1
    traced_in_whole_steps: ClassVar[bool] = False
    untraced: ClassVar[str] = ""
    expected: ClassVar[Expectation] = Expectation(
        compute=_ANYTHING, launch=_ANYTHING, update=_ANYTHING, activations=_ANYTHING
    )
    loads_host: ClassVar[bool] = False
    against_shortage: ClassVar[bool] = False
    likely: ClassVar[tuple[Choice, ...]] = ()
    frameworks: ClassVar[Mapping[str, Words]] = {}
    said_of: ClassVar[str] = ""

    def support(self, setting: Setting) -> Support:
        """Say which choices apply to the task on the device, by calling the next three methods in their order.

        They may try things on the setting's model, with gradients, as training does. An exception, unless memory ran out,
        is taken as the reason why the technique does not apply.
        """
        try:
            if reason := self.why_not(setting):
                return Support(choices=(self.off,), reason=reason)
            choices = self.choices_for(setting)
        except UnsupportedError as error:
            return Support(choices=(self.off,), reason=str(error))
        if reason := self.why_optional(setting):
            others = tuple(choice for choice in choices if choice != self.off)
            return Support(choices=(self.off,), optional=others, reason=reason)
        return Support(choices=choices)

    def why_not(self, setting: Setting) -> str:
        """Why the technique does not apply to the task on the device; empty where it does. It may also raise `UnsupportedError`."""
        return ""

    def choices_for(self, setting: Setting) -> tuple[Choice, ...]:
        """The choices for a task to which it applies, `off` included."""
        return self.choices

    def why_optional(self, setting: Setting) -> str:
        """Why the technique, where it applies, is searched only if included; empty where it is searched unasked."""
        return ""

    @abstractmethod
    def apply(self, build: Build, choice: Choice) -> None:
        """Switch `choice` on in the session being built. Called only when `choice != off`.

        Raises:
            UnsupportedError: the choice cannot be applied to this model on this device, with the reason.
        """

    def is_process_wide(self, choice: Choice) -> bool:
        """Whether `choice`, which is not `off`, acts on whatever the process trains; `restored` then ends that."""
        return self.phase is Phase.PROCESS

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that at its end restores the process-wide settings that `apply` changes."""
        yield

    def validate(self, choice: Any) -> Choice:
        """Return `choice` if it can be a choice of this technique, whatever the task.

        Raises:
            ValueError: the message says what was expected.
        """
        if type(self.off) is int:
            return whole_number(choice, self.least)
        if isinstance(self.off, str) and self.choices:
            if not isinstance(choice, str) or choice not in self.choices:
                raise ValueError(f"expected one of {', '.join(map(str, self.choices))}")
            return choice
        if type(choice) is not type(self.off):
            raise ValueError(f"expected {type(self.off).__name__}")
        return choice

    def label(self, choice: Choice) -> str:
        """The choice in a word or two, for reports and reasons."""
        return plain_label(self.name, choice)

    def is_redundant(self, config: Config) -> bool:
        """Whether `config` need not be searched, because this technique does nothing in it or cannot be combined with its other choices."""
        return bool(self.conflict(config))

    def conflict(self, config: Config) -> str:
        """Why this technique, which is on in `config`, cannot be combined with another choice there; empty where it can."""
        return ""

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """The one of `choices` that saves the most memory; None for a technique whose purpose is another."""
        return next((choice for choice in self.leanest if choice in choices), None)

    def allocator_settings(self, choice: Choice) -> str:
        """What `choice` adds to the settings of torch's CUDA allocator (PYTORCH_ALLOC_CONF); empty for nothing."""
        return ""

    def untraced_bytes(self, choice: Choice) -> int:
        """What `choice` takes beside what tracing shows where the processors train, whatever the model: processes that it starts, say."""
        return 0

    def untraced_bytes_per_shape(self, choice: Choice) -> int:
        """The same for each shape of a micro batch: what libraries keep for another type."""
        return 0

    def num_shards(self, choice: Choice, world: World) -> int:
        """How many processes of `world` share each parameter out, so that it is gathered for every use; 1 where each has all of it."""
        return 1

    def num_groups(self, choice: Choice) -> int:
        """How many groups of processes `choice` makes beside the world's own, each with a communicator of its own."""
        return 0

    def arithmetic(self, choice: Choice) -> str:
        """The type in which matrix products and convolutions are computed, as far as this technique decides it."""
        return FP32

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """What `choice` is expected to do to time and memory; asked only for `choice != off`.

        Args:
            choices: all choices that are searched, in order.
        """
        return self.expected

    def recomputation(self, task: Task, model: torch.nn.Module, choice: Choice) -> Recomputation | None:
        """What `choice`, which may be `off`, recomputes; one trace of each block then serves every choice. None where it does more."""
        return None

    def untraceable(self, choice: Choice, device_kind: str) -> str:
        """Why the memory of a config with `choice` cannot be traced without running it; empty where it can.

        The memory is then learned from probes. Asked only for `choice != off`, in a process that inspects or traces, on the
        machine that is to train.

        Args:
            device_kind: torch's type of the device that is to train; `autotune.devices.capabilities_of` tells what it can do.
        """
        return self.untraced

    @property
    def reaches_into_step(self) -> bool:
        """Whether its choices change what happens between a batch and the updated parameters.

        If so, it is not offered for a task with a `train_step` of its own, which is run as it is.
        """
        return self.phase in (Phase.MODEL, Phase.SPREAD, Phase.OPTIMIZER)

    @property
    def shapes_memory(self) -> bool:
        """Whether its choices change what a training step holds on the device."""
        return self.phase in (Phase.TASK, Phase.MODEL, Phase.SPREAD, Phase.OPTIMIZER)

    def shapes_micro_batch(self, choice: Choice) -> bool:
        """Whether `choice` changes what the forward and the backward pass of a micro batch do or hold."""
        return self.shapes_memory and self.phase in (Phase.MODEL, Phase.SPREAD)

    def shapes_update(self, choice: Choice) -> bool:
        """Whether `choice` changes what an update of the parameters does or holds."""
        return self.shapes_memory and self.phase in (Phase.SPREAD, Phase.OPTIMIZER)

    def traced_as(self, choice: Choice) -> Choice:
        """The choice whose trace also serves `choice`, because both need the same memory."""
        return choice

    def write(
        self, framework: str, choice: Choice, choices: Sequence[Choice] = (), *, optimizer: str = ""
    ) -> dict[str, Any] | None:
        """The framework's arguments for `choice`; None where it has no words for it.

        Args:
            framework: a key of `frameworks`.
            choices: all choices that the task supports, for frameworks that know only on and off.
            optimizer: class of the task's optimizer, as in `TaskFacts`.
        """
        words = self.frameworks.get(framework)
        written = None if words is None else words.write(choice)
        if written and choice != self.off and self.said_of not in ("", optimizer):
            return None
        return written

    def read(self, framework: str, arguments: Mapping[str, Any], choices: Sequence[Choice] = ()) -> Choice | None:
        """The choice that a framework's arguments stand for; None where they do not say. The inverse of `write`."""
        words = self.frameworks.get(framework)
        return None if words is None else words.read(arguments)

    def is_default(self, framework: str, choice: Choice) -> bool:
        """Whether the framework is known to make this choice without any argument."""
        words = self.frameworks.get(framework)
        return words is not None and words.is_default(choice)


class Switch(Technique):
    """A technique that is on or off."""

    choices: ClassVar[tuple[Choice, ...]] = (False, True)
    off: ClassVar[Choice] = False


class Partition(Technique):
    """A technique of which each choice trains something else, with a search, a baseline and a ranking of its own.

    Its choices divide the space: configs with different choices are never compared.

    It acts on the task, before anything is built. Inspection, trace and check then see only the narrower task, which does not
    show that there are others. Choices that `support` offers beside the baseline's are ranked beside it; optional ones only if
    the user includes them.
    """

    phase = Phase.TASK
    changes_learning = True
    off = "none"

    @abstractmethod
    def narrow(self, task: Task, choice: Choice) -> Task:
        """The task that trains `choice`, which is not `off`.

        Raises:
            ConfigError: the task has no such choice. Building the narrower task's model may raise it as well.
        """

    def named(self, task: Task, choice: Choice) -> Choice:
        """The task's name for `choice`. For `off` it may be another, such as the first of several names."""
        return choice

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the task by the narrower one."""
        build.task = self.narrow(build.task, choice)

    def validate(self, choice: Any) -> Choice:
        """Return a name. A whole number is one, too, since the children of an `nn.Sequential` are named by numbers."""
        if type(choice) is int:
            return str(choice)
        if not isinstance(choice, str) or not choice:
            raise ValueError("expected a name")
        return choice


class UnsupportedError(Exception):
    """A technique's choice cannot be applied to this model on this device."""


def plain_label(name: str, choice: Choice) -> str:
    """A choice of any technique in a word or two."""
    if isinstance(choice, bool):
        return name if choice else f"no {name}"
    return f"{name} {choice}"


def whole_number(choice: Any, least: int) -> int:
    """Return `choice` if it is an integer of at least `least`, and no bool.

    Raises:
        ValueError: it is anything else.
    """
    if type(choice) is not int or choice < least:
        raise ValueError(f"expected a whole number of at least {least}")
    return choice
