"""Techniques as a value: those that are installed, or the switches of a command, with configs made of them.

A technique is one file of this package, found by being there. Other packages add theirs through the entry point group
`autotune.techniques`. Whoever needs techniques is passed them: entry points alone ask for the installed ones.
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
    """Techniques by name, in the order in which they are applied and listed. It does not change."""

    def __init__(self, techniques: Iterable[Technique]) -> None:
        self._by_name = {technique.name: technique for technique in techniques}

    def __getitem__(self, name: str) -> Technique:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def known(self, name: str) -> str:
        """The name, if it is a key of a config: a technique's, or one of the batch's.

        Raises:
            ConfigError: it is not; the nearest names are offered.
        """
        names = (*BATCH_KEYS, *self)
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            meant = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise ConfigError(f"{name!r} is not a technique{meant}; there are: {', '.join(names)}")
        return name

    def is_ordered(self, name: str) -> bool:
        """Whether the choices of a key of a config are numbers on a scale."""
        return name in BATCH_KEYS or self[name].ordered

    def is_off(self, name: str, choice: Choice) -> bool:
        """Whether `choice` is plain training; False for the batch, and for a technique that is not among these."""
        return name in self and choice == self[name].off

    def validate(self, name: str, choice: Any) -> Choice:
        """Return `choice` if it is one that the technique, or the batch, knows.

        Raises:
            ConfigError: unknown name, or not a choice of it.
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
        """A full config from a partial one: what is missing is off, accumulation follows from the global batch.

        Args:
            world: the processes that train together, which share the global batch.
            baseline: the task's, as far as it is stated: its batch size stands where `choices` name none.

        Raises:
            ConfigError: an unknown key, an invalid choice, or a batch that does not keep the global batch.
        """
        stated = {BATCH_SIZE: baseline[BATCH_SIZE]} if baseline and BATCH_SIZE in baseline else {}
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
        """The choices of `config` that are not off, of the techniques of some phases; of all where none is named."""
        return tuple(
            (name, config[name])
            for name, technique in self.items()
            if config[name] != technique.off and (technique.phase in phases or not phases)
        )

    def trained(self, choices: Mapping[str, Choice]) -> dict[str, Choice]:
        """What of a config, complete or not, says what is trained. Configs that differ in it are never compared."""
        return {name: choices.get(name, technique.off) for name, technique in self._partitions.items()}

    def trained_by(self, task: Task, choices: Mapping[str, Choice]) -> dict[str, Choice]:
        """The same under the names that the task has for it."""
        return {name: self._partitions[name].named(task, choice) for name, choice in self.trained(choices).items()}

    def narrow_task(self, task: Task, choices: Mapping[str, Choice]) -> Task:
        """The task that trains what a config says, in which nothing else is left to choose of that.

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
        """The type in which a config computes matrix products and convolutions: the shortest that one of its techniques chooses."""
        types = (technique.arithmetic(config[name]) for name, technique in self.items())
        return max(types, key=list(MANTISSA_BITS).index)

    def untraceable(self, config: Config, device_kind: str) -> str:
        """Why the memory of `config` cannot be traced on a kind of device (`Technique.untraceable`); empty where it can."""
        reasons = (self[name].untraceable(choice, device_kind) for name, choice in self.switched_on(config))
        return "; ".join(filter(None, reasons))

    def setup_s(self, config: Config) -> float:
        """Seconds before the first step that the techniques of `config` are expected to need beyond plain training."""
        on = ((self[name], choice) for name, choice in self.switched_on(config))
        return sum(technique.expectation(choice, (technique.off, choice)).setup_s for technique, choice in on)

    def allocator_settings(self, config: Config) -> str:
        """What the techniques of `config` add to the settings of torch's CUDA allocator; empty for nothing."""
        return ",".join(filter(None, (t.allocator_settings(config[name]) for name, t in self.items())))

    def all_allocator_settings(self) -> tuple[str, ...]:
        """What any one choice adds to the settings of torch's CUDA allocator, nothing first."""
        added = (technique.allocator_settings(choice) for technique in self.values() for choice in technique.choices)
        return tuple(dict.fromkeys(("", *added)))

    @contextmanager
    def keep_settings(self) -> Iterator[None]:
        """Put the process-wide settings that techniques change back at the end."""
        with ExitStack() as stack:
            for technique in self.values():
                stack.enter_context(technique.restored())
            yield

    def label(self, name: str, choice: Choice) -> str:
        """A choice of any key of a config, in a word or two; also of a technique that is not among these."""
        if name == BATCH_SIZE:
            return f"batch {choice}"
        return self[name].label(choice) if name in self else plain_label(name, choice)

    def describe(self, config: Mapping[str, Choice], baseline: Mapping[str, Choice] | None = None) -> str:
        """`batch 16 x3, bf16, 2 checkpoint segments, fused`; with a baseline only what differs from it.

        `x3` stands for accumulation over three micro batches. Without a baseline whatever is off is left out.
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
    """One switch of the user's own training script, which a search by command sets by the words of its command line.

    The script switches it, so it applies itself to nothing, and no gradients are there to be compared.
    """

    summary: ClassVar[str] = "a switch of the training script"
    applies: ClassVar[str] = "searches by command"
    phase: ClassVar[Phase] = Phase.MODEL
    exact: ClassVar[bool] = False

    def support(self, setting: Setting) -> Support:
        """All choices: the script knows them."""
        return Support(choices=self.choices)

    def apply(self, build: Build, choice: Choice) -> None:
        """Refuse: the script alone can.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"{self.name} is a switch of a training script: run the script's own command")

    def validate(self, choice: Any) -> Choice:
        """One of those that the command line declares."""
        if choice not in self.choices:
            raise ValueError(f"expected one of {', '.join(map(str, self.choices))}")
        return self.choices[self.choices.index(choice)]


class DeclaredLike(Declared):
    """A switch with the name of a technique: what is known of that technique is expected of it."""

    like: ClassVar[Technique]

    def label(self, choice: Choice) -> str:
        """The technique's own where it has that choice."""
        return self.like.label(choice) if _has(self.like, choice) else super().label(choice)

    def arithmetic(self, choice: Choice) -> str:
        """As of the technique."""
        return self.like.arithmetic(self._as_known(choice))

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """As of the technique."""
        return self.like.expectation(self._as_known(choice), tuple(map(self._as_known, choices)))

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """As of the technique, where it has all of these choices."""
        return self.like.least_memory(choices) if all(_has(self.like, choice) for choice in choices) else None

    def _as_known(self, choice: Choice) -> Choice:
        """The technique's choice that it stands for: itself, or what usually wins for a word that only the script knows."""
        if choice != self.off and not _has(self.like, choice):
            return self.like.likely[0] if self.like.likely else self.like.off
        return self.like.off if choice == self.off else choice


def declare(name: str, choices: Sequence[Choice], like: Technique | None) -> Declared:
    """A switch of the script, the first of whose `choices` is what the script does today.

    Args:
        like: the technique of that name; None for a name of the user's own.
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
    """Those that are installed, in the order of phase, `order` and name. For entry points; everybody else is passed them.

    Raises:
        ConfigError: another package's cannot be used.
    """
    taken = dict.fromkeys(BATCH_KEYS, "autotune, for the batch")
    found = plugins.find_plugins(__name__, Technique, GROUP, _REQUIRED, taken)  # type: ignore[type-abstract]
    return Techniques(sorted(found.values(), key=lambda technique: (technique.phase, technique.order, technique.name)))
