"""Traces a plan, group by group: what runs in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

from autotune.devices import capabilities_of
from autotune.devices.kernels.cuda_workspaces import cublas_workspaces
from autotune.devices.targets import Target, gpu_of, kind_of
from autotune.prediction.allocator import reserved_factors
from autotune.prediction.fake_steps import TraceError, Tracer
from autotune.prediction.partial_recomputation import recompute
from autotune.prediction.passes import (
    MicroSteps,
    Updates,
    excess_at_peak,
    fit_end,
    fit_peak,
    fit_volume,
    fit_work,
    line,
)
from autotune.prediction.traces import (
    Group,
    ModelTrace,
    Plan,
    Purpose,
    Reserved,
    Traces,
    UpdateTrace,
    allocator_sizes,
    largest,
    model_label,
    traced_sizes,
    update_label,
)
from autotune.prediction.worlds import joined
from autotune.records.device import Work
from autotune.task import Task
from autotune.task.samples import dataset_size
from autotune.task.unequal_samples import sample_lengths
from autotune.techniques import Techniques, find_techniques


def trace_plan(task: Task, plan: Plan, target: Target, host_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Trace group after group.

    Args:
        host_bytes: as of `Tracer`.

    Yields:
        Messages: `begun` with a group's label, then `traces` with `Traces` as a dict: what was found, or why not. Last come
        the lengths of the samples, if the plan asks for them.
    """
    with joined(plan.world):
        yield from _trace_groups(task, plan, target, host_bytes)


def _trace_groups(task: Task, plan: Plan, target: Target, host_bytes: int | None) -> Iterator[dict[str, Any]]:
    techniques = find_techniques()
    job = _Job(techniques.narrow_task(task, dict(plan.trained)), plan, target, techniques, host_bytes)
    plain = [group for group in plan.models if not group]  # which all others need
    work: list[tuple[str, Callable[[], Traces]]] = [
        *((model_label(group), partial(job.model, group)) for group in plain),
        *((update_label(group), partial(job.update, group)) for group in plan.updates),
        *((model_label(group), partial(job.model, group)) for group in plan.models if group),
    ]
    for label, trace in work:
        yield {"begun": label}
        try:
            found = trace()
        except TraceError as error:
            labels = plan.labels() if label == model_label(()) else [label]
            found = Traces(target=target, failures=dict.fromkeys(labels, str(error)))
        yield {"traces": found.to_dict()}
        if label == model_label(()) and found.failures:
            return
    if plan.lengths:
        with contextlib.suppress(Exception):  # the user's code may not be made for single samples
            yield {"traces": Traces(target=target, lengths=sample_lengths(task)).to_dict()}


