"""Traces configs between the probes or beside them, within a share of the budget, and keeps the traces with the studies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Self

from autotune.devices.targets import target_of
from autotune.prediction.traces import Plan, Traces, plan_traces
from autotune.records.config import ALONE, BATCH_SIZE, Config, World
from autotune.records.inspection import Inspection
from autotune.runners.jobs import TraceJob
from autotune.runners.runner import ProbeFault, Runner
from autotune.study.caches import TraceCache, agrees
from autotune.study.history import History

SLICE_S = 5.0  # of one job
LONGEST_GROUP_S = 60.0  # for one group of techniques beside the probes, where tracing keeps nobody waiting


class Tracing:
    """The traces of a space's configs so far. A context manager: leaving it ends what runs beside the probes.

    Args:
        configs: returns the configs to trace; they change with the space.
        target: the kind of device to predict for.
        cache: where the traces of earlier searches are kept; None keeps none.
        max_s: time for all tracing between the probes.
        beside: traces beside the probes, which takes none of their time; None where it would disturb them.
        world: the processes that train a config together.
    """

    def __init__(
        self,
        runner: Runner,
        configs: Callable[[], Iterable[Config]],
        target: str,
        cache: TraceCache | None,
        max_s: float,
        beside: Runner | None = None,
        world: World = ALONE,
    ) -> None:
        self.traces = Traces(target=target)
        self.wall_s = 0.0
        self.max_s = max_s
        self.fault = ""  # what ended tracing beside the probes
        self._runner = runner
        self.beside = beside
        self._resources = contextlib.ExitStack()
        self._ticket: int | None = None  # of the job that runs beside the probes
        self._configs, self._world = configs, world
        self._target = target
        self._cache = cache
        self._kept: Traces | None = None  # those of an earlier search
        self._to_confirm = False
        self._begun = False
        self._is_complete = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    @property
    def is_done(self) -> bool:
        """Whether every config was traced or could not be, or time is up."""
        return self._is_complete or (self._begun and self.beside is None and self.wall_s >= self.max_s)

    @property
    def missing(self) -> list[str]:
        """Labels of the groups of techniques that still have to be traced."""
        return self._left(self._configs()).labels()

    def _left(self, configs: Iterable[Config]) -> Plan:
        """What of some configs is not traced yet."""
        return plan_traces(configs, self._runner.techniques, self._world).without(self.traces)

    def are_traced(self, configs: Iterable[Config]) -> bool:
        """Whether what some configs need was traced, or cannot be."""
        return not self._left(self._configs()).needed_by(configs, self._runner.techniques).labels()

    def advance(
        self,
        slice_s: float = SLICE_S,
        watch: Callable[[Traces], bool] | None = None,
        *,
        only: Iterable[Config] | None = None,
    ) -> None:
        """Trace for about `slice_s`, up to the end of the current group. The group that runs when time is up stays missing.

        Args:
            watch: called now and then with what is known so far, as long as it returns true.
            only: trace what these need, and nothing else.
        """
        ends_s = self.wall_s + slice_s
        while True:
            confirms = self._begin()
            self._trace(ends_s - self.wall_s, watch, None if self._to_confirm else only)
            if not confirms or self._to_confirm or self._is_complete or self.wall_s >= min(ends_s, self.max_s):
                return

    def _trace(self, slice_s: float, watch: Callable[[Traces], bool] | None, only: Iterable[Config] | None) -> None:
        """Trace what is wanted next: what confirms the kept traces, or what is missing."""
        started_s = self._runner.now_s()
        left_s = max(0.0, self.max_s - self.wall_s)
        found = self._runner.trace(
            self._wanted(),
            self._target,
            left_s,
            known=self.traces,
            world=self._world,
            slice_s=min(slice_s, left_s),
            watch=watch,
            only=only,
        )
        self.wall_s += self._runner.now_s() - started_s
        self._take(replace(found, failures=self.traces.failures) if self.wall_s >= self.max_s else found)

    def advance_beside(self) -> None:
        """Take in what was traced beside the probes, and have more traced, without waiting for it."""
        assert self.beside is not None
        try:
            if not self._begun:
                self._resources.enter_context(self.beside)
            self._begin()
            if self._ticket is not None:
                finished = self.beside.collect(timeout_s=0)
                if finished is None:
                    return
                self._ticket = None
                self._take(self.traces.merged(finished.result))
            left = self._left(self._wanted())
            if left.labels():
                job = TraceJob(plan=left, target=self._target, slice_s=SLICE_S, timeout_s=LONGEST_GROUP_S)
                self._ticket = self.beside.submit(job)
            else:
                self._take(self.traces)
        except ProbeFault as fault:  # memory is learned from probes then
            self.fault = str(fault)
            self._begun = self._is_complete = True

    def _begin(self) -> bool:
        """The first time, read the traces that are kept. Returns whether they are still to be confirmed."""
        if not self._begun:
            self._begun = True
            self._kept = self._cache.read() if self._cache is not None else None
            self._to_confirm = self._kept is not None
        return self._to_confirm

    def _wanted(self) -> list[Config]:
        """The configs to trace next. What an earlier search has traced is used if plain training still traces to the same."""
        configs = list(self._configs())
        if not self._to_confirm:
            return configs
        techniques = self._runner.techniques
        plain = (techniques.complete({**techniques.trained(c), BATCH_SIZE: c.batch_size}) for c in configs)
        return sorted(set(plain), key=lambda config: config.batch_size)

    def _take(self, found: Traces) -> None:
        self.traces = found
        if self._to_confirm and not self._left(self._wanted()).labels():
            self._to_confirm = False
            if found.failures:  # the kept traces may be right: they stay as they are, and are not used now
                self._kept, self._cache = None, None
            elif self._kept is not None and agrees(found, self._kept):
                self.traces = self._kept.merged(found)
        self._is_complete = not self._to_confirm and not self.missing
        is_new = self.traces.models != (self._kept.models if self._kept else {})
        if self._cache is not None and is_new and not self._to_confirm:
            self._cache.write(self.traces)
            self._kept = self.traces


def trace_for(runner: Runner, folder: Path, inspection: Inspection, history: History, max_s: float) -> Tracing:
    """Tracing beside a search's probes, with what earlier searches have traced.

    Args:
        folder: of the study; the traces of this machine's searches are kept there.
    """
    space, target = history.space, target_of(inspection.device)
    sizes = [int(size) for size in space.choices[BATCH_SIZE]]
    cache = TraceCache(folder, inspection.facts, target, sizes, space.techniques.trained(space.baseline), space.world)
    kept = cache if runner.keeps_traces else None
    return Tracing(runner, lambda: history.space.tracing(), target, kept, max_s, runner.tracer(), space.world)
