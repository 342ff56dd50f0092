"""Traces a plan, group by group: what runs in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from autotune import techniques
from autotune.predict.kernel_memory import KernelMemory
from autotune.predict.law import excess_at_peak, fit_law, fit_start, fit_turnover
from autotune.predict.onednn_kernels import most_kernels
from autotune.predict.passes import Purpose, Updates
from autotune.predict.plan import Plan, allocator_sizes, config_of, traced_sizes
from autotune.predict.reserved import reserved_factors
from autotune.predict.storages import KernelPair
from autotune.predict.targets import CPU, Target
from autotune.predict.traces import Group, ModelTrace, Traces, UpdateTrace, model_label, update_label
from autotune.predict.tracing import TraceError, Tracer
from autotune.predict.variety import Variety, variety_of
from autotune.task import Task
from autotune.task.samples import dataset_size


def trace_plan(task: Task, plan: Plan, target: Target) -> Iterator[dict[str, Any]]:
    """Trace group after group.

    Yields:
        Messages: `begun` with a group's label, then `traces` with `Traces` as a dict: what was found, or why not. Then the
        variety of the training set, if the plan asks for it, and groups once more whose kernels were measured.
    """
    job = _Job(task, plan, target)
    work: list[tuple[str, Callable[[], Traces]]] = [
        *((update_label(group), partial(job.update, group)) for group in plan.updates),
        *((model_label(group), partial(job.model, group)) for group in plan.models),
    ]
    traced = []
    for label, trace in work:
        yield {"begun": label}
        try:
            found = trace()
        except TraceError as error:
            found = Traces(target=target, failures={label: str(error)})
        traced.append(found)
        yield {"traces": found.to_dict()}
    if plan.variety and job.variety is not None:
        yield {"traces": Traces(target=target, variety=job.variety).to_dict()}
    for found in traced:  # by running operators of torch: should one of them fail, all else is known
        if (measured := job.with_measured_kernels(found)) != found:
            yield {"traces": measured.to_dict()}


class _Job:
    def __init__(self, task: Task, plan: Plan, target: Target) -> None:
        self.task = task
        self.plan = plan
        self.target = target
        self.kernel_memory = KernelMemory()
        self.new_calls: dict[Group, tuple[KernelPair, ...]] = {}

    def update(self, group: Group) -> Traces:
        """Trace the updates of one group."""
        updates = self.plain_updates if not group else self.tracer.updates(config_of(group), self.sizes[0])
        trace = UpdateTrace(
            state_bytes=_state_bytes(updates),
            first=excess_at_peak(updates.first),
            later=excess_at_peak(updates.second),
        )
        return Traces(target=self.target, updates={group: trace})

    def model(self, group: Group) -> Traces:
        """Trace the micro batches of one group, unless a technique says that this cannot be done."""
        config = config_of(group)
        if reason := techniques.untraceable(config, "cpu" if self.target == CPU else "cuda"):
            raise TraceError(reason)
        micro = self.tracer.micro_steps(config, self.sizes)
        factors: tuple[tuple[int, float, float], ...] = ()
        if self.target != CPU:
            factors = reserved_factors(micro, self.plain_updates, allocator_sizes(self.plan.batch_sizes))
        alone = fit_law(micro.alone)
        trace = ModelTrace(
            alone=alone,
            beside=fit_law(micro.beside, deviation=alone.deviation),
            before_update=fit_start(micro.beside),
            input_bytes=self.line_through(micro.input_bytes),
            turnover=fit_turnover(micro.alone),
            reserved=factors,
            new_kernels=micro.new_kernels,
            most_kernels=most_kernels(),
            kernels=self.kernel_memory.typical(micro.new_calls, self.num_elements),
        )
        self.new_calls[group] = micro.new_calls
        return Traces(target=self.target, models={group: trace})

    def with_measured_kernels(self, found: Traces) -> Traces:
        """The same, with what kernels hold measured, where batches have other shapes that bring some."""
        measurable = any(self.kernel_memory.is_measurable(self.new_calls[group]) for group in found.models)
        if not measurable or self.variety is None or len(self.variety.widths) == 1:
            return found
        models = {
            group: replace(trace, kernels=self.kernel_memory.measured(self.new_calls[group], self.num_elements))
            for group, trace in found.models.items()
        }
        return replace(found, models=models)

    @cached_property
    def num_elements(self) -> int:
        """Of the largest input batch that is traced."""
        return self.tracer.num_elements(self.sizes[-1])

    def line_through(self, values: Sequence[int]) -> tuple[float, float]:
        """Constant and slope of figures at the traced batch sizes, by the first and the last."""
        slope = (values[-1] - values[0]) / (self.sizes[-1] - self.sizes[0])
        return values[0] - slope * self.sizes[0], slope

    @cached_property
    def variety(self) -> Variety | None:
        """None also where the user's code was not made for single samples."""
        with contextlib.suppress(Exception):
            return variety_of(self.task)
        return None

    @cached_property
    def tracer(self) -> Tracer:
        return Tracer(self.task, self.target)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes to trace."""
        most = None if self.task.make_batch is not None else dataset_size(self.task.dataset())
        sample_bytes = self.tracer.input_bytes(2) / 2 if most is None or most > 1 else float(self.tracer.input_bytes(1))
        return traced_sizes(max(self.plan.batch_sizes, default=1), sample_bytes=sample_bytes, most=most)

    @cached_property
    def plain_updates(self) -> Updates:
        return self.tracer.updates(config_of(()), self.sizes[0])


def _state_bytes(updates: Updates) -> float:
    second = updates.second
    return float(sum(size for key, size in second.held.items() if second.purposes[key] is Purpose.OPTIMIZER))
