"""What a study keeps, as plain data in Optuna's attributes: for each probed config the reason, the prediction and the outcome; and
facts of the whole study.

Each field is an attribute of its own, under its name. Fields with a default may be missing in older studies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from autotune.records.check import Comparison
from autotune.records.config import ALONE, Choice, Config, World
from autotune.records.formats import Record
from autotune.records.inspection import ModelSignature
from autotune.records.measured import Evaluated
from autotune.records.outcome import Outcome
from autotune.records.recheck import Recheck
from autotune.records.result import Result

BASELINE, SEARCH, ABLATION, PLAY_OFF = "baseline", "search", "ablation", "play-off"
DECIDING = "deciding"  # of no probe: as long as it runs, its search holds the play-off of a study that several share


@dataclass(frozen=True, kw_only=True)
class Prediction(Record):
    """What was predicted of a probe before it ran. Intervals are 95 %.

    Attributes:
        samples_per_s: throughput; it and its interval are None before any probe has run.
        peak_bytes: comparable with the memory limit; it and its interval are None where nothing is known.
        chance_to_win: probability that the config is at least 1 % better than the best known one; None if none is known.
        chance_to_fit: probability that its peak is within the limit less headroom.
        reason: why it is probed, in a few words.
        world: the processes that are to train the config together.
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
    world: World = ALONE


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A config that is worth a probe.

    Attributes:
        stage: `baseline`, `search`, `ablation` (the best with changes undone) or `play-off`.
        reason: why it is probed, in a few words; empty where the prediction gives the reason.
        round: round of the play-off, counted from 0; None in other stages.
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
        stage, reason, round: as in its `Proposal`.
        prediction: what was predicted before it ran; None in the play-off, which confirms what is known.
        feasible: whether the config may be recommended (`Objective.feasible`).
        score: the study's score, where larger is better; the objective's worst where the trial is not feasible.
        disturbed: whether other work on the machine was seen to disturb the timing.
        started: when it began; None where the storage does not say.
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
        """Whether it belongs to the play-off; the search's models do not use its figures then."""
        return self.stage == PLAY_OFF

    @property
    def wall_s(self) -> float:
        """Seconds from start to end, process start included."""
        return self.outcome.wall_s


