"""What studies of like models teach a search: factors of techniques, what to try first, what failed, and how long compiling took.

Each study's own probes are fitted by the time model; `pooling.py` says how their findings become priors, and the time model lets go of
them where the probes speak against them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autotune.errors import ConfigError
from autotune.prediction.cost import Probes
from autotune.prediction.memory import MemoryEstimate, MemoryModel
from autotune.prediction.pooling import Learned, Parameter, Said, Spread
from autotune.prediction.time import TERMS, TimeModel
from autotune.records.config import ACCUMULATION, BATCH_KEYS, BATCH_SIZE, Choice, Config
from autotune.records.objective import Throughput
from autotune.records.outcome import Bound, Kind, Measurement, Outcome
from autotune.records.priors import Circumstances, PriorStudy, PriorTrial
from autotune.space import Space
from autotune.techniques import Techniques

LEAST = 0.1  # likeness below which a study is not looked at
MOST_STUDIES = 8  # the most alike; each takes some 10 ms to fit
FIRST_LEAST = (
    0.3  # likeness from which a study's best config is worth the first probe, and compiling takes about as long
)
# a technique or a choice that is gone; numpy's LinAlgError is a ValueError
FORGOTTEN = (ConfigError, ArithmeticError, ValueError)
HELD = 0.45  # chance that what a study of the same model taught holds here: less than one half, so that a probe has to speak for it

# How far a config's peak over the baseline's lies apart in two studies: 5 % for six models with 4 to 16 times the samples in a step.
# How much more it is for unlike models is assumed.
PEAK = Spread(alike=0.05, unlike=0.3)

# The share of the computing time that a choice is expected to leave, up to which its gain is large: bf16 and `keep_heap` are such
# choices. On six tasks the best config of a study without one of them reached 44 to 98 % of the best where it can be had. For smaller
# gains, and for compiling, which a short search leaves out, this is not known.
LARGE_GAIN = 0.87


@dataclass(frozen=True)
class Lesson:
    """A study and how alike it is, from 0 to 1: in all, and as far as memory is concerned."""

    study: PriorStudy
    likeness: float
    in_memory: float

    @staticmethod
    def of(study: PriorStudy, here: Circumstances, *, same_model: bool = False) -> Lesson:
        """Make the lesson that a study holds for a search in these circumstances.

        Args:
            same_model: whether to take the models for alike, whatever they are.
        """
        there = study.circumstances
        return Lesson(
            study,
            here.likeness(there, same_model=same_model),
            here.likeness_in_memory(there, same_model=same_model),
        )


@dataclass(frozen=True)
class First:
    """The best config of a study.

    Attributes:
        study: the study's name.
        choices: its techniques' choices and its micro batch.
        speed_up: what the study's probe of it told, over the study's baseline; None where it was not measured there.
    """

    study: str
    choices: Mapping[str, Choice]
    speed_up: float | None


@dataclass(frozen=True)
class Taught:
    """What earlier studies taught a search. Every figure orders candidates or narrows a prior; none counts as measured.

    Attributes:
        lessons: the most alike first.
        techniques: those of the search.
        objective: the search's.
        choices: technique -> choices that the search may try, by which `first` is chosen; None where the user has named the study.
    """

    lessons: tuple[Lesson, ...] = ()
    techniques: Techniques = field(default_factory=lambda: Techniques(()))
    objective: str = Throughput.name
    choices: Mapping[str, Sequence[Choice]] | None = None

    @staticmethod
    def by(lessons: Sequence[Lesson], techniques: Techniques, objective: str = Throughput.name) -> Taught:
        """By the most alike of these studies."""
        alike = sorted((one for one in lessons if one.likeness >= LEAST), key=lambda one: -one.likeness)
        return Taught(tuple(alike[:MOST_STUDIES]), techniques, objective)

    @property
    def chance_to_hold(self) -> float:
        """Chance that the factors hold for this search, before any probe of it."""
        return HELD * max((one.likeness for one in self.lessons), default=0.0)

    def said(self, space: Space) -> dict[Parameter, list[Said]]:
        """What the studies say of the time model's parameters, with shares at the space's baseline."""
        found: dict[Parameter, list[Said]] = {}
        models = Counter(lesson.study.circumstances.signature for lesson in self.lessons)
        for lesson, learned in self._learned:
            shifts = _share_shifts(lesson.study, space)
            for parameter, one in learned.items():
                moved = replace(one, mean=one.mean + (0.0 if parameter[1] else shifts[parameter[0]]))
                said = Said(
                    learned=moved, likeness=lesson.likeness, shared_by=models[lesson.study.circumstances.signature]
                )
                found.setdefault(parameter, []).append(said)
        return found

    @cached_property
    def first(self) -> First | None:
        """The best config of the most alike study that could try what usually gains much here; None where no study is alike enough.

        Of a study with another objective it is the fastest, if that is what this search is for, and none otherwise.
        """
        if (lesson := self._of_first) is None:
            return None
        study = lesson.study
        best = study.answer if study.objective == self.objective else {}
        best = best or max(study.trials, key=lambda trial: trial.speed).config
        choices = {n: c for n, c in best.items() if n in self.techniques or n == BATCH_SIZE}
        speed_up = next((one.speed for one in study.trials if one.config == best and one.speed), None)
        return First(study.name, choices, speed_up)

    @cached_property
    def _of_first(self) -> Lesson | None:
        """The study that `first` is from."""
        for lesson in self.lessons:
            agrees = lesson.study.objective == self.objective
            is_alike = lesson.likeness >= FIRST_LEAST and (agrees or self.objective == Throughput.name)
            if is_alike and not self._lacked(lesson.study):
                return lesson
        return None

    def _lacked(self, study: PriorStudy) -> bool:
        """Whether a study could not try a choice that usually gains much here: bf16 on a newer processor, or a later technique."""
        for name in self.techniques:
            technique, here = self.techniques[name], (self.choices or {}).get(name, ())
            there = {*study.space.get(name, ()), study.baseline.get(name, technique.off)}
            usual = next((choice for choice in technique.likely if choice in here), technique.off)
            is_new = usual != technique.off and usual not in there
            if is_new and technique.expectation(usual, here).compute.typical <= LARGE_GAIN:
                return True
        return False

    def peaks(
        self, configs: Sequence[Config], baseline: Config, baseline_bytes: int, outside_bytes: int
    ) -> list[MemoryEstimate | None]:
        """Estimate the peak of each config from the study that `first` is from: what it took beside that study's baseline.

        Args:
            baseline: of this search.
            baseline_bytes: that its baseline took.
            outside_bytes: memory of a probe's process before it builds the model.

        Returns:
            None for a config with a choice that was not measured there, and for all where that is so of the baseline.
        """
        nothing: list[MemoryEstimate | None] = [None] * len(configs)
        if (lesson := self._of_first) is None:
            return nothing
        try:
            probes = _probes_of(lesson.study, self.techniques, baseline_bytes)
            measured = [(config, o) for config, o in probes if o.measurement is not None and o.measurement.peak_bytes]
            tried = {(name, config[name]) for config, _ in measured for name in self.techniques}
            model = MemoryModel(None, outside_bytes, _space_of(lesson.study, self.techniques), measured)
            *found, plain = model.estimates([*configs, baseline])
            if plain is None or not self._is_among(tried, baseline):
                return nothing
            between = PEAK.alike**2 - PEAK.unlike**2 * math.log(lesson.in_memory)
            return [
                MemoryEstimate(
                    peak_bytes=int(one.peak_bytes / plain.peak_bytes * baseline_bytes),
                    log_std=math.sqrt(one.log_std**2 + plain.log_std**2 + between),
                )
                if one is not None and self._is_among(tried, config)
                else None
                for config, one in zip(configs, found, strict=True)
            ]
        except FORGOTTEN:
            return nothing

    def _is_among(self, tried: Set[tuple[str, Choice]], config: Config) -> bool:
        """Whether all choices of a config's techniques are among those that were tried."""
        return all((name, config[name]) in tried for name in self.techniques)

    @cached_property
    def blame(self) -> Mapping[tuple[str, Choice], float]:
        """How much each choice is to blame for crashes and hangs of like studies: 1 for all of one in a study of the same model."""
        found: dict[tuple[str, Choice], float] = {}
        for lesson in self.lessons:
            trials = lesson.study.trials
            ran = {switch for trial in trials if trial.kind is Kind.OK for switch in trial.config.items()}
            for trial in filter(_broke, trials):
                suspects = {switch for switch in trial.config.items() if switch[0] not in BATCH_KEYS} - ran
                for switch in suspects:
                    found[switch] = max(found.get(switch, 0.0), lesson.likeness / len(suspects))
        return found

    def compile_cold_s(self, name: str, choice: Choice, device: str) -> float:
        """Seconds that the most alike study on this device took to compile with a choice of a technique; 0 where none did."""
        for lesson in self.lessons:
            if lesson.likeness >= FIRST_LEAST and lesson.study.circumstances.device == device:
                took = [trial.compile_cold_s for trial in lesson.study.trials if trial.config.get(name) == choice]
                if longest := max(took, default=0.0):
                    return longest
        return 0.0

    @cached_property
    def _learned(self) -> list[tuple[Lesson, dict[Parameter, Learned]]]:
        """What the probes of each study say."""
        return [(lesson, _learn(lesson.study, self.techniques)) for lesson in self.lessons]


