"""Reports a probe's progress. Its process may be killed at any time, and then the last report is all there is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.records.progress import Progress

REPORT_INTERVAL_S = 0.25


@dataclass
class Reporter:
    """Tracks what a run has done so far: reported a few times a second, at a new stage, and after the first micro step."""

    send: Callable[[Progress], None]
    peak_bytes: Callable[[], int]
    batch_size: int  # samples of a micro step
    stage: str = "setup"
    train_s: float = 0.0
    num_micro_steps: int = 0
    _fastest_micro_s: float = math.inf
    _sent_s: float = -math.inf

    def enter(self, stage: str) -> None:
        """Enter a stage."""
        self.stage = stage
        self._send()

    def trained(self, seconds: float, num_micro_steps: int, *, is_first_step: bool) -> None:
        """Count micro steps, or another part of a training step. The first step says nothing about the speed."""
        self.train_s += seconds
        is_new = not self.num_micro_steps and num_micro_steps > 0
        self.num_micro_steps += num_micro_steps
        if num_micro_steps and not is_first_step:
            self._fastest_micro_s = min(self._fastest_micro_s, seconds / num_micro_steps)
        if is_new or time.perf_counter() > self._sent_s + REPORT_INTERVAL_S:
            self._send()

    @property
    def progress(self) -> Progress:
        """What has been done so far."""
        seen = self._fastest_micro_s < math.inf
        return Progress(
            stage=self.stage,
            train_s=self.train_s,
            num_micro_steps=self.num_micro_steps,
            peak_bytes=self.peak_bytes() if self.num_micro_steps else 0,
            samples_per_s_high=self.batch_size / self._fastest_micro_s if seen else None,
        )

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self.send(self.progress)
