"""What a process of a probe is given: a config, the processes that share its samples, how they cut an optimizer step, and the settings of
the measurement. Plain frozen data; the rule about a global batch stands here alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autotune.errors import ConfigError
from autotune.records.formats import Record

BATCH_SIZE = "batch_size"
ACCUMULATION = "accumulation_steps"
BATCH_KEYS = (BATCH_SIZE, ACCUMULATION)  # the first keys of every config; all others name techniques
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class World(Record):
    """One process's place among those that train one model together.

    Attributes:
        size: how many processes there are.
        rank: the number of this process, counted from 0.
        data_parallel: into how many parts the processes share the samples of an optimizer step. 0, the default, stands for
            one part a process; where there are fewer parts, several processes compute on the same samples.

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
                f"a world of {self.size} processes does not divide into {self.data_parallel} that share the samples; give a divisor of "
                f"{self.size} as data_parallel"
            )

    @property
    def group(self) -> int:
        """Which share of the samples this process takes, counted from 0."""
        return self.rank * self.data_parallel // self.size


ALONE = World()  # one process, as most train


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step is cut: samples per micro step of one process, micro steps, and the processes that share its samples."""

    batch_size: int
    accumulation_steps: int = 1
    world: World = ALONE

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step, of all processes together."""
        return self.batch_size * self.accumulation_steps * self.world.data_parallel

    def keeps(self, global_batch: int | None) -> bool:
        """Whether an optimizer step takes exactly the global batch; True for any plan where no global batch is given."""
        return global_batch is None or self.samples_per_step == global_batch

    @staticmethod
    def keeping(global_batch: int, batch_size: int, world: World = ALONE) -> BatchPlan:
        """The plan that keeps a global batch with micro batches of `batch_size`.

        Raises:
            ConfigError: `batch_size` does not divide a process's share of the global batch, or there is no even share.
        """
        share = share_of(global_batch, world)
        steps, rest = divmod(share, batch_size)
        if not rest:
            return BatchPlan(batch_size, steps, world)
        near = min(divisors(share), key=lambda size: abs(size - batch_size))
        whose = "" if share == global_batch else f"each process's {share} of "
        raise ConfigError(
            f"{BATCH_SIZE} {batch_size} does not divide {whose}the global batch {global_batch}, so accumulation cannot "
            f"keep it; the nearest {BATCH_SIZE} that does is {near}"
        )


def describe_batch(config: Mapping[str, Any]) -> str:
    """`batch 16 x3`: 16 samples a micro batch, accumulated over three."""
    steps = config.get(ACCUMULATION, 1)
    return f"batch {config[BATCH_SIZE]}" + ("" if steps == 1 else f" x{steps}")


def share_of(global_batch: int, world: World) -> int:
    """One process's samples of an optimizer step.

    Raises:
        ConfigError: the processes cannot share the global batch evenly.
    """
    share, rest = divmod(global_batch, world.data_parallel)
    if rest:
        raise ConfigError(
            f"a global batch of {global_batch} cannot be shared by {world.data_parallel} processes; "
            f"give --global-batch {(share or 1) * world.data_parallel}"
        )
    return share


def largest_batch_size(most: int, global_batch: int | None, world: World = ALONE) -> int:
    """The largest micro batch of at most `most` samples; where there is a global batch, the largest that keeps it."""
    return (
        most if global_batch is None else max(size for size in divisors(share_of(global_batch, world)) if size <= most)
    )


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


Choice = int | str | bool