@dataclass(frozen=True, kw_only=True)
class Fingerprint(Record):
    """What must be equal for measurements to be comparable. A field is None where it does not apply, or an older study did not keep it.

    Attributes:
        autotune, torch, driver: versions.
        techniques: their names; `choices`: the choices of those whose choices have no order, as text.
        task: hash of its source. Its sizes are kept beside it, because a model file may read them from elsewhere.
        device: its name and model.
        environment: those variables that change a device's arithmetic and are set.
    """

    autotune: str | None = None
    techniques: tuple[str, ...] | None = None
    choices: dict[str, tuple[str, ...]] | None = None
    task: str | None = None
    num_parameters: int | None = None
    num_trainable: int | None = None
    parameter_bytes: int | None = None
    batch: tuple[str, ...] | None = None
    device: str | None = None
    num_threads: int | None = None
    total_bytes: int | None = None
    driver: str | None = None
    torch: str | None = None
    global_batch: int | None = None
    num_processes: int | None = None  # None for one, as in older studies
    memory_limit_bytes: int | None = None
    headroom: float | None = None
    objective: str | None = None
    train_steps: int | None = None
    train_epochs: float | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild it. Older studies keep environment variables beside the other fields, and unset ones as well."""
        return super().from_dict(
            {"environment": {key: data[key] for key in data if key.isupper() and data[key]}, **data}
        )


@dataclass(frozen=True, kw_only=True)
class SearchFacts(Record):
    """What a search says of itself when it opens its study.

    Attributes:
        task: its name; empty where the study does not say.
        model: the model file, and the name of the Task in it; empty for a task built in Python.
        asked: the options that must be given again to run the answer.
        space: technique -> choices that are searched.
        unsupported: technique -> why it, or a choice of it, is not searched; `technique=choices` where these alone are not.
        baseline_config: empty where the search did not get that far.
        limited_beside: name of an earlier study of the same task with another memory limit; empty where there is none.
        ranked_beside: name of the user's own study, where this one trains something else; else empty.
        signature: the model's signature; None where the model was not seen.
    """

    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    task: str = ""
    model: str = "model.py"
    asked: dict[str, str | int] = field(default_factory=dict)
    objective: str = "throughput"
    memory_limit_bytes: int = 0
    headroom: float = 0.0
    space: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    baseline_config: dict[str, Choice] = field(default_factory=dict)
    limited_beside: str = ""
    ranked_beside: str = ""
    signature: ModelSignature | None = None


@dataclass(frozen=True, kw_only=True)
class Traced(Record):
    """How far memory was traced: number of groups of configs, what could not be traced -> why, and the seconds it took."""

    num_groups: int
    failures: dict[str, str]
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Neighbours(Record):
    """How probes disturb each other that run at once.

    Attributes:
        slots: names of the slots that there are.
        most: probes that run at once.
        losses: share of its speed that the baseline loses beside others: (probes at once, share), in the order in which it was compared.
        left_out: which devices are no slots, and which slots died, and why.
    """

    slots: tuple[str, ...]
    most: int
    losses: tuple[tuple[int, float], ...] = ()
    left_out: tuple[str, ...] = ()

    def compared(self, width: int, loss: float) -> Self:
        """With one more comparison, of so many probes at once."""
        return replace(self, losses=(*self.losses, (width, loss)))

    def at_most(self, width: int) -> Self:
        """With no more than so many probes at once, and at least one."""
        return replace(self, most=max(1, width))

    def slowed(self, outcome: Outcome) -> str:
        """Why the figures of a probe weigh less, in words: as many at once slowed each other down; empty where they did not."""
        width = 1 + len({label.rpartition(" on ")[2] for label in outcome.beside})
        losses = [(number, loss) for number, loss in self.losses if self.most < number <= width]
        if not losses:
            return ""
        number, loss = min(losses)
        return f"{number} probes at once slow each other down by {loss:.1%}"


@dataclass(frozen=True, kw_only=True)
class OneDeviceRun(Record):
    """A process on one of several devices, in a round of the play-off of all of them. It is no trial of their space.

    Attributes:
        config: of this process.
        round: number of the round.
    """

    config: dict[str, Choice]
    round: int
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class StudyFacts(SearchFacts):
    """What the last search said of itself, and what all searches of the study found apart from probes.

    Attributes:
        format: the study's format; 1 where it does not say.
        searched_at: when the last search began, in UTC.
        no_answer: why the last search found none; empty where it did, or did not end.
        result: the last answer.
        warnings: warnings of the last answer.
        whole_rounds: numbers of the play-off's rounds that were not cut short.
        checks: every comparison that finished.
        evaluated: techniques, as text -> every process that evaluated with them.
        neighbours: how probes that ran at once disturbed each other; None where there was one slot.
        rechecks: what later runs of the answers saw.
        one_device: every process on one of several devices that still says something of it.
    """

    format: int = 1
    searched_at: str = ""
    no_answer: str = ""
    result: Result | None = None
    warnings: tuple[str, ...] = ()
    whole_rounds: tuple[int, ...] = ()
    checks: tuple[Comparison, ...] = ()
    evaluated: dict[str, tuple[Evaluated, ...]] = field(default_factory=dict)
    traces: Traced | None = None
    neighbours: Neighbours | None = None
    rechecks: tuple[Recheck, ...] = ()
    one_device: tuple[OneDeviceRun, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Owner(Record):
    """A search that runs, and its process.

    Attributes:
        host: the machine, or the part of it in which process numbers are unique.
        started: when the process started, which tells it from a later process with the same number.
        search: number of the search among those of the process, from 1; 0 where it is not said.
    """

    host: str
    pid: int
    started: str
    search: int = 0

    def words(self) -> str:
        """`on gpu3 (process 4711)`."""
        return f"on {self.host.partition(' ')[0]} (process {self.pid})"


@dataclass(frozen=True, kw_only=True)
class BegunTrial(Record):
    """A trial before it has ended.

    Attributes:
        number: counted over search and play-off; None up to format 2, where Optuna's own number counts over both.
        stage, reason, round: as in its `Proposal`.
        owner: the process that runs it.
        seen_at_s: when the owner last showed that it is alive, in seconds since 1970.
    """

    config: dict[str, Choice] = field(default_factory=dict)
    stage: str = SEARCH
    reason: str = ""
    number: int | None = None
    prediction: Prediction | None = None
    round: int | None = None
    owner: Owner | None = None
    seen_at_s: float = 0.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild it. In studies of format 1 a prediction is called a forecast."""
        return super().from_dict({"prediction": data.get("forecast"), **data})


@dataclass(frozen=True, kw_only=True)
class EndedTrial(Record):
    """How a trial ended. The outcome is written last: a trial that has one has ended, whether Optuna knows it or not.

    Attributes:
        ended: the outcome's kind, or `over the limit`.
        peak_bytes: peak of its measurement; None where nothing was measured.
    """

    feasible: bool
    ended: str = ""
    score: float = 0.0
    disturbed: bool = False
    peak_bytes: int | None = None
    outcome: Outcome
