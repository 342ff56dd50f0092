"""What a search finds out before its first probe: rates of the device, and what applies to the task within its memory limit."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from autotune.devices.calibration import holds_for
from autotune.devices.linux import DISTURBED
from autotune.errors import AutotuneError, ConfigError, DeviceError, TaskError
from autotune.records.config import BATCH_KEYS, BatchPlan
from autotune.records.device import CONVOLUTION, FP32, MATMUL, NOT_MEASURED, Calibration, DeviceInfo
from autotune.records.inspection import Inspection, Support
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import CalibrateJob, InspectJob, JobFailed
from autotune.runners.runner import ProbeFault, Runner
from autotune.study.caches import CalibrationCache
from autotune.tuning import why
from autotune.tuning.budget import MOST_GAIN, SETUP_SHARE
from autotune.tuning.recommend import NothingFeasible
from autotune.units import format_bytes, format_seconds, plural

LARGER_HOST = "build and load less in the model file, or use a host with more memory"


def calibrate_device(runner: Runner, device: DeviceInfo, folder: Path) -> tuple[Calibration, str]:
    """The calibration of the runner's device, and the reason where there is none, else an empty text.

    Args:
        folder: of the study; calibrations of this machine are kept there.
    """
    cache = CalibrationCache(folder, holds_for(device)) if runner.keeps_traces else None
    if cache is not None and (kept := cache.read()) is not None:
        return kept, ""
    try:
        found = runner.run(CalibrateJob())
    except (JobFailed, ProbeFault) as failed:
        return NOT_MEASURED, str(failed)
    is_whole = all(found.best(work, FP32) for work in (MATMUL, CONVOLUTION))
    if cache is not None and is_whole and found.contention <= DISTURBED:  # else the next search measures again
        cache.write(found)
    return found, ""


def inspect(runner: Runner, job: InspectJob, timeout_s: float | None = None) -> Inspection:
    """The inspection of a task.

    Args:
        timeout_s: what `--timeout` gave, for the message.

    Raises:
        AutotuneError: it cannot be inspected. A job without a memory limit is a prediction's, which trains nothing.
    """
    try:
        return runner.run(job)
    except JobFailed as failed:
        if job.memory_limit_bytes is None:
            raise prediction_failed(failed.outcome, timeout_s) from None
        raise inspection_failed(failed.outcome, job.memory_limit_bytes) from None


def inspect_within(runner: Runner, job: InspectJob) -> Inspection:
    """The inspection within a limit. Where plain training, or the model alone, does not fit, it is repeated in all free memory:
    trying a technique takes as much as plain training does.

    Raises:
        AutotuneError: it cannot be inspected.
    """
    limit_bytes = job.memory_limit_bytes
    assert limit_bytes is not None

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
    """The warning that plain training does not fit, and what the search does about it."""
    return (
        f"{plural(inspection.step_samples, 'sample')} of plain training do not fit within {format_bytes(limit_bytes)} "
        f"({inspection.shortage}); what needs least memory by prediction is tried first"
    )


def count_train_samples(options: SearchOptions, inspection: Inspection) -> float | None:
    """How many samples the training is to take; None where the user does not say.

    Raises:
        ConfigError: the user says so in two ways, or in epochs of a dataset whose length is not known.
    """
    if options.train_epochs is None:
        batch_size, accumulation_steps = (int(inspection.baseline[name]) for name in BATCH_KEYS)
        plan = BatchPlan(batch_size, accumulation_steps, inspection.known_world)
        return options.train_steps and options.train_steps * plan.samples_per_step
    if options.train_steps is not None:
        raise ConfigError("train_steps and train_epochs both say how long the training is; leave one out")
    dataset_size = inspection.facts.dataset_size
    if dataset_size is None:
        raise ConfigError("train_epochs: the task has no dataset of known length; give the length as --train-steps")
    return int(options.train_epochs * dataset_size)


def drop_slow_setups(
    inspection: Inspection, budget_s: float, train_samples: float | None, included: Collection[str]
) -> Inspection:
    """The inspection, in which a choice that compiles is searched unasked if the budget pays for its time before the first step.

    Args:
        budget_s: seconds that the search has.
        train_samples: that the training is to take; None where that is not known.
        included: techniques that the user has asked for anyway.
    """
    allowed_s, unless = SETUP_SHARE * budget_s, "a --budget of {} or more does so by itself"
    if train_samples is not None and inspection.sample_s is not None:
        won_s = MOST_GAIN * train_samples * inspection.sample_s
        if won_s < allowed_s:
            allowed_s, unless = won_s, "the training is too short to win that back"
    support = {
        name: _judge_setup(name, found, allowed_s, unless) if found.setup_s and name not in included else found
        for name, found in inspection.support.items()
    }
    return replace(inspection, support=support)


def _judge_setup(name: str, support: Support, allowed_s: float, unless: str) -> Support:
    cheap = [choice for choice, seconds in support.setup_s if seconds <= allowed_s]
    dear_s = [seconds for _, seconds in support.setup_s if seconds > allowed_s]
    reason = support.reason
    if dear_s:
        remedy = unless.format(format_seconds(min(dear_s) / SETUP_SHARE))
        reason = f"{reason}: {format_seconds(min(dear_s))} or more for a config; --include {name} tries it, {remedy}"
    return replace(
        support,
        choices=(*support.choices, *cheap),
        optional=tuple(choice for choice in support.optional if choice not in cheap),
        reason=reason,
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
    """The error for a task that could not be inspected without training it. If memory ran out, it was the host's.

    Args:
        timeout_s: what `--timeout` gave.
    """
    if outcome.kind is Kind.TIMEOUT and timeout_s is not None:
        return TaskError(
            f"building the model and trying the techniques took more than {format_seconds(timeout_s)}; give it more time with "
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
    """The hint for an inspection that was not ready when its time was up; empty for other failures."""
    ended = outcome.kind is Kind.TIMEOUT and outcome.bound is None
    return "; a larger --budget, or --probe-timeout, gives it more time" if ended else ""


def _printed(outcome: Outcome) -> str:
    """Where the output of the process is; empty where it printed nothing."""
    log = Path(outcome.log)
    return f"; `{log.name}` in {log.parent} holds its output" if outcome.log else ""
