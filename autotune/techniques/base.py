"""What a technique is, and what it is expected to do to time and memory before a model was seen with it.

It owns everything about itself; the rest of the package knows techniques by this protocol only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.records.config import Choice, Config
from autotune.records.device import BF16, FP16, FP32, TF32
from autotune.records.inspection import Support
from autotune.techniques.build import Build, Setting
from autotune.techniques.frameworks import Words

if TYPE_CHECKING:
    import torch

    from autotune.task import Task


@dataclass(frozen=True, kw_only=True)
class Factor:
    """What a choice multiplies something by, known only roughly: lognormal.

    Attributes:
        typical: the median.
        spread: one standard deviation, as a factor: two thirds of all models lie within `typical / spread` to
            `typical * spread`.
    """

    typical: float = 1.0
    spread: float = 1.0


UNTOUCHED = Factor()


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a choice is expected to do, compared with the technique switched off.

    The predictors in `autotune.prediction` start from it and correct it by every probe.

    Attributes:
        compute: the time of forward and backward per sample, once the device is busy.
        launch: the time of a micro step that does not depend on its size.
        update: the time of the optimizer's step.
        data: the time that training waits for samples.
        state: the memory of parameters, gradients and optimizer state.
        activations: the memory that grows with the micro batch.
        untraced: the memory that tracing does not show: libraries' workspaces, kernels that they compile and keep.
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


MANTISSA_BITS = {FP32: 24, TF32: 11, FP16: 11, BF16: 8}  # the hidden one included; the longest type first
_ANYTHING = Factor(spread=1.1)
REACHES_INTO_STEP = "it would reach into a step of the task's own, which is run as it is"


class Phase(IntEnum):
    """When a technique is applied while a session is built; phases run in this order."""

    TASK = 0  # what is trained at all, before anything exists: `Partition`
    PROCESS = 1  # process-wide settings, before the model exists
    MODEL = 2  # the model is on its device; the optimizer does not exist yet
    SPREAD = 3  # how the model is spread over the processes of a world; its parameters may be others from here on
    OPTIMIZER = 4  # the optimizer exists and has no state
    LOADER = 5  # options of the data loader


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
    """One thing that can be switched. Stateless: `autotune.techniques.Techniques` hold one instance of each.

    An inspection asks `support` once, with a model that it may try things on. A search asks `is_redundant`, `expectation` and
    `label` of every config that it considers. In a probe's process, and in `prepare`, `apply` comes in the order of the phases,
    inside `restored`. A whole technique:

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

    Its file is found because it is there, its row in the README is printed by `python -m autotune.techniques`. What a training
    loop of the user's own need not know of says so: `LOOP: Unsaid()` in `frameworks`. A technique that changes what is trained is
    a `Partition`. Another package offers one as an entry point in the group `autotune.techniques`.

    Attributes:
        name: the key in the config dict.
        summary: what it does and what it trades, in one line of the README's table.
        listed_choices: its choices, in the README's table, where `choices` does not list them.
        applies: where it applies, in the README's table.
        choices: those that can be listed whatever the task.
        off: the choice that is plain training.
        least: the smallest choice, where choices are numbers.
        leanest: choices that are there to save memory, the one that saves the most first.
        order: place among the techniques of its phase, in which they are applied and listed; names decide between equals.
        exact: its gradients equal plain fp32's up to rounding.
        changes_learning: it trains something else than the user does. Searched only when included, and labelled.
        ordered: its choices are numbers on a scale.
        keeps_random_masks: a forward pass draws the same random numbers as plain training, so that a comparison of
            gradients can keep dropout on.
        check_steps: optimizer steps that a comparison with plain training takes; more than 1 for what acts on the optimizer.
        traced_in_whole_steps: a trace of whole steps at one batch size shows its memory, whatever `untraceable` says.
        untraced: why its memory cannot be traced without running it, where that is so for all choices but `off`.
        expected: what every choice but `off` is expected to do to time and memory. A technique that does not say may act on
            anything: what acts on nothing that takes time here is never probed.
        against_shortage: its optional choices are searched as well where plain training ran out of memory at inspection.
        likely: choices that usually win, best first. The first that is supported is probed at the start of a search.
        frameworks: what other frameworks call it; see `autotune.techniques.frameworks`.
        said_of: the class of torch.optim that the words of `frameworks` name as well; empty where they name none.
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
    against_shortage: ClassVar[bool] = False
    likely: ClassVar[tuple[Choice, ...]] = ()
    frameworks: ClassVar[Mapping[str, Words]] = {}
    said_of: ClassVar[str] = ""

    def support(self, setting: Setting) -> Support:
        """Say what of this technique applies to the task on the device, by the next three, which are asked in this order.

        It may try things on the setting's model, with gradients, as training does. An exception, except for want of
        memory, is taken as the reason why the technique does not apply.
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
        """Why it does not apply to the task on the device; empty where it does. It may as well raise `UnsupportedError`."""
        return ""

    def choices_for(self, setting: Setting) -> tuple[Choice, ...]:
        """The choices where it applies, `off` included."""
        return self.choices

    def why_optional(self, setting: Setting) -> str:
        """Why it is searched only if it is included, where it applies; empty where it is searched unasked."""
        return ""

    @abstractmethod
    def apply(self, build: Build, choice: Choice) -> None:
        """Switch `choice` on in the session being built. Called only when `choice != off`.

        Raises:
            UnsupportedError: the choice cannot be applied to this model on this device, with the reason.
        """

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put process-wide settings that `apply` changes back at the end."""
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
        """Whether `config` need not be searched: it trains as with this technique off, or its choices cannot be combined."""
        return bool(self.conflict(config))

    def conflict(self, config: Config) -> str:
        """Why this technique cannot be combined with another choice of `config`, which has it on; empty where it can."""
        return ""

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """The one of `choices` that saves the most memory; None for a technique that is not there to save memory."""
        return next((choice for choice in self.leanest if choice in choices), None)

    def allocator_settings(self, choice: Choice) -> str:
        """What `choice` adds to the settings of torch's CUDA allocator (PYTORCH_ALLOC_CONF); empty for nothing."""
        return ""

    def arithmetic(self, choice: Choice) -> str:
        """The type in which matrix products and convolutions are computed, as far as this technique decides it."""
        return FP32

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """What `choice` is expected to do to time and memory; asked only for `choice != off`.

        Args:
            choices: all that are searched, in order.
        """
        return self.expected

    def recomputation(self, task: Task, model: torch.nn.Module, choice: Choice) -> Recomputation | None:
        """What `choice`, or `off`, recomputes, where that is all it does: then one trace of each block serves every choice."""
        return None

    def untraceable(self, choice: Choice, device_kind: str) -> str:
        """Why the memory of a config with `choice` cannot be traced without running it; empty where it can.

        It is then learned from probes. Asked only for `choice != off`, in a process that inspects or traces, on the
        machine that is to train.

        Args:
            device_kind: torch's type of the device that is to train; what it can do: `autotune.devices.capabilities_of`.
        """
        return self.untraced

    @property
    def reaches_into_step(self) -> bool:
        """Whether its choices change what happens between a batch and the updated parameters.

        It is not offered then for a task whose `train_step` is one unit.
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
        """The choice whose traced memory also stands for `choice`, since both need the same."""
        return choice

    def write(
        self, framework: str, choice: Choice, choices: Sequence[Choice] = (), *, optimizer: str = ""
    ) -> dict[str, Any] | None:
        """The framework's arguments for `choice`; None where it has no words for it.

        Args:
            framework: a key of `frameworks`.
            choices: all that the task supports, for frameworks that know on and off only.
            optimizer: class of the task's optimizer, as in `TaskFacts`.
        """
        words = self.frameworks.get(framework)
        written = None if words is None else words.write(choice)
        if written and choice != self.off and self.said_of not in ("", optimizer):
            return None
        return written

    def read(self, framework: str, arguments: Mapping[str, Any], choices: Sequence[Choice] = ()) -> Choice | None:
        """The choice that a framework's arguments make; None where they do not say. The inverse of `write`."""
        words = self.frameworks.get(framework)
        return None if words is None else words.read(arguments)


