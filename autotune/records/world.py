"""The processes that train one model together, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.records.formats import Record


@dataclass(frozen=True, kw_only=True)
class World(Record):
    """One process's place among those that train one model together.

    Attributes:
        size: how many processes there are.
        rank: the number of this one, counted from 0.
        data_parallel: how many of them share the samples of an optimizer step, each with samples of its own: all of them
            unless stated, which 0 stands for. The others compute on the same samples.

    Raises:
        ConfigError: so many processes cannot share the samples evenly.
    """

    size: int = 1
    rank: int = 0
    data_parallel: int = 0

    def __post_init__(self) -> None:
        if not self.data_parallel:
            object.__setattr__(self, "data_parallel", self.size)
        if self.size % self.data_parallel:
            raise ConfigError(
                f"a world of {self.size} processes does not divide into {self.data_parallel} that share the samples"
            )

    @property
    def group(self) -> int:
        """The number of the samples' share that this process takes, counted from 0."""
        return self.rank * self.data_parallel // self.size


ALONE = World()  # one process, as most train
