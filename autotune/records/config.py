"""A config: the batch plan and one choice for each technique, as plain frozen data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autotune.records.batch_plan import ACCUMULATION, BATCH_SIZE, BatchPlan
from autotune.records.world import ALONE, World

Choice = int | str | bool


@dataclass(frozen=True)
class Config(Mapping[str, Choice]):
    """One point of the search space, as a mapping from keys to choices.

    Attributes:
        choices: (key, choice) pairs: `batch_size` and `accumulation_steps`, then every technique in the order of the `Techniques`,
            whose `complete(mapping)` builds one: it fills in what is missing and rejects what is unknown.
    """

    choices: tuple[tuple[str, Choice], ...]

    @cached_property
    def _choice_of(self) -> dict[str, Choice]:  # a search asks a million times
        return dict(self.choices)

    def __getitem__(self, name: str) -> Choice:
        return self._choice_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choice_of)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def batch_size(self) -> int:
        """Samples per micro step and device."""
        return int(self[BATCH_SIZE])

    @property
    def accumulation_steps(self) -> int:
        """Micro steps per optimizer step."""
        return int(self[ACCUMULATION])

    def plan_in(self, world: World) -> BatchPlan:
        """How the processes of a world cut an optimizer step."""
        return BatchPlan(self.batch_size, self.accumulation_steps, world)

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step on this device; those of a whole world: `plan_in(world).samples_per_step`."""
        return self.plan_in(ALONE).samples_per_step

    def replace(self, **changes: Choice) -> Config:
        """The same config with other choices.

        Raises:
            KeyError: a name is not a key of this config.
        """
        if unknown := changes.keys() - self._choice_of.keys():
            raise KeyError(min(unknown))
        return Config(tuple((key, changes.get(key, choice)) for key, choice in self.choices))

    def as_dict(self) -> dict[str, Choice]:
        """The config as a plain dict, ready for JSON: the recommended config in its public form."""
        return dict(self._choice_of)

    def differences(self, other: Config | Mapping[str, Choice]) -> dict[str, Choice]:
        """This config's choices that differ from `other`'s."""
        return {key: choice for key, choice in self.choices if choice != other[key]}
