"""A job as a worker process is asked for it: plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autotune.runners.runner import (
    AnatomyJob,
    CalibrateJob,
    CheckJob,
    EvaluateJob,
    InspectJob,
    Job,
    ModulesJob,
    ProbeJob,
    TraceJob,
)


def arguments_of(job: Job, *, device: str, channel: str) -> dict[str, Any]:
    """What the worker's function for this job takes.

    Args:
        device: the device's name.
        channel: path of the pipe or file through which the worker tells of it.
    """
    match job:
        case CalibrateJob():
            return {"device": device}
        case InspectJob():
            return {
                "device": device,
                "memory_limit_bytes": job.memory_limit_bytes,
                "calibration": job.calibration.to_dict(),
                "absent": None if job.absent is None else asdict(job.absent),
                "trained": dict(job.trained),
                "comparing_s": job.comparing_s,
                "trains": job.trains,
                "not_compared": job.not_compared,
            }
        case ProbeJob() | ModulesJob() | EvaluateJob():
            more = {"num_samples": job.num_samples} if isinstance(job, EvaluateJob) else {}
            return {"config": job.config.as_dict(), "device": device, "settings": job.settings.to_dict(), **more}
        case CheckJob():
            return {
                "config": job.config.as_dict(),
                "device": device,
                "memory_limit_bytes": job.settings.memory_limit_bytes,
                "batch_size": job.batch_size,
            }
        case AnatomyJob():
            return {
                "configs": [config.as_dict() for config in job.configs],
                "target": job.target,
                "slice_s": job.slice_s,
            }
        case TraceJob():
            return {"plan": job.plan.to_dict(), "target": job.target, "channel": channel, "slice_s": job.slice_s}