@dataclass(frozen=True)
class Config(Mapping[str, Choice]):
    """One point of the search space, as a mapping from keys to choices.

    Attributes:
        choices: (key, choice) pairs: `batch_size` and `accumulation_steps`, then every technique in the order of the `Techniques`,
            whose `complete(mapping)` builds a config: it fills in missing keys and rejects unknown ones.
    """

    choices: tuple[tuple[str, Choice], ...]

    @cached_property
    def _choice_of(self) -> dict[str, Choice]:  # a search asks a million times
        return dict(self.choices)

    @cached_property
    def _hash(self) -> int:
        return hash(self.choices)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Config], tuple[object, ...]]:
        return Config, (self.choices,)  # another process hashes words otherwise

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
        """Samples per optimizer step on this device; for a whole world ask `plan_in(world).samples_per_step`."""
        return self.plan_in(ALONE).samples_per_step

    def halved(self, global_batch: int | None, world: World = ALONE) -> Config:
        """The same config with half the micro batch, or the next size below that which keeps the global batch. It takes two samples
        at least.
        """
        half = largest_batch_size(self.batch_size // 2, global_batch, world)
        steps = self.accumulation_steps
        if global_batch is not None:
            steps = BatchPlan.keeping(global_batch, half, world).accumulation_steps
        return self.replace(**{BATCH_SIZE: half, ACCUMULATION: steps})

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

    def has_techniques_of(self, other: Config) -> bool:
        """Whether the two differ in nothing but their batch."""
        return self.differences(other).keys() <= {*BATCH_KEYS}


@dataclass(frozen=True, kw_only=True)
class ShapeGrowth:
    """What a training keeps for each new shape of a micro batch.

    Attributes:
        bytes_per_shape: 0 where it keeps nothing.
        most_bytes: for all shapes; None where it is not known that it ends.
    """

    bytes_per_shape: float
    most_bytes: float | None = None

    @staticmethod
    def typical(told: Iterable[ShapeGrowth]) -> ShapeGrowth | None:
        """The median of what probes told: one that is far off says little, once there are three. None where none told anything."""
        ordered = sorted(told, key=lambda growth: growth.bytes_per_shape)
        return ordered[len(ordered) // 2] if ordered else None


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(Record):
    """One rule of warming up, timing and stopping for all probes of a study, which travels to the probe's process as JSON.

    Attributes:
        memory_limit_bytes: allocations beyond it fail; None for no limit.
        interval: timing stops when the 95 % interval of the throughput is within this share of it, to either side.
        max_timed_s: timing stops after so long, even if the interval is still too wide.
        min_timed_s: timing goes on for at least so long.
        max_warmup_s: warming up stops after so long, once the minimum of steps is done.
        slowest_samples_per_s: a config that is slower than this while it warms up is not worth timing: its warm-up steps
            are its measurement.
        front: peak bytes and samples/s of configs measured before. Timing stops when the interval says that one of them is
            faster in no more memory, and does not begin where even the fastest warm-up step is far slower than one.
        phases: whether the time of a step is split by phase. A short step is taken once more for that.
        known_peak_bytes: what an earlier process of the config held at its peak. The largest batches are then not trained again,
            and the peak is at least that; 0 where it is not known.
        known_long_run_peak_bytes: what a long training holds at its peak, as an earlier process of the config told that saw memory grow.
            It is not asked again what grows; 0 where it is not known.
        shapes_recur: whether training meets a few shapes of batches again and again, as earlier processes of the task have seen; None
            where none has, and then the process goes by what it sees itself.
        num_shapes: different shapes of micro batches that a whole training is expected to meet, as earlier processes with micro batches
            of this size have told. Nothing is loaded to learn that, then; 0 where it is not known.
        shape_growth: what earlier processes have told that keep as much for a shape. Nothing is trained to learn it, then; None where it is
            not known.
        num_samples: timing ends once so many samples were taken, and not by the interval: with six blocks at least, and after twice
            `max_timed_s` at the latest. Probes of one seed take the same samples in the same order. 0 for the rule.
        num_steps: exactly so many optimizer steps are timed, without the stopping rule (`verify`); 0 for the rule.
        seed: seed of torch, numpy and random, set before the model is built.
        timeout_s: the probe is killed after so long.
        world: the processes that train the config together.
    """

    memory_limit_bytes: int | None
    interval: float = 0.02
    max_timed_s: float = 3.0
    min_timed_s: float = 0.0
    max_warmup_s: float = 5.0
    slowest_samples_per_s: float = 0.0
    front: tuple[tuple[float, float], ...] = ()
    phases: bool = True
    known_peak_bytes: int = 0
    known_long_run_peak_bytes: int = 0
    shapes_recur: bool | None = None
    num_shapes: float = 0.0
    shape_growth: ShapeGrowth | None = None
    num_samples: int = 0
    num_steps: int = 0
    seed: int = 0
    timeout_s: float = 60.0
    world: World = ALONE

    def replace(self, **changes: Any) -> ProbeSettings:
        """The same settings with changes."""
        return replace(self, **changes)
