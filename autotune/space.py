"""The search space: which configs may be probed, and how they look to Optuna."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune import techniques
from autotune.errors import ConfigError
from autotune.records.config import Choice, Config
from autotune.records.inspection import Inspection

ACCUMULATION = "accumulation_steps"


class SpaceExhausted(Exception):
    """Every config of the space is measured or ruled out."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The configs that may be probed.

    Attributes:
        choices: per technique the choices that are searched, in order; one choice means fixed. Accumulation is not among them
            when there is a global batch: it follows from the batch size.
        distributions: the techniques with a choice to make, as Optuna sees them. They cover every supported choice, also those
            left out of this search, because Optuna does not let a categorical distribution change within a study.
        baseline: always part of the space.
        accumulations: the accumulation steps that may be used.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    distributions: Mapping[str, BaseDistribution]
    baseline: Config
    global_batch: int | None
    accumulations: frozenset[Choice]

    def complete(self, choices: Mapping[str, Choice]) -> Config:
        """A full config: what is missing is as fixed, or else as in the baseline; accumulation follows."""
        fixed = {name: options[0] for name, options in self.choices.items() if len(options) == 1}
        full = {**self.baseline.as_dict(), **fixed, **choices}
        if self.global_batch is not None:
            full[ACCUMULATION] = self.global_batch // int(full["batch_size"])
        return Config(tuple(full.items()))

    def contains(self, config: Config) -> bool:
        """Whether a config belongs to the space."""
        if config == self.baseline:
            return True
        return (
            all(config[name] in choices for name, choices in self.choices.items())
            and config[ACCUMULATION] in self.accumulations
            and (self.global_batch is None or config.samples_per_step == self.global_batch)
            and not any(config[name] != t.off and t.is_redundant(config) for name, t in techniques.REGISTRY.items())
        )

    def __iter__(self) -> Iterator[Config]:
        for values in itertools.product(*self.choices.values()):
            config = self.complete(dict(zip(self.choices, values, strict=True)))
            if self.contains(config):
                yield config

    def tracing(self) -> Iterator[Config]:
        """Configs that between them show a tracer everything: the baseline, each combination of the techniques of a phase
        that shapes memory, and each batch size.
        """
        yield self.baseline
        phases = [phase for phase in techniques.Phase if phase.shapes_memory]
        together = [[name for name in self.choices if techniques.REGISTRY[name].phase is phase] for phase in phases]
        for names in (*together, ["batch_size"]):
            for values in itertools.product(*(self.choices[name] for name in names)):
                yield self.complete(dict(zip(names, values, strict=True)))

    @property
    def num_combinations(self) -> int:
        """Size of the product of choices: an upper bound on the number of configs."""
        return math.prod(len(choices) for choices in self.choices.values())

    def without(self, name: str, dropped: set[Choice]) -> Space:
        """The space without some choices of a technique."""
        kept = tuple(choice for choice in self.choices[name] if choice not in dropped) or (self.baseline[name],)
        return replace(self, choices={**self.choices, name: kept})

    def with_smaller_baseline(self) -> Space | None:
        """The space with the baseline's batch halved (or the next divisor of the global batch below), and with that batch for
        all other configs, too; None at one.
        """
        half = self.baseline.batch_size // 2
        if half < 1:
            return None
        changes: dict[str, Choice] = {"batch_size": half}
        if self.global_batch is not None:
            half = max(divisor for divisor in techniques.divisors(self.global_batch) if divisor <= half)
            changes = {"batch_size": half, ACCUMULATION: self.global_batch // half}
        sizes = self.choices["batch_size"]
        choices = {**self.choices, "batch_size": tuple(sorted({half, *sizes}))} if len(sizes) > 1 else self.choices
        baseline = self.baseline.replace(**changes)
        return replace(
            self,
            baseline=baseline,
            choices=choices,
            distributions={**self.distributions, **distributions_of({"batch_size": choices["batch_size"]})},
            accumulations=self.accumulations | {baseline.accumulation_steps},
        )

    def params(self, config: Config) -> dict[str, Any]:
        """The config as Optuna's trial parameters."""
        return {name: config[name] for name in self.distributions}

    def nearest(self, proposal: Mapping[str, Any], admissible: Callable[[Config], bool]) -> Config:
        """The admissible config nearest to a proposal: snapped to the choices, then outwards one step at a time.

        Raises:
            SpaceExhausted: there is none.
        """
        snapped = {
            name: _snap(proposal.get(name, self.baseline[name]), choices) for name, choices in self.choices.items()
        }
        start = self.complete(snapped)
        seen, queue = {start}, deque([start])
        while queue:
            config = queue.popleft()
            if self.contains(config) and admissible(config):
                return config
            for neighbour in self.neighbours(config):
                if neighbour not in seen:
                    seen.add(neighbour)
                    queue.append(neighbour)
        raise SpaceExhausted

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Configs one step away: the next choice up or down on a scale, any other choice of a category."""
        for name, choices in self.choices.items():
            if config[name] in choices and techniques.REGISTRY[name].ordered:
                index = choices.index(config[name])
                near = choices[max(index - 1, 0) : index] + choices[index + 1 : index + 2]
            else:
                near = tuple(choice for choice in choices if choice != config[name])
            yield from (self.complete({**config.as_dict(), name: choice}) for choice in near)


def build_space(
    inspection: Inspection, *, fix: Mapping[str, Any], include: tuple[str, ...], exclude: tuple[str, ...]
) -> tuple[Space, list[str]]:
    """The space of a task on a device, with what the user fixed, included and excluded, and notes on what was left out.

    Raises:
        ConfigError: an unknown technique or choice, a choice that is not supported here, or contradicting options.
    """
    for name in (*fix, *include, *exclude):
        techniques.known(name)
    if twice := set(exclude) & {*fix, *include}:
        raise ConfigError(f"{min(twice)!r} is both excluded and fixed or included; leave one of the options out")
    fixed = {name: techniques.validate(name, choice) for name, choice in fix.items()}
    baseline = techniques.complete(inspection.baseline, global_batch=inspection.global_batch)
    derived = inspection.global_batch is not None
    choices: dict[str, tuple[Choice, ...]] = {}
    supported: dict[str, tuple[Choice, ...]] = {}
    accumulations: frozenset[Choice] = frozenset()
    notes: list[str] = []
    for name, technique in techniques.REGISTRY.items():
        support = inspection.support[name]
        optional = support.optional if name in include else ()
        everything = tuple(dict.fromkeys((*support.choices, *support.optional, baseline[name])))
        searched = tuple(dict.fromkeys((*support.choices, *optional, baseline[name])))
        if technique.ordered:
            everything, searched = tuple(sorted(everything)), tuple(sorted(searched))
        if name in fixed and name == "batch_size":
            searched = (_possible_batch(int(fixed[name]), inspection),)
        elif name in fixed:
            searched = (
                _supported(name, fixed[name], everything, support.reason, derived=name == ACCUMULATION and derived),
            )
        elif name in exclude:
            searched = (baseline[name],)
        elif support.optional and name not in include and support.reason:
            notes.append(f"{name}: {support.reason}; --include {name} searches it all the same")
        if name == ACCUMULATION and derived:
            accumulations = frozenset(searched)
            continue
        choices[name] = searched
        if name == ACCUMULATION:
            accumulations = frozenset(searched)
        if len(everything) > 1 and len(searched) > 1:
            supported[name] = everything
    if inspection.global_batch is not None and "batch_size" in fixed:
        _require_accumulation(int(fixed["batch_size"]), accumulations, inspection)
    space = Space(
        choices=choices,
        distributions=distributions_of(supported),
        baseline=baseline,
        global_batch=inspection.global_batch,
        accumulations=accumulations,
    )
    return space, notes


def _possible_batch(batch_size: int, inspection: Inspection) -> int:
    """Any batch size may be fixed that the global batch and the dataset allow, also between the searched steps."""
    techniques.complete({"batch_size": batch_size}, global_batch=inspection.global_batch)
    dataset_size = inspection.facts.get("dataset_size")
    if dataset_size is not None and batch_size > dataset_size:
        raise ConfigError(
            f"batch_size={batch_size} is more than the training set's {dataset_size} samples; fix a smaller one"
        )
    return batch_size


def _require_accumulation(batch_size: int, accumulations: frozenset[Choice], inspection: Inspection) -> None:
    """A fixed batch takes as many micro steps as the global batch has of it."""
    assert inspection.global_batch is not None
    steps = inspection.global_batch // batch_size
    if steps not in accumulations:
        raise ConfigError(
            f"batch_size={batch_size} takes accumulation_steps={steps}, which is not searched: "
            f"{inspection.support[ACCUMULATION].reason or 'it is fixed to another'}; fix a larger batch_size, or add "
            f"--include {ACCUMULATION}"
        )


def _supported(name: str, choice: Choice, supported: tuple[Choice, ...], reason: str, *, derived: bool) -> Choice:
    if choice not in supported:
        because = f": {reason}" if reason else ""
        what = "follows from the global batch and " if derived else ""
        listed = ", ".join(str(option) for option in supported[:20])
        raise ConfigError(
            f"{name}={choice} {what}is not supported for this task on this device{because}; supported: {listed}"
        )
    return choice


def distributions_of(choices: Mapping[str, tuple[Choice, ...]]) -> dict[str, BaseDistribution]:
    """How Optuna sees the techniques that leave a choice."""
    found: dict[str, BaseDistribution] = {}
    for name, options in choices.items():
        if len(options) > 1 and techniques.REGISTRY[name].ordered:
            low, high = int(options[0]), int(options[-1])
            found[name] = IntDistribution(low, high, log=low > 0)
        elif len(options) > 1:
            found[name] = CategoricalDistribution(options)
    return found


def _snap(value: Any, choices: tuple[Choice, ...]) -> Choice:
    if value in choices or isinstance(value, str | bool):
        return value if value in choices else choices[0]
    return min(choices, key=lambda choice: abs(math.log1p(int(choice)) - math.log1p(value)))
