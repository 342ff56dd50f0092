"""Measures where the time of a training step goes, module by module, and how much the allocator really holds."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autotune.devices import Device
from autotune.probe.micro_batches import micro_batches
from autotune.probe.module_scopes import Scopes
from autotune.records.config import Config
from autotune.records.explanation import STEP, UPDATE, ModuleTimes
from autotune.records.world import ALONE, World
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import StepBatch

NUM_STEPS = 5  # timed, of one micro batch each, after as many as warm them up
NUM_WARMUP = 3


def measure_modules(task: Task, config: Config, device: Device, world: World = ALONE) -> ModuleTimes:
    """Train a few steps of `config`. The largest batch is trained for the memory, usual ones for the time.

    Raises:
        Exception: whatever the user's code or an allocation raises.
    """
    task.dataset()  # made before, so that it does not count
    held: list[int] = []
    with _allocations(device, held):
        session = prepare(task, config, device=device, world=ALONE, on_oom=RAISE)
        # all micro batches of a step are there while it runs; from the second one on they hold no more than that
        batch = [(task.batch(config.batch_size), config.batch_size) for _ in range(config.accumulation_steps)]
        for _ in range(2):  # the first step allocates the optimizer's state
            session.step(StepBatch(batch[:2]))
        device.synchronize()
    return ModuleTimes(seconds=_times(session, device), allocated_bytes=held[0])


@contextmanager
def _allocations(device: Device, held: list[int]) -> Iterator[None]:
    """Append the most bytes of tensors that lived at once inside; on a CPU the running sum of the profiler's events.

    On a GPU without cuBLAS's workspaces, which are there before: 64 MiB of a Hopper's.
    """
    if device.capabilities.own_allocator:
        device.enter()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        held.append(torch.cuda.max_memory_allocated() - before)
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    kineto = profiler.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    held.append(max(itertools.accumulate(change for _, change in changes), default=0))


def _times(session: Session, device: Device) -> dict[str, dict[str, float]]:
    """Module -> phase -> seconds of a micro batch and an update."""
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in session.model.modules())
    if session.task.takes_whole_steps or compiled:  # one unit, into which hooks do not reach
        return {}
    clock: Callable[[], Any] = _event if device.capabilities.streams else time.perf_counter
    scopes = Scopes(session, clock)
    batches = micro_batches(session)
    for _ in range(NUM_WARMUP):
        session.step(StepBatch([next(batches)]))
    with scopes.followed():
        for _ in range(NUM_STEPS):
            session.accumulate(StepBatch([next(batches)]))
            scopes.begin(STEP, UPDATE)
            session.update()
            device.synchronize()
            scopes.begin("", "")  # loading the next batch
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for stretch, following in itertools.pairwise(scopes.stretches):
        if stretch.phase:
            seconds[stretch.module][stretch.phase] += _between_s(stretch.note, following.note) / NUM_STEPS
    return {module: dict(phases) for module, phases in seconds.items()}


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_s(first: Any, second: Any) -> float:
    return float(second - first if isinstance(first, float) else first.elapsed_time(second) / 1000)