NOTHING_TAUGHT = Taught()


def _share_shifts(study: PriorStudy, space: Space) -> dict[str, float]:
    """Term -> what is added to its log share at the study's baseline, to have it at the space's."""
    ours, theirs = space.baseline, Config(tuple(study.baseline.items()))
    batch = np.array([ours.batch_size / theirs.batch_size])
    samples = np.array([ours.samples_per_step / theirs.samples_per_step])
    return {term.name: float(np.log(term.scale(batch, samples, np.ones(1)))[0]) for term in TERMS}


def _learn(study: PriorStudy, techniques: Techniques) -> dict[Parameter, Learned]:
    """What a study's probes alone say of the time model's parameters; nothing where they cannot be fitted any more."""
    try:
        space = _space_of(study, techniques)
        return TimeModel(space, _probes_of(study, techniques)).learned()
    except FORGOTTEN:
        return {}


def _space_of(study: PriorStudy, techniques: Techniques) -> Space:
    baseline = techniques.complete(study.baseline)
    choices = {name: found for name, found in study.space.items() if name in techniques or name in BATCH_KEYS}
    return Space(
        techniques=techniques,
        choices={**{name: (baseline[name],) for name in techniques}, **choices},
        supported=choices,
        baseline=baseline,
        global_batch=None,
        accumulations=frozenset(trial.config[ACCUMULATION] for trial in study.trials),
        fixed={},
        untraceable={},
    )


