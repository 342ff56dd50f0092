"""Every technique, by name, and configs made of them.

A technique is one file of this package, found by being there. Other packages add theirs through the entry point group
`autotune.techniques`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.records.batch_plan import (
    ACCUMULATION,
    BATCH_KEYS,
    BATCH_SIZE,
    DEFAULT_BATCH_SIZE,
    BatchPlan,
    largest_batch_size,
)
from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.records.world import ALONE, World
from autotune.techniques.base import (
    MANTISSA_BITS,
    REACHES_INTO_STEP,
    Phase,
    Recomputation,
    Switch,
    Technique,
    UnsupportedError,
    plain_label,
    whole_number,
)
from autotune.techniques.build import Build, Setting
from autotune.techniques.declared import Declared, declare
from autotune.techniques.discovery import Registry
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.partition import Partition
from autotune.units import plural

if TYPE_CHECKING:
    from autotune.task import Task

__all__ = [
    "REACHES_INTO_STEP",
    "REGISTRY",
    "Build",
    "Declared",
    "Expectation",
    "Factor",
    "Phase",
    "Recomputation",
    "Setting",
    "Support",
    "Switch",
    "Technique",
    "UnsupportedError",
    "arithmetic_of",
    "complete",
    "declare",
    "is_ordered",
    "keep_settings",
    "known",
    "label_of",
    "narrow_task",
    "setup_s",
    "trained",
    "trained_by",
    "untraceable",
    "validate",
    "with_baseline_batch",
]

REGISTRY = Registry()


def known(name: str) -> str:
    """The name, if it is a key of a config: a technique's, or one of the batch's.

    Raises:
        ConfigError: it is not; the nearest names are offered.
    """
    names = (*BATCH_KEYS, *REGISTRY)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(f"{name!r} is not a technique{meant}; there are: {', '.join(names)}")
    return name


def acts_against_shortage(name: str) -> bool:
    """Whether a technique's optional choices are searched where plain training ran out of memory."""
    return name in REGISTRY and REGISTRY[name].against_shortage


def is_ordered(name: str) -> bool:
    """Whether the choices of a key of a config are numbers on a scale."""
    return name in BATCH_KEYS or REGISTRY[name].ordered


def validate(name: str, choice: Any) -> Choice:
    """Return `choice` if it is one that the technique, or the batch, knows.

    Raises:
        ConfigError: unknown name, or not a choice of it.
    """
    try:
        return whole_number(choice, 1) if known(name) in BATCH_KEYS else REGISTRY[name].validate(choice)
    except ValueError as error:
        raise ConfigError(f"{choice!r} is not a choice of {name}: {error}") from None


def complete(choices: Mapping[str, Any], *, global_batch: int | None = None, world: World = ALONE) -> Config:
    """A full config from a partial config dict: what is missing is off, accumulation follows from the global batch.

    Args:
        world: the processes that train together, which share the global batch.

    Raises:
        ConfigError: an unknown key, an invalid choice, or a batch that does not keep the global batch.
    """
    given = {name: validate(name, choice) for name, choice in choices.items()}
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
    switched = {name: given.get(name, technique.off) for name, technique in REGISTRY.items()}
    return Config((*batch.items(), *switched.items()))


def trained(choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """What of a config, complete or not, says what is trained. Configs that differ in it are never compared."""
    return {t.name: choices.get(t.name, t.off) for t in REGISTRY.values() if isinstance(t, Partition)}


def trained_by(task: Task, choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """The same under the names that the task has for it."""
    named = {t.name: t for t in REGISTRY.values() if isinstance(t, Partition)}
    return {name: named[name].named(task, choice) for name, choice in trained(choices).items()}


def narrow_task(task: Task, choices: Mapping[str, Choice]) -> Task:
    """The task that trains what a config says, in which nothing else is left to choose of that.

    Raises:
        ConfigError: the task has no such choice.
    """
    for technique in REGISTRY.values():
        choice = choices.get(technique.name, technique.off)
        if isinstance(technique, Partition) and choice != technique.off:
            task = technique.narrow(task, choice)
    return task


def arithmetic_of(config: Config) -> str:
    """The type in which a config computes matrix products and convolutions: the shortest that one of its techniques chooses."""
    types = (technique.arithmetic(config[technique.name]) for technique in REGISTRY.values())
    return max(types, key=list(MANTISSA_BITS).index)


def untraceable(config: Config, device_kind: str) -> str:
    """Why the memory of `config` cannot be traced on a kind of device (`Technique.untraceable`); empty where it can."""
    on = (t for t in REGISTRY.values() if config[t.name] != t.off)
    return "; ".join(filter(None, (t.untraceable(config[t.name], device_kind) for t in on)))


def setup_s(config: Config) -> float:
    """Seconds before the first step that the techniques of `config` are expected to need beyond plain training."""
    on = [(t, choice) for t in REGISTRY.values() if (choice := config[t.name]) != t.off]
    return sum(technique.expectation(choice, (technique.off, choice)).setup_s for technique, choice in on)


def allocator_settings(config: Config) -> str:
    """What the techniques of `config` add to the settings of torch's CUDA allocator; empty for nothing."""
    return ",".join(
        filter(None, (technique.allocator_settings(config[technique.name]) for technique in REGISTRY.values()))
    )


def all_allocator_settings() -> tuple[str, ...]:
    """What any one choice adds to the settings of torch's CUDA allocator, nothing first."""
    added = (technique.allocator_settings(choice) for technique in REGISTRY.values() for choice in technique.choices)
    return tuple(dict.fromkeys(("", *added)))


def with_baseline_batch(choices: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """A partial config dict with the batch size of the task's baseline where it names none."""
    stated = {BATCH_SIZE: baseline[BATCH_SIZE]} if baseline and BATCH_SIZE in baseline else {}
    return {**stated, **choices}


def label_of(name: str, choice: Choice) -> str:
    """A choice of any key of a config, in a word or two; also of a technique that is not installed here."""
    if name == BATCH_SIZE:
        return f"batch {choice}"
    return REGISTRY[name].label(choice) if name in REGISTRY else plain_label(name, choice)


@contextmanager
def keep_settings() -> Iterator[None]:
    """Put the process-wide settings that techniques change back at the end."""
    with ExitStack() as stack:
        for technique in REGISTRY.values():
            stack.enter_context(technique.restored())
        yield