class Switch(Technique):
    """A technique that is on or off."""

    choices: ClassVar[tuple[Choice, ...]] = (False, True)
    off: ClassVar[Choice] = False


class Partition(Technique):
    """Something of which each choice is another training, with a search, a baseline and a ranking of its own.

    Its choices divide the space: configs of two of them are never compared.

    It acts on the task, before anything is built. Inspection, trace and check are then those of the narrower task, in
    which nothing says that there are others. What `support` offers beside the baseline's choice is ranked beside it, and
    what it offers as optional only if the user includes it.
    """

    phase = Phase.TASK
    changes_learning = True
    off = "none"

    @abstractmethod
    def narrow(self, task: Task, choice: Choice) -> Task:
        """The task that trains `choice`, which is not `off`.

        Raises:
            ConfigError: the task has no such choice; building its model may raise that, too.
        """

    def named(self, task: Task, choice: Choice) -> Choice:
        """The name under which the task knows `choice`, where `off` has one of its own."""
        return choice

    def apply(self, build: Build, choice: Choice) -> None:
        """Put the narrower task in the place of the task."""
        build.task = self.narrow(build.task, choice)

    def validate(self, choice: Any) -> Choice:
        """A name; a whole number is one, too, as those of an `nn.Sequential` are."""
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
        ValueError: it is not.
    """
    if type(choice) is not int or choice < least:
        raise ValueError(f"expected a whole number of at least {least}")
    return choice
