"""One trial of a study: a config that was or is being probed, why, what was predicted of it and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from autotune.records.config import Config
from autotune.records.formats import Record
from autotune.records.outcome import Outcome

BASELINE, SEARCH, ABLATION, PLAY_OFF = "baseline", "search", "ablation", "play-off"


@dataclass(frozen=True, kw_only=True)
class Prediction(Record):
    """What was predicted of a probe before it ran. Intervals are 95 %.

    Attributes:
        samples_per_s: None before any probe has run, with its interval.
        peak_bytes: comparable with the memory limit; None where nothing is known of it, with its interval.
        chance_to_win: that the config is at least 1 % better than the best known one; None without one.
        chance_to_fit: that its peak is within the limit less headroom.
        reason: why it is probed, in a few words.
    """

    samples_per_s: float | None
    samples_per_s_low: float | None
    samples_per_s_high: float | None
    peak_bytes: int | None
    peak_low_bytes: int | None
    peak_high_bytes: int | None
    chance_to_win: float | None
    chance_to_fit: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A config that is worth a probe.

    Attributes:
        stage: `baseline`, `search`, `ablation` (the best with one change undone) or `play-off`.
        reason: why it is probed, in a few words; empty where the prediction gives the reason.
        round: of the play-off, counted from 0; None elsewhere.
    """

    config: Config
    stage: str = SEARCH
    reason: str = ""
    round: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One finished trial. This is the only record of a trial: the search, the models and the reports all read it.

    Attributes:
        number: counted over the whole search, its play-off included.
        stage, reason, round: of its `Proposal`.
        prediction: what was predicted of it before it ran; None in the play-off, which confirms what is known.
        feasible: it ran, within the memory limit less headroom.
        score: as the study keeps it; larger is better, and the worst there is where the trial is not feasible.
        disturbed: other work on the machine was seen to disturb the timing.
        started: None where the storage does not say.
    """

    number: int
    stage: str
    config: Config
    outcome: Outcome
    feasible: bool
    score: float = 0.0
    reason: str = ""
    prediction: Prediction | None = None
    round: int | None = None
    disturbed: bool = False
    started: datetime | None = None

    @property
    def in_play_off(self) -> bool:
        """Whether it belongs to the play-off, whose figures the search's models do not use."""
        return self.stage == PLAY_OFF

    @property
    def wall_s(self) -> float:
        """Seconds from start to end, process start included."""
        return self.outcome.wall_s