class _Job:
    def __init__(self, task: Task, plan: Plan, target: Target, techniques: Techniques, host_bytes: int | None) -> None:
        self.task = task
        self.plan = plan
        self.target = target
        self.techniques = techniques
        self.host_bytes = host_bytes
        self.updates = cache(self._updates)  # groups need each other's
        self.update_trace = cache(self._update_trace)
        self.micro_steps = cache(self._micro_steps)
        self.model_trace = cache(self._model_trace)
        self.simulated = cache(self._simulated)

    def update(self, group: Group) -> Traces:
        """Trace the updates of one group. Raises `TraceError` as `model` does."""
        self._require_traceable(group)
        return Traces(target=self.target, updates={group: self.update_trace(group)})

    def _update_trace(self, group: Group) -> UpdateTrace:
        first, second = self.updates(group)
        work = second.work or Work()
        state_bytes = float(sum(second.held[key] for key in second.held if second.purposes[key] is Purpose.OPTIMIZER))
        return UpdateTrace(
            state_bytes=state_bytes,
            first=excess_at_peak(first),
            later=excess_at_peak(second),
            moved_bytes=work.moved_bytes,
            num_operators=work.num_operators,
        )

    def _updates(self, group: Group) -> Updates:
        return self.tracer.updates(self.techniques.complete(dict(group)), self.sizes[0])

    def model(self, group: Group) -> Traces:
        """Trace the micro batches of one group, or of one that takes the same memory.

        Raises:
            TraceError: it cannot be traced, by what happened or by what a technique says.
        """
        self._require_traceable(group)
        trace = self.model_trace(self._traced_as(group), self.techniques.update_group(dict(group)))
        return Traces(target=self.target, models={group: trace})

    def _require_traceable(self, group: Group) -> None:
        if reason := self.techniques.untraceable(self.techniques.complete(dict(group)), kind_of(self.target)):
            raise TraceError(reason)

    def _model_trace(self, group: Group, shared: Group) -> ModelTrace:
        """The trace of a group, with those updates whose groups have the same choices in common with it."""
        micro = self.micro_steps(group)
        device = capabilities_of(self.target)
        low_bytes, high_bytes = (0 if device.own_memory else self.tracer.input_bytes(size) for size in self.sizes)
        deviation = self._plain_deviation if group else 0.0
        alone = fit_peak(micro.alone, deviation=deviation)
        trace = ModelTrace(
            alone=alone,
            beside=fit_peak(micro.beside, deviation=alone.deviation),
            before_update=fit_end(micro.alone),
            input_bytes=line(micro.alone, low_bytes, high_bytes),
            volume=fit_volume(micro.alone),
            work=fit_work(micro.alone),
        )
        return replace(trace, reserved=self._reserved(micro, trace, shared)) if device.own_allocator else trace

    @cached_property
    def _plain_deviation(self) -> float:
        """How far a batch size between the two traced ones was off, with nothing switched on."""
        known = self.plan.deviation
        return self.model_trace((), ()).alone.deviation if known is None else known

    def _reserved(self, micro: MicroSteps, trace: ModelTrace, shared: Group) -> tuple[Reserved, ...]:
        def living_bytes(update: Group, batch_size: int, accumulates: bool) -> float:
            _, _, parts, _ = largest(trace, self.update_trace(update), batch_size, accumulates=accumulates)
            return sum(parts)

        sizes, added = allocator_sizes(self.plan.batch_sizes), self.techniques.all_allocator_settings()
        held_bytes = cublas_workspaces(gpu_of(self.target))
        return reserved_factors(micro, self.simulated(shared), living_bytes, sizes, added, held_bytes)

    def _simulated(self, shared: Group) -> dict[Group, Updates]:
        """The updates that are simulated with a model's group, plainest first, as far as they can be traced."""
        found: dict[Group, Updates] = {shared: self.updates(shared)}
        for group in self.plan.simulated:
            if self.techniques.micro_batch_group(dict(group)) != shared:
                continue
            with contextlib.suppress(TraceError):
                self._require_traceable(group)
                found[group] = self.updates(group)
        return found

    def _micro_steps(self, group: Group) -> MicroSteps:
        """The micro batches of one group: put together from those of others where it recomputes some blocks, else traced."""
        for name, choice in group:
            found = self.tracer.recomputation(self.techniques[name], choice)
            if found is None or choice == found.each:
                continue
            none = tuple(pair for pair in group if pair[0] != name)
            each = tuple((other, found.each if other == name else c) for other, c in group)
            with contextlib.suppress(TraceError):
                steps = recompute(self.micro_steps(none), self.micro_steps(each), found.segments, len(found.blocks))
                if steps is not None:
                    return steps
        return self.tracer.micro_steps(self.techniques.complete(dict(group)), *self.sizes, check=not group)

    @cached_property
    def tracer(self) -> Tracer:
        return Tracer(self.task, self.target, self.techniques, self.host_bytes, self.plan.world)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """The smallest and the largest batch size to trace.

        Raises:
            TraceError: there is one size alone, which does not tell what memory grows by.
        """
        most = None if self.task.make_batch is not None else dataset_size(self.task.dataset())
        if most == 1:
            raise TraceError("the training set has a single sample, and memory is traced with batches of two sizes")
        sample_bytes = self.tracer.input_bytes(2) / 2
        return traced_sizes(max(self.plan.batch_sizes, default=1), sample_bytes=sample_bytes, most=most)

    def _traced_as(self, group: Group) -> Group:
        """The group that stands for this one in tracing."""
        alike = [(name, self.techniques[name].traced_as(choice)) for name, choice in group]
        return tuple((name, choice) for name, choice in alike if not self.techniques.is_off(name, choice))
