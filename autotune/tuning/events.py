"""The events of a running search. The search knows nothing about terminals; views implement `Listener`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from autotune.records.config import Config
from autotune.records.outcome import Outcome, Progress
from autotune.records.result import Result
from autotune.records.study import Prediction, Trial
from autotune.techniques import Techniques


@dataclass(frozen=True, kw_only=True)
class SearchStarted:
    """The study is open and the space is known."""

    task: str
    device: str  # in words, e.g. `cpu (AMD EPYC, 2 threads)`
    study: str
    storage: str
    objective: str
    memory_limit_bytes: int
    headroom: float
    budget_s: float
    space: dict[str, tuple[int | str | bool, ...]]  # technique -> choices that are searched
    num_configs: int
    known: tuple[Trial, ...]  # finished probes found in the study, with the best feasible of them and the baseline
    best: tuple[Config, Outcome] | None
    baseline: Outcome | None
    techniques: Techniques  # those of the configs


@dataclass(frozen=True, kw_only=True)
class ProbeStarted:
    """A probe starts.

    Attributes:
        stage: `baseline`, `search`, `ablation` or `play-off`.
        reason: why this config, in a few words.
        prediction: what the models predict for it; None in the play-off, which repeats configs already measured.
    """

    number: int
    stage: str
    config: Config
    reason: str
    prediction: Prediction | None
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class ProbeAdvanced:
    """A running probe has come further, or time has passed."""

    number: int
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class ProbeEnded:
    """A probe ended."""

    trial: Trial
    best: tuple[Config, Outcome] | None  # the best feasible so far
    baseline: Outcome | None
    elapsed_s: float


@dataclass(frozen=True, kw_only=True)
class Working:
    """Something other than a probe begins: `import`, `inspection`, `tracing`, `checks`, `evaluation`."""

    purpose: str


@dataclass(frozen=True, kw_only=True)
class Note:
    """A message for the user: a warning, a dropped technique, a new phase of the search."""

    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchEnded:
    """The search has its answer, be it that an interrupt left it unconfirmed."""

    result: Result


Event = SearchStarted | SearchEnded | ProbeStarted | ProbeAdvanced | ProbeEnded | Working | Note


class Listener:
    """Watches a search; this one ignores everything. Used as a context manager around the search."""

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def on(self, event: Event) -> None:
        """Handle an event. It must not raise and must return at once."""


class Listeners(Listener):
    """Several listeners as one."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def __enter__(self) -> Listeners:
        with ExitStack() as entered:
            for listener in self._listeners:
                entered.enter_context(listener)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._entered.__exit__(*exc_info)  # type: ignore[arg-type]

    def on(self, event: Event) -> None:
        """Pass an event on to each."""
        for listener in self._listeners:
            listener.on(event)
