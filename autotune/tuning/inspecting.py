"""Inspects a task within a memory limit, and says what becomes of one that does not fit or fails."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from autotune.errors import AutotuneError, DeviceError, TaskError
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import InspectJob, JobFailed
from autotune.runners.runner import Runner
from autotune.tuning import why
from autotune.tuning.recommend import NothingFeasible
from autotune.units import format_bytes, format_seconds, plural

LARGER_HOST = "build and load less in the model file, or use a host with more memory"


def inspect(runner: Runner, job: InspectJob, timeout_s: float | None = None) -> Inspection:
    """The inspection of a task.

    Args:
        timeout_s: as of `prediction_failed`.

    Raises:
        AutotuneError: it cannot be inspected. Without a memory limit nothing of it was to be trained.
    """
    try:
        return runner.run(job)
    except JobFailed as failed:
        if job.memory_limit_bytes is None:
            raise prediction_failed(failed.outcome, timeout_s) from None
        raise inspection_failed(failed.outcome, job.memory_limit_bytes) from None


def inspect_within(runner: Runner, job: InspectJob, limit_bytes: int) -> Inspection:
    """The inspection within a limit. Where plain training, or the model alone, does not fit, it is asked in all that is free:
    to try a technique takes as much as plain training does.

    Raises:
        AutotuneError: it cannot be inspected.
    """

    def in_more(shortage: str) -> Inspection | None:
        with contextlib.suppress(JobFailed):
            wide = runner.in_all_that_is_free(
                lambda free_bytes: runner.run(replace(job, memory_limit_bytes=free_bytes)), limit_bytes
            )
            return wide and replace(wide, shortage=shortage, step_s=None)
        return None

    try:
        found = runner.run(job)
    except JobFailed as failed:
        error = inspection_failed(failed.outcome, limit_bytes)
        if not isinstance(error, NothingFeasible) or (wide := in_more(str(failed))) is None:
            raise error from None
        return wide
    return (found.shortage and in_more(found.shortage)) or found


def too_little_memory(inspection: Inspection, limit_bytes: int) -> str:
    """That plain training does not fit, and what comes of it."""
    return (
        f"{plural(inspection.step_samples, 'sample')} of plain training do not fit within {format_bytes(limit_bytes)} "
        f"({inspection.shortage}); what needs least memory by prediction is tried first"
    )


def inspection_failed(outcome: Outcome, limit_bytes: int) -> AutotuneError:
    """The error for a task that could not be inspected."""
    if outcome.crowded:
        return DeviceError(f"{outcome.cause}; {why.OTHERS}")
    if outcome.on_host:
        return TaskError(f"{outcome.cause}; {LARGER_HOST}", frames=outcome.detail)
    if outcome.kind is Kind.OOM:
        return NothingFeasible(
            f"the model and a few samples do not fit within {format_bytes(limit_bytes)}, before any training: "
            f"{outcome.cause}; raise --memory-limit, or make the model or the sample smaller"
        )
    if outcome.kind is Kind.ERROR:
        return why.as_error(outcome)
    return TaskError(
        f"one training step of a few samples failed: {outcome.cause}{_slow(outcome)}{_printed(outcome)}",
        frames=outcome.detail,
    )


def prediction_failed(outcome: Outcome, timeout_s: float | None = None) -> AutotuneError:
    """The error for a task that could not be inspected without training it. What memory it took was the host's.

    Args:
        timeout_s: what `--timeout` gave.
    """
    if outcome.kind is Kind.TIMEOUT and timeout_s is not None:
        return TaskError(
            f"the model was not built, and no technique tried on it, within {format_seconds(timeout_s)}; give it more time with "
            "--timeout"
        )
    if outcome.kind is Kind.OOM:
        cause = outcome.cause if outcome.on_host else f"the host's memory ran out: {outcome.cause}"
        return TaskError(
            f"{cause}; {LARGER_HOST}",
            frames=outcome.detail,
        )
    if outcome.kind is Kind.ERROR:
        return why.as_error(outcome)
    return TaskError(
        f"the task could not be inspected: {outcome.cause}{_printed(outcome)}",
        frames=outcome.detail,
    )


def _slow(outcome: Outcome) -> str:
    """What gives more time to one that was not ready when its time was up; empty for others."""
    ended = outcome.kind is Kind.TIMEOUT and outcome.bound is None
    return "; a larger --budget, or --probe-timeout, gives it more time" if ended else ""


def _printed(outcome: Outcome) -> str:
    """Where its output is; empty for one that printed nothing."""
    log = Path(outcome.log)
    return f"; `{log.name}` in {log.parent} holds its output" if outcome.log else ""
