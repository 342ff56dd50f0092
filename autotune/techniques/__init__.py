"""A collection of techniques, passed as a value: the installed ones, or the switches of a command. It completes and describes configs.

A technique is one file of this package, found by being there. Other packages add theirs through the entry point group
`autotune.techniques`. Only entry points ask for the installed techniques; all other code is passed them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from autotune import plugins
from autotune.errors import ConfigError
from autotune.records.config import (
    ACCUMULATION,
    ALONE,
    BATCH_KEYS,
    BATCH_SIZE,
    DEFAULT_BATCH_SIZE,
    BatchPlan,
    Choice,
    Config,
    World,
    describe_batch,
    largest_batch_size,
)
from autotune.records.device import FP32
from autotune.records.inspection import Support
from autotune.techniques.base import (
    MANTISSA_BITS,
    REACHES_INTO_STEP,
    Expectation,
    Factor,
    Partition,
    Phase,
    Recomputation,
    Switch,
    Technique,
    UnsupportedError,
    plain_label,
    whole_number,
)
from autotune.techniques.build import Build, Setting
from autotune.techniques.spread_option import SPREAD, shards_parameters
from autotune.units import plural

if TYPE_CHECKING:
    from autotune.task import Task

__all__ = [
    "REACHES_INTO_STEP",
    "SPREAD",
    "Build",
    "Expectation",
    "Factor",
    "Phase",
    "Recomputation",
    "Setting",
    "Support",
    "Switch",
    "Technique",
    "Techniques",
    "UnsupportedError",
    "declare",
    "find_techniques",
    "shards_parameters",
]

GROUP = "autotune.techniques"  # entry points: `name = "module:Class"`
_REQUIRED = ("name", "summary", "applies", "off", "phase")


class Techniques(Mapping[str, Technique]):
    """Techniques by name, in the order in which they are applied and listed. The collection does not change."""

    def __init__(self, techniques: Iterable[Technique]) -> None:
        self._by_name = {technique.name: technique for technique in techniques}
        self._shaping = tuple(technique for technique in self.values() if technique.shapes_memory)
        self._drawing = tuple(technique for technique in self.values() if technique.changes_learning)
        self._deciding_shapes = tuple(
            each
            for each in self.values()
            if each.shapes_memory or each.changes_learning or any(each.arithmetic(c) != FP32 for c in each.choices)
        )
        self._with_untraced = tuple(
            each
            for each in self.values()
            if any(each.untraced_bytes(choice) or each.untraced_bytes_per_shape(choice) for choice in each.choices)
        )

    def __getitem__(self, name: str) -> Technique:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def known(self, name: str) -> str:
        """Return the name if it is a key of a config, a technique's or the batch's.

        Raises:
            ConfigError: it is no such key; the message offers the nearest names, or all where none is near.
        """
        names = (*BATCH_KEYS, *self)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
            raise ConfigError(f"{name!r} is not a technique; {meant}")
        return name

    def is_ordered(self, name: str) -> bool:
        """Whether the choices of a key of a config are numbers on a scale."""
        return name in BATCH_KEYS or self[name].ordered

    def is_off(self, name: str, choice: Choice) -> bool:
        """Whether `choice` means plain training; False for a key of the batch, and for a technique not in this collection."""
        return name in self and choice == self[name].off

    def validate(self, name: str, choice: Any) -> Choice:
        """Return `choice` if it can be a choice of `name`, a technique or a key of the batch.

        Raises:
            ConfigError: the name is unknown, or `choice` is no choice of it.
        """
        try:
            return whole_number(choice, 1) if self.known(name) in BATCH_KEYS else self[name].validate(choice)
        except ValueError as error:
            raise ConfigError(f"{choice!r} is not a choice of {name}: {error}") from None

    def complete(
        self,
        choices: Mapping[str, Any],
        *,
        global_batch: int | None = None,
        world: World = ALONE,
        baseline: Mapping[str, Any] | None = None,
    ) -> Config:
        """A full config from a partial one: missing techniques are off, and accumulation follows from the global batch.

        Args:
            world: the processes that train together, which share the global batch.
            baseline: the task's baseline, as far as it is stated. Where `choices` name no batch size, it is the baseline's, or in a
                world of several processes the largest below it that keeps the global batch.

        Raises:
            ConfigError: an unknown key, an invalid choice, or a batch that does not keep the global batch.
        """
        stated = {BATCH_SIZE: baseline[BATCH_SIZE]} if baseline and BATCH_SIZE in baseline else {}
        if stated and world.size > 1:  # it may have been stated of one process
            whole = int(self.validate(BATCH_SIZE, stated[BATCH_SIZE]))
            stated = {BATCH_SIZE: largest_batch_size(whole, global_batch, world)}
        given = {name: self.validate(name, choice) for name, choice in {**stated, **choices}.items()}
        batch_size = int(given.get(BATCH_SIZE, largest_batch_size(DEFAULT_BATCH_SIZE, global_batch, world)))
        plan = BatchPlan(batch_size) if global_batch is None else BatchPlan.keeping(global_batch, batch_size, world)
        plan = BatchPlan(batch_size, int(given.get(ACCUMULATION, plan.accumulation_steps)), world)
        if not plan.keeps(global_batch):
            samples = plan.samples_per_step
            plans = f"{BATCH_SIZE} {batch_size} x {ACCUMULATION} {plan.accumulation_steps}"
            plans += f" x {world.data_parallel} processes" if world.data_parallel > 1 else ""
            raise ConfigError(
                f"{plans} is {plural(samples, 'sample')} per optimizer step, but the global batch is {global_batch}; "
                f"leave {ACCUMULATION} out of the config, or ask for a global batch of {samples} "
                f"(--global-batch {samples}, in Python global_batch={samples})"
            )
        batch = {BATCH_SIZE: batch_size, ACCUMULATION: plan.accumulation_steps}
        switched = {name: given.get(name, technique.off) for name, technique in self.items()}
        return Config((*batch.items(), *switched.items()))

    def switched_on(self, config: Config, *phases: Phase) -> tuple[tuple[str, Choice], ...]:
        """The choices of `config` that are not off, for techniques of the given phases, or of all phases if none is given."""
        return tuple(
            (name, config[name])
            for name, technique in self.items()
            if config[name] != technique.off and (technique.phase in phases or not phases)
        )

    def shapes_group(self, config: Config) -> tuple[tuple[str, Choice], ...]:
        """The choices that are not off, of those that decide which shapes micro batches have, and which kernels a pass over one needs."""
        on = ((t, config[t.name]) for t in self._deciding_shapes if config[t.name] != t.off)
        return tuple(
            (technique.name, choice)
            for technique, choice in on
            if technique.shapes_micro_batch(choice)
            or technique.changes_learning
            or technique.arithmetic(choice) != FP32
        )

    def drawing_group(self, config: Config) -> tuple[tuple[str, Choice], ...]:
        """The choices that are not off, of those that change which samples lie in a batch."""
        return tuple((t.name, config[t.name]) for t in self._drawing if config[t.name] != t.off)

    def micro_batch_group(self, config: Mapping[str, Choice]) -> tuple[tuple[str, Choice], ...]:
        """The choices that are not off, of those that change a micro batch: configs that share them take the same passes."""
        on = ((t, config[t.name]) for t in self._shaping if config.get(t.name, t.off) != t.off)
        return tuple((technique.name, choice) for technique, choice in on if technique.shapes_micro_batch(choice))

    def update_group(self, config: Mapping[str, Choice]) -> tuple[tuple[str, Choice], ...]:
        """The same of those that change an update of the parameters."""
        on = ((t, config[t.name]) for t in self._shaping if config.get(t.name, t.off) != t.off)
        return tuple((technique.name, choice) for technique, choice in on if technique.shapes_update(choice))

    def trained(self, choices: Mapping[str, Choice]) -> dict[str, Choice]:
        """The choices that say what is trained, of a config, complete or not. Configs that differ in them are never compared."""
        return {name: choices.get(name, technique.off) for name, technique in self._partitions.items()}

    def trained_by(self, task: Task, choices: Mapping[str, Choice]) -> dict[str, Choice]:
        """What is trained, as in `trained`, by the names that the task has for it."""
        return {name: self._partitions[name].named(task, choice) for name, choice in self.trained(choices).items()}

    def narrow_task(self, task: Task, choices: Mapping[str, Choice]) -> Task:
        """The task that trains what a config says, with no other choice left of what is trained.

        Raises:
            ConfigError: the task has no such choice.
        """
        for name, choice in self.trained(choices).items():
            if not self.is_off(name, choice):
                task = self._partitions[name].narrow(task, choice)
        return task

    @property
    def _partitions(self) -> dict[str, Partition]:
        return {name: technique for name, technique in self.items() if isinstance(technique, Partition)}

    def arithmetic_of(self, config: Config) -> str:
        """The type in which a config computes matrix products and convolutions: the shortest type that its techniques choose."""
        types = (technique.arithmetic(config[name]) for name, technique in self.items())
        return max(types, key=list(MANTISSA_BITS).index, default=FP32)

    def untraceable(self, config: Config, device_kind: str) -> str:
        """Why the memory of `config` cannot be traced on a kind of device (`Technique.untraceable`); empty where it can."""
        reasons = (self[name].untraceable(choice, device_kind) for name, choice in self.switched_on(config))
        return "; ".join(filter(None, reasons))

    def num_shards(self, config: Config, world: World) -> int:
        """How many processes of `world` share each parameter out; 1 where each has all of it."""
        return max((technique.num_shards(config[name], world) for name, technique in self.items()), default=1)

    def num_communicators(self, config: Config, world: World) -> int:
        """How many communicators a process of `world` has: one for each group of processes that it is in; none where it is alone."""
        return 0 if world.size == 1 else 1 + sum(t.num_groups(config[name]) for name, t in self.items())

    def setup_s(self, config: Config) -> float:
        """Seconds that the techniques of `config` are expected to add to the time before the first step."""
        on = ((self[name], choice) for name, choice in self.switched_on(config))
        return sum(technique.expectation(choice, (technique.off, choice)).setup_s for technique, choice in on)

    def loads_host(self, config: Config) -> frozenset[str]:
        """The techniques of `config` that keep the host busy beside a device of its own."""
        return frozenset(name for name, _ in self.switched_on(config) if self[name].loads_host)

    def allocator_settings(self, config: Config) -> str:
        """What the techniques of `config` add to the settings of torch's CUDA allocator; empty for nothing."""
        return ",".join(filter(None, (t.allocator_settings(config[name]) for name, t in self.items())))

    def untraced_bytes(self, config: Config, num_shapes: float = 1.0) -> int:
        """What `config` takes beside what tracing shows where the processors train, whatever the model.

        Args:
            num_shapes: of micro batches that training meets.
        """
        choices = [(technique, config[technique.name]) for technique in self._with_untraced]
        per_shape = sum(technique.untraced_bytes_per_shape(choice) for technique, choice in choices)
        return sum(technique.untraced_bytes(choice) for technique, choice in choices) + round(num_shapes * per_shape)

    def all_allocator_settings(self) -> tuple[str, ...]:
        """Every text that a choice adds to the settings of torch's CUDA allocator, the empty one first."""
        added = (technique.allocator_settings(choice) for technique in self.values() for choice in technique.choices)
        return tuple(dict.fromkeys(("", *added)))

    @contextmanager
    def keep_settings(self) -> Iterator[None]:
        """A context that at its end restores the process-wide settings that techniques change."""
        with ExitStack() as stack:
            for technique in self.values():
                stack.enter_context(technique.restored())
            yield

    def label(self, name: str, choice: Choice) -> str:
        """A choice of any key of a config in a word or two, even of a technique that is not in this collection."""
        if name == BATCH_SIZE:
            return f"batch {choice}"
        return self[name].label(choice) if name in self else plain_label(name, choice)

    def describe(self, config: Mapping[str, Choice], baseline: Mapping[str, Choice] | None = None) -> str:
        """A config in words: `batch 16 x3, bf16, 2 checkpoint segments, fused`; given a baseline, only what differs from it.

        `x3` stands for accumulation over three micro batches. Without a baseline, techniques that are off are left out.
        """
        words = []
        if baseline is None or any(config.get(name) != baseline.get(name) for name in BATCH_KEYS):
            words.append(describe_batch(config))
        for name, choice in config.items():
            if name in BATCH_KEYS:
                continue
            same = self.is_off(name, choice) if baseline is None or name not in baseline else choice == baseline[name]
            if not same:
                words.append(self.label(name, choice))
        return ", ".join(words) if words else "as the baseline"


