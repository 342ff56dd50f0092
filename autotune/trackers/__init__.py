"""Trackers: listeners that write each probe, and the answer, to the place where a user keeps other experiments.

Each tracker is a file; other packages add theirs through entry points.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread
from typing import Any, ClassVar, Self

from autotune import plugins
from autotune.errors import ConfigError, in_one_line
from autotune.records.config import Choice
from autotune.records.study import Trial
from autotune.tuning.events import Event, Listener, ProbeEnded, SearchEnded, SearchStarted

GROUP = "autotune.trackers"
WAIT_S = 10.0  # for what is not kept when the search has ended: a server may never answer
_LOG = logging.getLogger("autotune")
_FIGURES = ("samples_per_s", "samples_per_s_low", "samples_per_s_high", "step_s", "peak_bytes", "joules_per_sample")


@dataclass(frozen=True, kw_only=True)
class Start:
    """The beginning of a search. `facts` are its device, objective, memory limit and the like."""

    study: str
    task: str
    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A probe that has ended.

    Attributes:
        number: the probe's number in the study.
        config: the whole config dict.
        figures: `samples_per_s` with its interval, `step_s`, `peak_bytes`, `joules_per_sample`, as far as they were measured;
            `wall_s`, `feasible` (1 or 0).
        facts: `stage`, `outcome` and its `cause`.
    """

    number: int
    config: dict[str, Choice]
    figures: dict[str, float]
    facts: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The search's answer.

    Attributes:
        figures: `samples_per_s`, `peak_bytes`, `joules_per_sample`, `speedup` with its interval as far as they are known,
            `probes`, `wall_s`.
        facts: `verdict`, `limit` (the resource that limits the speed) and `warnings`.
        text: the whole answer in words, as `autotune search` prints it.
    """

    config: dict[str, Choice]
    figures: dict[str, float]
    facts: dict[str, str]
    text: str


class Tracker(Listener):
    """Writes the points of a search somewhere. It does so on its own thread, so that a slow or absent server does not delay the search.

    `begin` is called first, then `point` after each probe, `answer` and, however the search ended, `finish`. `autotune search --track NAME`
    finds a tracker by its file in this package; another package offers one as an entry point in the group `autotune.trackers`.

    Attributes:
        name: the NAME of `--track NAME[:WHERE]`.
        summary: one line for the help.
        package: the package that it imports.
        install: pip's name for that package.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    package: ClassVar[str]
    install: ClassVar[str]

    def __init__(self, where: str = "") -> None:
        self.where = where

    def __enter__(self) -> Self:
        """Start the tracker's thread.

        Raises:
            ConfigError: the tracker's package is not installed.
        """
        if find_spec(self.package) is None:
            raise ConfigError(
                f"--track {self.name} needs {self.install}, which is not installed; `pip install {self.install}` adds it"
            )
        self._began = False
        self._todo = SimpleQueue[Callable[[], None] | None]()
        # a daemon, for which the interpreter does not wait at its end
        self._thread = Thread(target=self._work, args=(self._todo,), name=f"autotune-{self.name}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Wait until everything is kept, and not for long: the answer is told after that."""
        if self._began:
            self._todo.put(self.finish)
        self._todo.put(None)
        self._thread.join(WAIT_S)
        if self._thread.is_alive():
            _LOG.warning("tracking by %s did not end within %g s, and is waited for no longer", self.name, WAIT_S)

    def on(self, event: Event) -> None:
        """Pass an event on to the thread, if it is one of the three kinds that trackers keep."""
        if isinstance(event, SearchStarted):
            self._began = True
            self._todo.put(partial(self.begin, _start(event)))
        elif isinstance(event, ProbeEnded):
            self._todo.put(partial(self.point, _point(event.trial)))
        elif isinstance(event, SearchEnded):
            self._todo.put(partial(self.answer, _answer(event)))

    def _work(self, todo: SimpleQueue[Callable[[], None] | None]) -> None:
        """Write one after the other, until there is no more. A failure is logged, and nothing is written after it."""
        try:
            while (keep := todo.get()) is not None:
                keep()
        except Exception as error:
            _LOG.warning("tracking by %s ends here, the search goes on: %s", self.name, in_one_line(error))

    @abstractmethod
    def begin(self, start: Start) -> None:
        """A search begins. It may come again, for a search that trains something else of the task; later points belong to that one."""

    @abstractmethod
    def point(self, point: Point) -> None:
        """A probe ended."""

    @abstractmethod
    def answer(self, answer: Answer) -> None:
        """The search has its answer."""

    @abstractmethod
    def finish(self) -> None:
        """The search has ended; without an answer, if none came before."""


@cache
def trackers() -> dict[str, type[Tracker]]:
    """Every tracker by its name.

    Raises:
        ConfigError: a tracker of another package cannot be used.
    """
    found = plugins.find_plugins(__name__, Tracker, GROUP, ("name", "summary", "package", "install"))  # type: ignore[type-abstract]
    return {name: type(tracker) for name, tracker in found.items()}


def tracker(text: str) -> Tracker:
    """The tracker that `NAME` or `NAME:WHERE` stands for.

    Raises:
        ConfigError: there is no tracker of that name.
    """
    name, _, where = text.partition(":")
    if name not in trackers():
        there = "; ".join(f"{name}: {kind.summary}" for name, kind in trackers().items())
        raise ConfigError(
            f"--track {text!r}: {name!r} is not a known tracker; expected NAME or NAME:WHERE, with one of {there}"
        )
    return trackers()[name](where)


def _start(event: SearchStarted) -> Start:
    names = ("device", "objective", "memory_limit_bytes", "headroom", "budget_s", "storage", "num_configs")
    return Start(study=event.study, task=event.task, facts={name: getattr(event, name) for name in names})


def _point(trial: Trial) -> Point:
    outcome = trial.outcome
    figures = {} if outcome.measurement is None else {name: getattr(outcome.measurement, name) for name in _FIGURES}
    found = {name: float(figure) for name, figure in figures.items() if figure is not None}
    return Point(
        number=trial.number,
        config=trial.config.as_dict(),
        figures={**found, "wall_s": outcome.wall_s, "feasible": float(trial.feasible)},
        facts={"stage": trial.stage, "outcome": str(outcome.kind), "cause": outcome.cause},
    )


def _answer(event: SearchEnded) -> Answer:
    result = event.result
    low, high = result.speedup_ci or (None, None)
    figures = {
        "samples_per_s": result.samples_per_s,
        "peak_bytes": float(result.peak_bytes),
        "joules_per_sample": result.energy.joules_per_sample,
        "speedup": result.speedup,
        "speedup_low": low,
        "speedup_high": high,
        "probes": float(result.cost.probes),
        "wall_s": result.cost.wall_s,
    }
    return Answer(
        config=dict(result.config),
        figures={name: figure for name, figure in figures.items() if figure is not None},
        facts={"verdict": result.verdict, "limit": result.reasons.limit, "warnings": "\n".join(result.warnings)},
        text=result.summary(),
    )
