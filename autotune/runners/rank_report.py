"""What one process of a command tells of its steps, as plain data in a file of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.records.formats import Record
from autotune.records.outcome import Measurement, Outcome
from autotune.records.progress import Progress
from autotune.records.world import World


@dataclass(frozen=True, kw_only=True)
class RankReport(Record):
    """One process of a command.

    Attributes:
        began_s: when it began to be watched, on the monotonic clock.
        outside_bytes: what it held before it built a model.
        optimizer: class of the optimizer whose steps count, as `TaskFacts.optimizer`; empty before its first step.
        has_batchnorm: as `TaskFacts.has_batchnorm`, from its first step on.
        outcome: how it failed; None where it did not.
        is_done: it knows enough, and waits to be ended.
    """

    world: World = field(default_factory=World)
    began_s: float
    outside_bytes: int = 0
    optimizer: str = ""
    has_batchnorm: bool = False
    progress: Progress = field(default_factory=Progress)
    num_steps: int = 0
    measurement: Measurement | None = None
    outcome: Outcome | None = None
    is_done: bool = False

    @property
    def known_world(self) -> World | None:
        """Its place among the ranks; None while a process that seems alone has not taken a step."""
        return self.world if self.optimizer or self.world.size > 1 else None
