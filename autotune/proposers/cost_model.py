"""Proposes the config that the cost models expect to gain most within the memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import TypeVar

from autotune.prediction.cost import Probes
from autotune.prediction.memory import MemoryModel
from autotune.prediction.priors import NOTHING_TAUGHT, Taught
from autotune.prediction.time import Roofline, TimeModel
from autotune.prediction.traces import Traces
from autotune.proposers.acquisition import Acquisition
from autotune.proposers.design import StartingDesign
from autotune.records.config import Config
from autotune.records.device import NO_COMMUNICATORS, NOT_MEASURED, Calibration, Communicators
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.records.study import Prediction, Proposal
from autotune.space import Space
from autotune.study.history import History

T = TypeVar("T")

LIKELY = 0.5
EASILY = 0.5  # of the usable memory: a config that is predicted to need no more would fit if it needed twice as much
CLEARLY = 1.05  # times another's merit: single probes differ by some per cent
AS_TOLD = math.log(1.25)  # two speed-ups of one config that differ by less are about the same
ARITHMETIC = (ArithmeticError, ValueError)  # numpy's LinAlgError is a ValueError


class CostModel:
    """Predicts any config from the history, and proposes configs by these predictions.

    The same history, space, predicted peaks and seed give the same proposal.

    Args:
        peaks: returns the traced peaks so far, or None if the user's model cannot be traced.
        outside_bytes: memory of a probe's process before it builds the model.
        seed: for the random configs from which a large space is climbed.
        tell: called once with a message if the cost models cannot be computed and the starting design replaces them.
        calibration: of the device.
        communicators: what a process of a world holds beside `outside_bytes`.
        taught: what like studies taught.
        gradients_bytes: of all trained parameters, where that is known.
    """

    def __init__(
        self,
        peaks: Callable[[], Traces | None],
        outside_bytes: int,
        seed: int = 0,
        tell: Callable[[str], None] = lambda text: None,
        calibration: Calibration = NOT_MEASURED,
        communicators: Communicators = NO_COMMUNICATORS,
        taught: Taught = NOTHING_TAUGHT,
        gradients_bytes: int = 0,
    ) -> None:
        self._communicators, self._gradients_bytes = communicators, gradients_bytes
        self._calibration = calibration
        self.taught = taught
        self._peaks = peaks
        self._outside_bytes = outside_bytes
        self._seed = seed
        self._tell = tell
        self._last: tuple[tuple[Space, Traces | None, Probes], Acquisition] | None = None
        self._fallback = StartingDesign()
        self._is_told = False

    @cached_property
    def untaught(self) -> CostModel:
        """The model without what like studies taught: what is told of the answer, and what plays for it, rest on this study alone."""
        if not self.taught.lessons:
            return self
        new = copy(self)
        new.taught, new._last = NOTHING_TAUGHT, None
        return new

    def propose(self, history: History) -> Proposal | None:
        """The config to probe next; None if no config has more than a small chance to beat the best.

        Probes that run count as if they had found what is predicted of them, so that those at once are not all the same. Source:
        the kriging believer of Ginsbourger, Le Riche and Carraro, Kriging Is Well-Suited to Parallelize Optimization (2010).
        """

        def next_config(models: Acquisition) -> Proposal | None:
            if pending := models.believed(sorted(history.in_flight, key=str)):
                models = self._fitted_with(history, [*history.evidence, *pending], models.memory)
            found = models.next(history.admissible())
            return None if found is None else Proposal(config=found)

        return self._ask(history, next_config, lambda: self._fallback.propose(history))

    def hoped_for(self, history: History) -> Config | None:
        """The config that would be proposed if all that was not traced fitted; None if there is none, or it cannot be computed."""

        def next_config(models: Acquisition) -> Config | None:
            hopeful = self._fitted_with(history, history.evidence, models.memory.of_traces_alone())
            return hopeful.next(history.admissible())

        return self._ask(history, next_config, lambda: None)

    def predict(self, history: History, config: Config) -> Prediction | None:
        """The prediction for a config; None if it cannot be computed."""
        return self._ask(history, lambda models: models.predict(config), lambda: None)

    def expected_gain(self, history: History, config: Config) -> float | None:
        """The expected gain of a config over the best, as a logarithm; None where nothing is known to fit, or it cannot be computed."""
        return self._ask(history, lambda models: models.expected_gain(config), lambda: None)

    def chance_to_be_better(self, history: History, config: Config, other: Config) -> float | None:
        """The chance that a config is better than another, both of which have run; None if it cannot be computed."""
        return self._ask(history, lambda models: models.chance_to_be_better(config, other), lambda: None)

    def is_likely_to_fit(self, history: History, config: Config) -> bool:
        """Whether a config is more likely to fit than not. A config without a prediction counts as likely."""
        prediction = self.predict(history, config)
        return prediction is None or prediction.chance_to_fit > LIKELY

    def likely_to_fit_as_taught(self, history: History, configs: Sequence[Config]) -> list[Config]:
        """Those that are likely to fit, also by the memory that configs took in the study of `taught.first`.

        Where that contradicts what is known here, what needs more counts: that study may have trained on other samples, and what libraries
        keep for them may not be known here yet.
        """
        own = self._ask(history, lambda models: models.memory.estimates(configs), lambda: None)
        plain = history.baseline.measurement if history.baseline is not None else None
        if own is None or plain is None:
            return [config for config in configs if self.is_likely_to_fit(history, config)]
        told = self.taught.peaks(configs, history.space.baseline, plain.long_run_peak_bytes, self._outside_bytes)
        usable = history.objective.usable_bytes
        found = []
        for config, here, there in zip(configs, own, told, strict=True):
            known = [one for one in (here, there) if one is not None]
            if here is not None and there is not None and here.agrees_with(there):
                known = [here.pooled(there)]
            if all(one.chance_within(usable) > LIKELY for one in known):
                found.append(config)
        return found

    def fits_easily(self, history: History, config: Config) -> bool:
        """Whether a config would fit if it needed twice as much as the most that is predicted; false without a prediction."""
        prediction = self.predict(history, config)
        if prediction is None or prediction.peak_high_bytes is None:
            return False
        return prediction.peak_high_bytes <= EASILY * history.objective.usable_bytes

    def may_gain(self, history: History, config: Config, name: str) -> bool:
        """Whether a config is likely to fit and its choice of technique `name` acts on more than a negligible part of the cost."""
        return self.is_likely_to_fit(history, config) and self._ask(
            history, lambda models: not models.is_idle(config, name), lambda: True
        )

    def ranked(self, history: History) -> list[Config]:
        """The feasible configs, ranked by the models fitted to all probes: the best single figure of many is often a lucky one."""
        feasible, score = history.feasible, history.objective.score
        by_score = sorted(feasible, key=lambda config: -score(feasible[config]))
        return [config for config in self._ask(history, Acquisition.ranked, lambda: by_score) if config in feasible]

    def _ask(self, history: History, question: Callable[[Acquisition], T], otherwise: Callable[[], T]) -> T:
        """What the models answer. If they cannot be computed, the user is told once, and `otherwise` answers."""
        try:
            return question(self._acquisition(history))
        except ARITHMETIC as error:
            if not self._is_told:
                self._is_told = True
                self._tell(
                    "the models of speed and memory could not be computed, so configs are chosen without predictions "
                    f"({type(error).__name__}: {error})"
                )
            return otherwise()

    def lent(self, history: History) -> tuple[Config, Outcome] | None:
        """The first config that ran here with the techniques that were best in the most alike study; None where none did."""
        if (first := self.taught.first) is None:
            return None
        best, baseline = history.space.snap(first.choices), history.space.baseline
        ran = (one for one in _as_probed(history) if one[0].has_techniques_of(best) and one[0] != baseline)
        return next(ran, None)

    def is_borne_out(self, history: History) -> bool:
        """Whether that config was clearly faster than the baseline, and by about as much as in that study.

        Until then a search goes on as if it had been taught nothing, so that a study that misleads costs one probe.
        """
        first, lent, baseline = self.taught.first, self.lent(history), history.baseline
        if first is None or first.speed_up is None or lent is None or baseline is None:
            return False
        found, plain, merit = lent[1].measurement, baseline.measurement, history.objective.merit
        if found is None or plain is None or merit(lent[1]) <= CLEARLY * merit(baseline):
            return False
        return abs(math.log(found.samples_per_s / plain.samples_per_s / first.speed_up)) < AS_TOLD

    def _acquisition(self, history: History) -> Acquisition:
        """The acquisition fitted to the history, cached because a proposal and its prediction are asked for one after the other."""
        space, peaks, probes = known = history.space, self._peaks(), _as_probed(history)
        if self._last is None or self._last[0] != known:
            memory_model = MemoryModel(
                peaks, self._outside_bytes, space, probes, self._communicators, self._gradients_bytes
            )
            self._last = known, self._fitted_with(history, probes, memory_model)
        return self._last[1]

    def _fitted_with(self, history: History, probes: Probes, memory_model: MemoryModel) -> Acquisition:
        """The acquisition whose model of time is fitted to probes."""
        peaks = self._peaks()
        lengths = peaks.lengths if peaks is not None else None
        pace = None
        if history.objective.observed:  # rates of the device tell seconds, and nothing of this
            pace = TimeModel(history.space, _paces(probes, history.objective), lengths)
        return Acquisition(
            history.space,
            history.objective,
            TimeModel(
                history.space,
                probes,
                lengths,
                Roofline.of(self._calibration, peaks),
                self.taught.said(history.space) if self.is_borne_out(history) else {},
                self.taught.chance_to_hold,
            ),
            memory_model,
            probes,
            self._seed,
            pace=pace,
            setup_s=history.setup_s,
            probe_s=median(history.probe_wall_s or [1.0]) or 1.0,
            blame=self.taught.blame,
        )


def _as_probed(history: History) -> Probes:
    """The evidence in the order in which the configs were probed, in whichever order the history has its trials."""
    number = {trial.config: trial.number for trial in reversed(history.trials)}
    return sorted(history.evidence, key=lambda one: number[one[0]])


def _paces(probes: Probes, objective: Objective) -> Probes:
    """The probes with their pace in place of their speed, for a cost model of that: joules a sample in place of seconds, say.

    A phase's share of it is taken to be its share of the time. A bound of the speed says nothing of it.
    """
    found: list[tuple[Config, Outcome]] = []
    for config, outcome in probes:
        if (measured := outcome.measurement) is None or not math.isfinite(objective.figure(measured)):
            continue
        factor = objective.pace(measured) / measured.samples_per_s
        paced = replace(
            measured,
            samples_per_s=measured.samples_per_s * factor,
            samples_per_s_low=measured.samples_per_s_low * factor,
            samples_per_s_high=measured.samples_per_s_high * factor,
            phases_s={name: seconds / factor for name, seconds in measured.phases_s.items()},
        )
        found.append((config, replace(outcome, measurement=paced)))
    return found
