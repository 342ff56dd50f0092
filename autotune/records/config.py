"""A config: one choice for each technique. Plain frozen data; what the keys mean is `autotune.techniques`' business."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Choice = int | str | bool


@dataclass(frozen=True)
class Config:
    """One point of the search space.

    Attributes:
        choices: (technique name, choice) pairs, in the registry's order, every technique present. Build one with
            `autotune.techniques.complete(mapping)`, which fills in what is missing and rejects what is unknown.
    """

    choices: tuple[tuple[str, Choice], ...]

    def __getitem__(self, name: str) -> Choice:
        for key, choice in self.choices:
            if key == name:
                return choice
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.choices)

    @property
    def batch_size(self) -> int:
        """Samples per micro step and device."""
        return int(self["batch_size"])

    @property
    def accumulation_steps(self) -> int:
        """Micro steps per optimizer step."""
        return int(self["accumulation_steps"])

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step on this device."""
        return self.batch_size * self.accumulation_steps

    def replace(self, **changes: Choice) -> Config:
        """The same config with other choices.

        Raises:
            KeyError: a name is not a key of this config.
        """
        unknown = changes.keys() - {key for key, _ in self.choices}
        if unknown:
            raise KeyError(sorted(unknown)[0])
        return Config(tuple((key, changes.get(key, choice)) for key, choice in self.choices))

    def as_dict(self) -> dict[str, Choice]:
        """The config as a plain dict, ready for JSON: the recommended config in its public form."""
        return dict(self.choices)

    def differences(self, other: Config | Mapping[str, Choice]) -> dict[str, Choice]:
        """This config's choices that are not `other`'s."""
        return {key: choice for key, choice in self.choices if choice != other[key]}
