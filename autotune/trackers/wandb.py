"""Tracks a search in Weights & Biases: one run, with a step for each probe and the answer as its summary."""

from __future__ import annotations

from typing import Any

from autotune.trackers import Answer, Point, Start, Tracker


class WandB(Tracker):
    """WHERE is the project. W&B's own environment variables set the rest (`WANDB_MODE=offline`, `WANDB_ENTITY`, `WANDB_DIR`)."""

    name = "wandb"
    summary = "a run of Weights & Biases, in the project WHERE (default: autotune)"
    package = "wandb"
    install = "wandb"
    _run: Any = None

    def begin(self, start: Start) -> None:
        """Begin a run for the study."""
        import wandb

        self.finish()
        self._run = wandb.init(
            project=self.where or "autotune",
            name=start.study,
            group=start.task,
            job_type="search",
            config=start.facts,
            reinit="finish_previous",
        )
        self._run.define_metric("*", step_metric="probe")

    def point(self, point: Point) -> None:
        """Log a step, with the config's choices beside the figures."""
        config = {f"config/{name}": choice for name, choice in point.config.items()}
        self._run.log({"probe": point.number, **point.figures, **point.facts, **config})

    def answer(self, answer: Answer) -> None:
        """Write the run's summary."""
        self._run.summary.update({"answer": {"config": answer.config, **answer.figures, **answer.facts}})

    def finish(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