class Declared(Technique):
    """A switch of the user's own training script, which a search by command sets through words of the command line.

    The script itself does the switching, so `apply` refuses, and there are no gradients to compare.
    """

    summary: ClassVar[str] = "a switch of the training script"
    applies: ClassVar[str] = "searches by command"
    phase: ClassVar[Phase] = Phase.MODEL
    exact: ClassVar[bool] = False

    def support(self, setting: Setting) -> Support:
        """All choices, since the script knows what it takes."""
        return Support(choices=self.choices)

    def apply(self, build: Build, choice: Choice) -> None:
        """Refuse, because only the script can apply it.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"{self.name} is a switch of a training script: run the script's own command")

    def validate(self, choice: Any) -> Choice:
        """Return a choice that the command line declares."""
        if choice not in self.choices:
            raise ValueError(f"expected one of {', '.join(map(str, self.choices))}")
        return self.choices[self.choices.index(choice)]


class DeclaredLike(Declared):
    """A switch of the script with the name of a technique. It is expected to behave as that technique does."""

    like: ClassVar[Technique]

    def label(self, choice: Choice) -> str:
        """The technique's label, where the technique has this choice."""
        return self.like.label(choice) if _has(self.like, choice) else super().label(choice)

    def arithmetic(self, choice: Choice) -> str:
        """The technique's."""
        return self.like.arithmetic(self._as_known(choice))

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """The technique's."""
        return self.like.expectation(self._as_known(choice), tuple(map(self._as_known, choices)))

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """The technique's, where that has all of these choices."""
        return self.like.least_memory(choices) if all(_has(self.like, choice) for choice in choices) else None

    def _as_known(self, choice: Choice) -> Choice:
        """The technique's choice that `choice` stands for: the same, or for a word that only the script knows the likeliest one."""
        if choice != self.off and not _has(self.like, choice):
            return self.like.likely[0] if self.like.likely else self.like.off
        return self.like.off if choice == self.off else choice


