"""What torch's CPU allocator really held over training steps: the running sum of the profiler's allocation events."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile, record_function

from autotune.records.config import Config
from autotune.session import prepare
from autotune.task import Task
from autotune.task.batches import StepBatch, tensors

NUM_STEPS = 2  # the first one allocates the optimizer's state
_SPAN = "autotune memory: "


@dataclass(frozen=True, kw_only=True)
class RealPeaks:
    """Largest sums of living tensors, in bytes, over two optimizer steps: all of it, and by part of the step.

    What building the session takes for a moment is left out, as are tensors that the task's module made when it was
    imported. All micro batches of a step are there while it runs.
    """

    peak_bytes: int
    accumulate_bytes: int
    update_bytes: int


def real_peak_bytes(task: Task, config: Config) -> int:
    """The peak of `real_peaks`."""
    return real_peaks(task, config).peak_bytes


def real_peaks(task: Task, config: Config) -> RealPeaks:
    """Train two steps of `config` on this process's CPU. Of more than two micro batches a step, only two are run."""
    num_micro = min(2, config.accumulation_steps)
    task.dataset()  # made before, as it is in a probe
    task = dataclasses.replace(task, global_batch=None, train_dataset=_known(task))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        session = prepare(task, config.replace(accumulation_steps=num_micro), device="cpu")
        for _ in range(NUM_STEPS):
            batch = StepBatch((task.batch(config.batch_size), config.batch_size) for _ in range(num_micro))
            with record_function(_SPAN + "accumulate"):
                session.accumulate(batch)
            with record_function(_SPAN + "update"):
                session.update()
    storages = [tensor.untyped_storage() for tensor in tensors(batch[0])]
    micro_batch_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    held_bytes = (config.accumulation_steps - num_micro) * micro_batch_bytes
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    times_ns = [time_ns for time_ns, _ in changes]
    held = list(itertools.accumulate((change for _, change in changes), initial=held_bytes))
    peaks = {_SPAN + "accumulate": 0, _SPAN + "update": 0}
    for event in events:
        if event.name() in peaks:
            first, last = bisect_left(times_ns, event.start_ns()), bisect_right(times_ns, event.end_ns())
            peaks[event.name()] = max(peaks[event.name()], *held[first : last + 1])
    return RealPeaks(
        peak_bytes=max(peaks.values()),
        accumulate_bytes=peaks[_SPAN + "accumulate"],
        update_bytes=peaks[_SPAN + "update"],
    )


def _known(task: Task):
    dataset = task.dataset()
    return None if dataset is None else lambda: dataset
