"""How far a running probe has come: plain frozen data that its process streams."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.formats import Record
from autotune.records.outcome import Bound

COMPILING = "compiling"  # a stage before all others, in a process of its own
COMPARING = "comparing a batch with its micro batches"  # a stage of an inspection


@dataclass(frozen=True, kw_only=True)
class Progress(Record):
    """What a probe had done when it last reported.

    Attributes:
        stage: `compiling`, `setup`, `warmup` or `timing`; of an inspection `setup` or `COMPARING`.
        train_s: seconds inside training steps.
        num_micro_steps: micro batches trained on.
        peak_bytes: the most memory held so far, comparable with the memory limit; 0 before the first micro step.
        samples_per_s_high: the throughput of its fastest micro step after the first optimizer step, which compiles and
            allocates; None before there is one. A whole step, with its update, is no faster.
    """

    stage: str = "setup"
    train_s: float = 0.0
    num_micro_steps: int = 0
    peak_bytes: int = 0
    samples_per_s_high: float | None = None

    @property
    def bound(self) -> Bound | None:
        """What is known of the config if the probe ends here; None before its first micro step is done."""
        if not self.num_micro_steps:
            return None
        return Bound(samples_per_s_high=self.samples_per_s_high, peak_bytes_low=self.peak_bytes)