def declare(name: str, choices: Sequence[Choice], like: Technique | None) -> Declared:
    """A switch of the script; the first of `choices` is what the script does today.

    Args:
        like: the technique of the same name; None where there is none.
    """
    own: dict[str, Any] = {"name": name, "choices": tuple(choices), "off": choices[0], "__doc__": Declared.__doc__}
    if like is None:
        return type("Declared", (Declared,), own)()  # type: ignore[no-any-return]
    off = like.off if like.off in choices else choices[0]
    others = tuple(choice for choice in choices if choice != off)
    own |= {
        "like": like,
        "off": off,
        "likely": tuple(choice for choice in like.likely if choice in others) or others[:1],
        "ordered": like.ordered and all(_has(like, choice) for choice in choices),
        "changes_learning": like.changes_learning,
    }
    return type("DeclaredLike", (DeclaredLike,), own)()  # type: ignore[no-any-return]


def _has(technique: Technique, choice: Choice) -> bool:
    try:
        return technique.validate(choice) == choice
    except ValueError:
        return False


@cache
def find_techniques() -> Techniques:
    """The installed techniques, by phase, `order` and name. Only entry points call this; all other code is passed techniques.

    Raises:
        ConfigError: a technique of another package cannot be used.
    """
    taken = dict.fromkeys(BATCH_KEYS, "autotune, for the batch")
    found = plugins.find_plugins(__name__, Technique, GROUP, _REQUIRED, taken)  # type: ignore[type-abstract]
    return Techniques(sorted(found.values(), key=lambda technique: (technique.phase, technique.order, technique.name)))
