"""Who plays in the play-off, and how it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autotune.records.config import Config
from autotune.records.measured import Dropped, Measured
from autotune.records.outcome import Outcome
from autotune.study.figures import measured, undisturbed, unrest
from autotune.tuning.evidence import Searched

Ratio = tuple[float, float, float]  # with its 95 % interval
NOTHING = Measured(config={}, samples_per_s=0.0, samples_per_s_ci=(0.0, 0.0), peak_bytes=0, step_s=0.0, num_processes=0)


@dataclass
class Entrant:
    """One config in the play-off.

    Attributes:
        searched: what the search found of it, if that counts.
        wall_s: how long a process of it takes.
        outcomes: of its processes in the play-off, by round.
        failed: why it is out for good: it did not run through within the memory. Empty where it did.
        lost_to: the entrant that is so much better that this one is out, as long as that one runs through.
        probe: its process in the search.
    """

    config: Config
    searched: Searched | None = None
    wall_s: float = 0.0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failed: str = ""
    lost_to: Entrant | None = None
    probe: Outcome | None = None

    @property
    def dropped(self) -> bool:
        """Whether it is out."""
        return bool(self.failed) or self.lost_to is not None

    def rounds(self, figure: Callable[[Outcome], float | None]) -> set[int]:
        """The rounds in which it told a figure."""
        return {number for number, outcome in self.outcomes.items() if outcome.ok and figure(outcome)}

    def rounds_with(self, figure: Callable[[Outcome], float | None], other: Entrant) -> set[int]:
        """The rounds in which both told it."""
        return self.rounds(figure) & other.rounds(figure)

    @property
    def ran(self) -> list[Outcome]:
        """Its processes in the play-off that ran through, in their order."""
        return [outcome for outcome in self.outcomes.values() if outcome.ok]

    def latest(self) -> Outcome | None:
        """Its last process that ran through."""
        return self.ran[-1] if self.ran else self.probe

    def told_by(self) -> list[Outcome]:
        """The processes whose figures are told: the undisturbed ones of the play-off, else of the search, else all of the play-off."""
        return undisturbed(self.ran) or undisturbed([self.probe] if self.probe is not None else []) or self.ran

    @property
    def is_told_by_probe(self) -> bool:
        """Whether what is told of it is what its process in the search found."""
        return any(outcome is self.probe for outcome in self.told_by())

    def least_unrest(self) -> float:
        """How far a disturbance may have moved what is told: 0 where `told_by` holds an undisturbed process, or several, whose
        own spread tells it.
        """
        processes = self.told_by()
        return unrest(processes[0]) if len(processes) == 1 else 0.0

    def measured(self) -> Measured:
        """The throughput over its fresh processes, with the interval between them."""
        return measured(self.config, self.outcomes.values())

    def finalist(self, figures: Mapping[Config, Measured]) -> Measured:
        """What the play-off found of it, with the reason if it failed."""
        ran = any(outcome.measurement for outcome in self.outcomes.values())
        found = figures.get(self.config) or (self.measured() if ran else NOTHING)
        return (
            Dropped(**{**vars(found), "config": self.config.as_dict()}, dropped=self.failed) if self.failed else found
        )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How the play-off stands.

    Attributes:
        answer: the entrant to recommend; None when every entrant failed.
        baseline: None when it did not run, in the search or here.
        candidate: the answer; where that is the baseline, the best of the others, or None.
        gain: merit of the candidate over the baseline's, with its 95 % interval; None without one of them.
        speedup: the same for the throughput, which is the merit where the objective is the speed of a step.
        speedup_std: standard deviation of its logarithm.
        energy: joules a sample of the candidate over the baseline's, with its 95 % interval; None also where they are not known.
        figures: of all who ran. Each speed lies within what its config measured, and `speedup` is a ratio of two of them.
        num_rounds: rounds that were played, those of earlier searches among them.
    """

    answer: Entrant | None
    baseline: Entrant | None
    candidate: Entrant | None
    gain: Ratio | None
    speedup: Ratio | None
    speedup_std: float | None = None
    energy: Ratio | None = None
    entrants: tuple[Entrant, ...]
    figures: Mapping[Config, Measured]
    num_rounds: int

    @property
    def num_together(self) -> int:
        """The rounds that the candidate and the baseline both ran in."""
        if self.candidate is None or self.baseline is None:
            return 0
        return len(self.candidate.outcomes.keys() & self.baseline.outcomes.keys())

    @property
    def num_telling(self) -> int:
        """The rounds that the answer rests on: those beside the baseline, or all of them where that does not run."""
        return self.num_rounds if self.baseline is None else self.num_together

    @property
    def is_decided(self) -> bool:
        """Whether every entrant is out, so that no time would have brought another round."""
        return all(entrant.dropped for entrant in self.entrants)


def failure(outcome: Outcome) -> str:
    """Why a config with this outcome may not be recommended: it failed, or needs too much memory."""
    if outcome.ok:
        found = outcome.measurement
        grows = found is not None and found.long_run_growth_bytes > 0
        need = "its memory still grows: a long run is expected to need" if grows else "it needs"
        return f"{need} more than the memory limit less headroom"
    return ": ".join(filter(None, (str(outcome.kind), outcome.cause)))


def samples_per_joule(outcome: Outcome) -> float | None:
    """Of an outcome that is `ok`; None where its energy is not known."""
    assert outcome.measurement is not None
    joules = outcome.measurement.joules_per_sample
    return None if joules is None else 1 / joules


def inverse(ratio: Ratio) -> Ratio:
    """One over a figure, with its interval."""
    value, low, high = ratio
    return 1 / value, 1 / high, 1 / low


def samples_per_s(outcome: Outcome) -> float:
    """The throughput of an outcome that is `ok`."""
    assert outcome.measurement is not None
    return outcome.measurement.samples_per_s