def _probes_of(study: PriorStudy, techniques: Techniques, baseline_bytes: int = 0) -> Probes:
    known = {*techniques, *BATCH_KEYS}
    return [
        (techniques.complete({n: c for n, c in trial.config.items() if n in known}), _outcome_of(trial, baseline_bytes))
        for trial in study.trials
    ]


def _outcome_of(trial: PriorTrial, baseline_bytes: int) -> Outcome:
    """A trial as the outcome of a probe, in units in which the baseline trains one sample a second.

    Args:
        baseline_bytes: bytes that the baseline takes; 0 where memory is not asked for.
    """
    if not trial.speed:
        bound = Bound(samples_per_s_high=trial.speed_bound, peak_bytes_low=1) if trial.speed_bound else None
        return Outcome(kind=trial.kind, bound=bound)
    samples = math.prod(int(trial.config[name]) for name in BATCH_KEYS)
    return Outcome(
        kind=trial.kind,
        measurement=Measurement(
            samples_per_s=trial.speed,
            samples_per_s_low=trial.speed_low,
            samples_per_s_high=trial.speed_high,
            step_s=samples / trial.speed,
            peak_bytes=int(trial.peak * baseline_bytes),
            block_samples_per_s=(),
            num_steps=0,
            setup_s=0.0,
            warmup_s=0.0,
            timed_s=0.0,
            phases_s={name: share * samples for name, share in trial.phases.items()},
        ),
    )


def _broke(trial: PriorTrial) -> bool:
    """Whether a config crashed, hung or failed, for a reason other than its memory or its speed."""
    return trial.kind in (Kind.CRASHED, Kind.ERROR, Kind.NONFINITE) or (
        trial.kind is Kind.TIMEOUT and trial.speed_bound is None
    )
