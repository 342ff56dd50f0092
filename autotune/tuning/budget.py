"""How long a search and its probes may take, on the runner's clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Outcome
from autotune.study.history import History
from autotune.tuning import finalists

MIN_TIMEOUT_S = 20.0
CHECK_SHARE = 0.1  # of the budget: kept for the answer's check before any check was made
OVERRUN = 1.05  # times the budget that a search may take
TIMEOUT_FACTOR = 6.0  # of the baseline's wall time
FIRST_TIMEOUT_SHARE = 0.4  # of the budget: for a probe before anything is known
UNKNOWN_TIME_SHARE = 0.15  # of the budget: for a probe as long as nothing has run
SLOWEST_TIMED = 0.5  # of the baseline's throughput: what is slower than that is not worth timing
UNDO_SHARE = 0.15  # of the time that exploring and play-off share, at most, to tell what the answer's changes do
END_SHARE = 0.03  # of the budget: after the last probe the answer is put together and written
RECENT = 8  # probes that tell how long the next one takes


@dataclass
class Budget:
    """The time of one search.

    Attributes:
        budget_s: time for everything from start to answer.
        probe_timeout_s: the time-out that the user set for a probe; None lets the search derive one.
        now_s: reads the runner's clock; in a replay it shows the recorded seconds.
        started_s: when the user began to wait, on that clock.
        num_trials: largest number of probes outside the play-off; None for no limit.
        begins: is told of each purpose outside the probes when `split` begins to count it.
        spent_s: seconds by purpose (`split` adds to it).
        lost_s: seconds of probes that ended as a time-out, ended early or killed.
        first_probe_s: seconds from the start to the first probe; None before it.
        shared_from_s: when exploring and the play-off began to share the rest of the time, in seconds from the start.
        keeps_checks: whether time is kept for comparing the finalists with plain fp32.
        kept_probes: for as many probes time is kept, to undo changes of the best.
        check_s: how long the longest comparison has taken, which the next will take again.
        evaluation_s: for what comes after the answer, beyond `budget_s`: finding the batch size for evaluation.
    """

    budget_s: float
    probe_timeout_s: float | None
    now_s: Callable[[], float]
    started_s: float
    num_trials: int | None = None
    begins: Callable[[str], None] = lambda name: None
    spent_s: dict[str, float] = field(default_factory=dict)
    lost_s: float = 0.0
    first_probe_s: float | None = None
    shared_from_s: float = 0.0
    keeps_checks: bool = True
    kept_probes: int = 0
    check_s: float = 0.0
    evaluation_s: float = 0.0

    def keep_for_evaluation(self, share: float) -> None:
        """Keep a share of the time that is left."""
        self.evaluation_s = share * max(0.0, self.budget_s - self.elapsed_s)
        self.budget_s -= self.evaluation_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the user began to wait."""
        return self.now_s() - self.started_s

    @property
    def latest_s(self) -> float:
        """Seconds after the start at which the search should have ended at the latest."""
        return OVERRUN * self.budget_s

    def left_s(self, *, has_answer: bool) -> float:
        """Seconds until a running probe is cut short: one time-out beyond the budget as long as nothing is feasible."""
        if not has_answer:
            return self.budget_s + self.first_timeout_s - self.elapsed_s
        return self.latest_s - max(self._kept_for_checks_s, END_SHARE * self.budget_s) - self.elapsed_s

    @property
    def free_s(self) -> float:
        """Seconds for more probes: until the answer must be checked."""
        return self.budget_s - self._kept_for_checks_s - self.elapsed_s

    @property
    def _kept_for_checks_s(self) -> float:
        """The first comparison may take as long as the inspection."""
        if not self.keeps_checks:
            return 0.0
        return self.check_s or min(self.spent_s.get("inspection", 0.0), CHECK_SHARE * self.budget_s)

    @property
    def first_timeout_s(self) -> float:
        """The time-out of a probe before anything is known."""
        return self.probe_timeout_s or max(MIN_TIMEOUT_S, FIRST_TIMEOUT_SHARE * self.budget_s)

    def timeout_s(self, ran: Outcome | None) -> float:
        """The time-out of a probe, given the outcome of the baseline or of something else that ran."""
        if self.probe_timeout_s is not None:
            return self.probe_timeout_s
        return self.first_timeout_s if ran is None else max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * ran.wall_s)

    def paced(self, settings: ProbeSettings, history: History) -> ProbeSettings:
        """The settings of the next probe: its time-out, and the speed below which it is not worth timing."""
        baseline = history.baseline
        if baseline is not None and baseline.measurement is not None:
            slowest = SLOWEST_TIMED * baseline.measurement.samples_per_s
            return settings.replace(slowest_samples_per_s=slowest, timeout_s=self.timeout_s(baseline))
        ran = next((trial.outcome for trial in reversed(history.searched) if trial.outcome.ok), None)
        timeout_s = self.timeout_s(ran)
        if baseline is not None and ran is None and self.probe_timeout_s is None:
            timeout_s = min(timeout_s, max(MIN_TIMEOUT_S, UNKNOWN_TIME_SHARE * self.budget_s))
        return settings.replace(timeout_s=timeout_s)

    def allows_a_probe(self, history: History) -> bool:
        """Whether there is time for another probe before the play-off. No time is reserved while no config is feasible."""
        num_begun = len(history.searched) - history.num_resumed + len(history.running)
        if self.num_trials is not None and num_begun >= self.num_trials:
            return False
        return self.setup_left_s(history) > 0

    def setup_left_s(self, history: History) -> float:
        """Seconds that another probe before the play-off may take for what only some configs need, such as compiling.

        Nothing is kept for a play-off as long as the baseline alone could take part in it.
        """
        expected_s = self.expected_probe_s(history)
        shared_s = self.budget_s - self.shared_from_s
        match len(history.feasible):
            case 0:
                leave_s = expected_s
            case 1 if history.space.baseline in history.feasible:
                leave_s = 0.0
            case _:
                leave_s = finalists.time_to_leave(expected_s, shared_s) + self._kept_for_undoing_s(expected_s, shared_s)
        return self.free_s - expected_s - leave_s

    def _kept_for_undoing_s(self, probe_s: float, shared_s: float) -> float:
        return min(self.kept_probes * probe_s, UNDO_SHARE * shared_s)

    def allows_a_round(self, round_s: float, number: int) -> bool:
        """Whether there is time for a round of the play-off. Without the first there is no confirmed answer."""
        return round_s < (self.free_s if number else self.left_s(has_answer=True))

    def expected_probe_s(self, history: History) -> float:
        """Seconds that the next probe will take, judged by the latest ones."""
        latest = history.probe_wall_s[-RECENT:]
        return median(latest) if latest else 0.0

    def add_run(self, outcome: Outcome, num_slots: int) -> None:
        """Count the time of a process that ran a probe. A process that shares the machine counts for its share of the slots."""
        training_s, compiling_s = outcome.spent_training_s, outcome.compiling_s
        if outcome.kind is Kind.TIMEOUT:
            self.lost_s += outcome.wall_s
        probes_s = outcome.running_s - training_s
        for name, seconds in (("training", training_s), ("compiling", compiling_s), ("probes", probes_s)):
            self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds / num_slots

    @contextlib.contextmanager
    def split(self, name: str) -> Iterator[None]:
        """Add the time spent inside the block to `spent_s[name]`, and tell that it begins."""
        self.begins(name)
        before_s = self.now_s()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + self.now_s() - before_s
