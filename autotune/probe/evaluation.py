"""Forward passes, measured as a user's evaluation makes them in the middle of training."""

from __future__ import annotations

from typing import Any

from autotune.probe.measure import MAX_SCALER_STEPS, Run
from autotune.session import Session
from autotune.task.batches import StepBatch


class EvaluationRun(Run):
    """A run of forward passes, as in `Session.evaluate`, in place of training steps. The model is in evaluation mode."""

    counts_starts = False

    def _accumulate(self, batch: StepBatch) -> None:
        for micro in batch:
            self.session.evaluator.values(micro)

    def _update(self) -> None:
        self.num_steps += 1

    def _phases(self) -> dict[str, float]:
        batch = StepBatch()
        data_s = self._clock(lambda: batch.extend(self._take(1)))
        return {"data": data_s, "forward": self._clock(lambda: self._accumulate(batch))}


def train_a_step(session: Session, batch: Any, num_samples: int) -> None:
    """Take a training step, so that the optimizer's state exists, as it does when a user's training evaluates."""
    scaler = session.scaler
    for _ in range(MAX_SCALER_STEPS):
        scale = 0.0 if scaler is None else scaler.get_scale()
        session.step(StepBatch([(batch, num_samples)]))
        if scaler is None or scaler.get_scale() >= scale:  # the step was not skipped
            return
