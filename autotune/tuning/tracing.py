"""Traces configs between the probes, in slices of the budget, and keeps the traces with the studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autotune import techniques
from autotune.predict.cache import TraceCache, agrees
from autotune.predict.plan import plan_traces
from autotune.predict.traces import Traces
from autotune.records.config import Config
from autotune.runners.runner import Runner


class Tracing:
    """The traces of a space's configs so far.

    Args:
        configs: returns the configs to trace; they change with the space.
        target: the kind of device to predict for.
        cache: where the traces of earlier searches are kept; None keeps none.
        max_s: time for all tracing.
    """

    def __init__(
        self,
        runner: Runner,
        configs: Callable[[], Iterable[Config]],
        target: str,
        cache: TraceCache | None,
        max_s: float,
    ) -> None:
        self.traces = Traces(target=target)
        self.wall_s = 0.0
        self.max_s = max_s
        self._runner = runner
        self._configs = configs
        self._target = target
        self._cache = cache
        self._kept: Traces | None = None
        self._begun = False
        self._is_complete = False

    @property
    def is_done(self) -> bool:
        """Whether every config was traced or could not be, or time is up."""
        return self._is_complete or (self._begun and self.wall_s >= self.max_s)

    @property
    def num_missing(self) -> int:
        """How many combinations of techniques still have to be traced."""
        return len(plan_traces(self._configs()).without(self.traces).labels())

    def advance(self, slice_s: float) -> None:
        """Trace for about `slice_s` seconds, up to the end of the current group."""
        started_s = self._runner.now_s()
        if not self._begun:
            self._begin()
        if self.num_missing:
            configs = list(self._configs())
            left_s = self.max_s - self.wall_s - (self._runner.now_s() - started_s)
            self._trace(configs, self.traces, min(slice_s, max(0.0, left_s)))
        self._is_complete = not self.num_missing
        self.wall_s += self._runner.now_s() - started_s
        if self._cache is not None and self.traces.models != (self._kept.models if self._kept else {}):
            self._cache.write(self.traces)
            self._kept = self.traces

    def _begin(self) -> None:
        """Reuse the traces of an earlier search if plain training still traces to the same."""
        self._begun = True
        self._kept = self._cache.read() if self._cache is not None else None
        if self._kept is None:
            return
        sizes = sorted({config.batch_size for config in self._configs()})
        plain = [techniques.complete({"batch_size": size}) for size in sizes]
        self._trace(plain, self.traces, self.max_s)
        if self.traces.failures:  # what is kept may be right, and is left for a time when this can be told
            self._kept, self._cache = None, None
        elif agrees(self.traces, self._kept):
            self.traces = self._kept.merged(self.traces)

    def _trace(self, configs: list[Config], known: Traces, slice_s: float) -> None:
        left_s = max(0.0, self.max_s - self.wall_s)
        self.traces = self._runner.trace(configs, self._target, left_s, known=known, slice_s=slice_s)
