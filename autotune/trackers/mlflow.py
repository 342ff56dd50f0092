"""Tracks a search in MLflow: a run with the answer, and nested in it a run for each probe."""

from __future__ import annotations

import os
import time
from typing import Any

from autotune.records.config import Choice
from autotune.records.outcome import Kind
from autotune.trackers import Answer, Point, Start, Tracker

_LONGEST = 500  # every version of MLflow takes values of so many characters


class MLflow(Tracker):
    """WHERE is a tracking URI. The experiment is named after the task."""

    name = "mlflow"
    summary = "runs of MLflow, at the tracking URI WHERE (default: MLflow's own)"
    package = "mlflow"
    install = "mlflow"
    _client: Any = None
    _experiment = _run = ""
    _status = "KILLED"  # until there is an answer

    def begin(self, start: Start) -> None:
        """Create a run for the study."""
        # with a server, MLflow prints a link to each run that ends to stdout, where the JSON of a search stands alone
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        self.finish()
        self._client = MlflowClient(tracking_uri=self.where or None)
        known = self._client.get_experiment_by_name(start.task)
        self._experiment = known.experiment_id if known else self._client.create_experiment(start.task)
        self._run = self._client.create_run(self._experiment, run_name=start.study).info.run_id
        self._status = "KILLED"
        self._keep(self._run, start.facts, {}, {})

    def point(self, point: Point) -> None:
        """Create a run nested in the search's."""
        run = self._client.create_run(
            self._experiment, run_name=f"probe {point.number}", tags={"mlflow.parentRunId": self._run}
        ).info.run_id
        self._keep(run, point.config, point.figures, point.facts)
        self._client.set_terminated(run, status="FINISHED" if point.facts["outcome"] == Kind.OK else "FAILED")

    def answer(self, answer: Answer) -> None:
        """Write parameters, metrics and tags of the search's own run."""
        self._keep(self._run, answer.config, answer.figures, answer.facts)
        self._status = "FINISHED"

    def finish(self) -> None:
        """End the search's run."""
        if self._client is not None:
            self._client.set_terminated(self._run, status=self._status)

    def _keep(self, run: str, params: dict[str, Choice], figures: dict[str, float], tags: dict[str, str]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        now_ms = int(time.time() * 1e3)
        self._client.log_batch(
            run,
            metrics=[Metric(name, figure, now_ms, 0) for name, figure in figures.items()],
            params=[Param(name, str(value)[:_LONGEST]) for name, value in params.items()],
            tags=[RunTag(name, value[:_LONGEST]) for name, value in tags.items() if value],
        )
