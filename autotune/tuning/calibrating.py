"""Measures the device before the first search on it, and again when something has changed that the figures depend on."""

from __future__ import annotations

from pathlib import Path

from autotune.devices.calibration import holds_for
from autotune.devices.contention import DISTURBED
from autotune.records.calibration import CONVOLUTION, FP32, MATMUL, NOT_MEASURED, Calibration
from autotune.records.device import DeviceInfo
from autotune.runners.jobs import CalibrateJob, JobFailed
from autotune.runners.runner import ProbeFault, Runner
from autotune.study.caches import CalibrationCache


def calibrate_device(runner: Runner, device: DeviceInfo, folder: Path) -> tuple[Calibration, str]:
    """The calibration of the runner's device, and why there is none, or an empty text.

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
