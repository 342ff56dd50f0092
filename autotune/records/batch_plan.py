"""How the samples of one optimizer step are cut into micro batches. The rule about a global batch stands here alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import ConfigError
from autotune.records.world import ALONE, World

BATCH_SIZE = "batch_size"
ACCUMULATION = "accumulation_steps"
BATCH_KEYS = (BATCH_SIZE, ACCUMULATION)  # the first keys of every config; all others name techniques
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step is cut: samples per micro step of one process, micro steps, and the processes that share its samples."""

    batch_size: int
    accumulation_steps: int = 1
    world: World = ALONE

    @property
    def samples_per_process(self) -> int:
        """Samples per optimizer step of one process."""
        return self.batch_size * self.accumulation_steps

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step, of all processes together."""
        return self.samples_per_process * self.world.data_parallel

    def keeps(self, global_batch: int | None) -> bool:
        """Whether an optimizer step takes exactly the global batch; any plan does where none is given."""
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
    """The largest micro batch of at most `most` samples that keeps the global batch, where there is one."""
    return (
        most if global_batch is None else max(size for size in divisors(share_of(global_batch, world)) if size <= most)
    )


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
