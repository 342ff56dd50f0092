"""What a running search tells, and how a user or a batch system ends it: Ctrl-C, SIGTERM.

The search knows nothing about terminals; views implement `Listener`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Self

from autotune.records.config import Config
from autotune.records.inspection import Inspection
from autotune.records.outcome import Outcome, Progress
from autotune.records.result import Result
from autotune.records.study import Prediction, Trial
from autotune.study.history import History
from autotune.study.place import Place
from autotune.techniques import Techniques
from autotune.units import plural

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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

    @classmethod
    def of(cls, place: Place, inspection: Inspection, history: History, budget_s: float) -> Self:
        """The beginning of a search."""
        device, objective, space = inspection.device, history.objective, history.space
        number = f"{space.world.size} x " if space.world.size > 1 else ""
        threads = f", {plural(device.num_threads, 'thread')}" if device.num_threads else ""
        return cls(
            task=inspection.facts.name,
            device=f"{number}{device.name} ({device.model}{threads})",
            study=place.study,
            storage=place.storage,
            objective=objective.name,
            memory_limit_bytes=objective.memory_limit_bytes,
            headroom=objective.headroom,
            budget_s=budget_s,
            space=space.in_reach,
            num_configs=space.num_combinations,
            known=history.trials,
            best=history.best,
            baseline=history.baseline,
            techniques=space.techniques,
        )


@dataclass(frozen=True, kw_only=True)
class ProbeStarted:
    """A probe starts.

    Attributes:
        stage: `baseline`, `search`, `ablation` or `play-off`.
        reason: why this config, in a few words.
        prediction: what the models predict for it; None in the play-off, which repeats configs already measured.
        slot: where it runs, of several slots; empty where there is one.
    """

    number: int
    stage: str
    config: Config
    reason: str
    prediction: Prediction | None
    elapsed_s: float
    slot: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeAdvanced:
    """A running probe has come further, or time has passed."""

    number: int
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class ProbeEnded:
    """A probe ended.

    Attributes:
        best: the best feasible config so far; in the play-off its leader, or the baseline where that is probably better.
        chance: that it is better than the baseline; None where it is the baseline, or that does not run.
    """

    trial: Trial
    best: tuple[Config, Outcome] | None
    baseline: Outcome | None
    elapsed_s: float
    chance: float | None = None


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
    """The search has its answer, even if an interrupt left it unconfirmed."""

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

    def tell(self, text: str) -> None:
        """Hand on a message for the user."""
        self.on(Note(text=text))

    def warn(self, text: str) -> None:
        """Hand on a warning."""
        self.on(Note(text=text, warning=True))


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


@dataclass
class Interruption:
    """What asks a search to end.

    Attributes:
        tell: called with a message for the user when the first signal was noted.
        is_ready: whether there is a search that can end after its running probe; before that a signal ends it at once.
    """

    tell: Callable[[str], None]
    is_ready: bool = False
    is_asked: bool = False

    def __call__(self) -> bool:
        """Whether the search was asked to end."""
        return self.is_asked

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take note of the first signal; the second, which kills the running probe, raises KeyboardInterrupt."""
        if self.is_asked or not self.is_ready:
            raise KeyboardInterrupt
        self.is_asked = True
        again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.tell(f"ending after this probe; {again} again to end now")


@contextlib.contextmanager
def interruptible(tell: Callable[[str], None]) -> Iterator[Interruption]:
    """Let Ctrl-C and SIGTERM end the search; in a thread other than the main one they are left as they are."""
    interruption = Interruption(tell)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.on_signal) for number in SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
