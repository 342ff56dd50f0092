"""The acquisition: the next probe has the largest expected gain over the best, weighted by its chance to fit and to run."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autotune.prediction import Array
from autotune.prediction.cost import Probes
from autotune.prediction.memory import MemoryEstimate, MemoryModel
from autotune.prediction.time import TimeModel
from autotune.records.config import ACCUMULATION, BATCH_SIZE, Choice, Config
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.study import Prediction
from autotune.space import Space
from autotune.techniques import Techniques

Switch = tuple[str, Choice]  # a technique and a choice of it
Pair = tuple[Outcome, Outcome]  # with a switch and without it, all else being equal

BETTER = math.log(1.01)  # a gain that counts
ENOUGH = 0.03  # chance to become the best by 1 % below which no config is worth a probe
MAX_OOM_CHANCE = 0.25  # what is likelier to run out of memory is not tried; stricter with every config that did
UNKNOWN_MEMORY_STD = 0.5  # in logarithms, where nothing is known of a config's memory
# Puts unsafe configs below all others, where nothing is known that fits: the likeliest to fit comes first, and after all that are
# expected to, the leanest.
UNSAFE = 1e4
LEAN = 30.0  # a config that needs one per cent less memory may be 30 per cent less likely to run
TIE = 0.1  # weight of what is not known of a config's memory: of two that need as much, the better known one is the leaner
MAX_ENUMERATED = 3000  # a space of at most so many configs is looked at whole
NUM_STARTS = 3  # of the climbs through a larger space
UNSEEN_FAULT = 0.05  # chance that a probe is far off without a sign of it
LIKELY = 0.5  # chance to fit and to run from which a running probe is believed to be measured
RUNS_AFTER_FAILURE = 0.2  # chance to run that is left to a config which bears the whole blame for one failure
PROVEN = 3.0  # times the blame: for a choice that failed where everything else was seen to run
TRIFLE = 0.005  # of a step's time: whatever acts on no more than that cannot gain much


@dataclass(frozen=True)
class Posterior:
    """The posterior of several configs. Each array has one figure per config.

    Attributes:
        to_win: chance to be better than the best by 1 %; 1 while nothing is known to fit.
        to_fit: chance to need no more than the limit less headroom.
        chance: chance to become the best: to win, to fit and to run; 0 where it is too likely to run out of memory.
        score: expected gain over the best, times `chance`, in relation to how long a probe takes; the next has the highest.
    """

    peaks: Sequence[MemoryEstimate | None]
    to_win: Array
    to_fit: Array
    chance: Array
    score: Array


class Acquisition:
    """Ranks the configs of a space, given the models fitted to the probes so far. It does not use Optuna.

    Args:
        time: of seconds a sample.
        pace: of what the merit rests on beside memory, where that is not `time`: of joules a sample, say.
        seed: for the configs from which a large space is climbed; the same probes and seed give the same proposal.
        setup_s: seconds that a config takes before its first step, where others take none.
        probe_s: seconds that a probe takes besides.
        blame: how much each choice is to blame for what crashed or hung in like studies, from 0 to 1.
    """

    def __init__(
        self,
        space: Space,
        objective: Objective,
        time: TimeModel,
        memory: MemoryModel,
        probes: Probes,
        seed: int = 0,
        *,
        pace: TimeModel | None = None,
        setup_s: Callable[[Config], float] = lambda config: 0.0,
        probe_s: float = 1.0,
        blame: Mapping[Switch, float] = MappingProxyType({}),
    ) -> None:
        self.space = space
        self.objective = objective
        self.time, self.pace = time, pace or time
        self.leave_one_out = self.pace.leave_one_out()
        self.memory = memory
        self.seen = dict(probes)
        ran_out = [outcome for outcome in self.seen.values() if outcome.kind is Kind.OOM]
        self.shortages = sum(not (outcome.crowded or outcome.on_host) for outcome in ran_out)
        self.speed_weight, self.memory_weight = objective.speed_weight, objective.memory_weight
        self._seed = seed
        self._setup_s, self._probe_s, self._blame = setup_s, probe_s, blame
        self.best = next(iter(self.ranked()), None)

    def ranked(self) -> list[Config]:
        """The feasible configs that were probed, best expected merit first: the best of noisy figures is often a lucky one."""
        merit, pace, weight = self.objective.merit, self.objective.pace, self.speed_weight
        beside_pace = {  # the part of the log merit that is not pace, as measured; the pace is the model's
            config: math.log(merit(outcome)) - weight * math.log(pace(outcome.measurement))
            for config, outcome in self.seen.items()
            if outcome.measurement and self.objective.feasible(outcome) and self.space.answers(config)
        }
        if not beside_pace:
            return []
        feasible = list(beside_pace)
        merits = weight * self._over_the_training(self.pace.speeds(feasible).mean, feasible) + [*beside_pace.values()]
        return [feasible[row] for row in np.argsort(-merits, kind="stable")]

    def next(self, admissible: Callable[[Config], bool]) -> Config | None:
        """The config to probe next, with the highest score; None if no config has more than a small chance to win."""
        in_reach = self.space if self.space.num_combinations <= MAX_ENUMERATED else self._met_while_climbing()
        idle = self._idle()
        configs = [c for c in in_reach if all(c[name] == kept for name, kept in idle.items()) and admissible(c)]
        if not configs:
            return None
        found = self.posterior(configs)
        worth = found.chance >= ENOUGH if self.best is not None else np.ones(len(configs), dtype=bool)
        return configs[int(np.argmax(np.where(worth, found.score, -math.inf)))] if worth.any() else None

    def _met_while_climbing(self) -> list[Config]:
        """The configs that are met when climbing from several ones, by one change at a time."""
        chance = random.Random(self._seed)
        starts = [self.space.baseline.as_dict()] + ([self.best.as_dict()] if self.best else [])
        while len(starts) < NUM_STARTS:
            starts.append({name: chance.choice(choices) for name, choices in self.space.choices.items()})
        met: set[Config] = set()
        # what was traced may lie beyond what was not, and is not trusted to fit
        if self.best is None and (traced := self._of_traced_groups()):
            met.update(traced)
            starts.append(traced[int(np.argmax(self.posterior(traced).score))].as_dict())
        for start in starts:
            # the baseline need not have what is fixed, and not every combination belongs to the space
            here, height = self.space.nearest(start, lambda config: True), -math.inf
            while around := [config for config in self._one_change(here) if self.space.contains(config)]:
                met.update(around)
                scores = self.posterior(around).score
                top = int(np.argmax(scores))
                if scores[top] <= height:
                    break
                here, height = around[top], float(scores[top])
        return sorted(met, key=str)

    def _of_traced_groups(self) -> list[Config]:
        """The baseline with each group of techniques that was traced, at every batch size."""
        baseline, sizes = self.space.baseline.as_dict(), self.space.choices[BATCH_SIZE]
        at_sizes = (
            self.space.complete({**baseline, **dict(group), BATCH_SIZE: size})
            for group in self.memory.traced_groups
            for size in sizes
        )
        return [config for config in at_sizes if self.space.contains(config)]

    def _one_change(self, config: Config) -> list[Config]:
        return [
            self.space.complete({**config.as_dict(), name: choice})
            for name, choices in self.space.choices.items()
            for choice in choices
            if choice != config[name]
        ]

    def posterior(self, configs: Sequence[Config]) -> Posterior:
        """The posterior of configs."""
        peaks = self.memory.estimates(configs)
        limit, usable = self.objective.memory_limit_bytes, self.objective.usable_bytes
        to_fit = np.array([1.0 if peak is None else peak.chance_within(usable) for peak in peaks])
        to_oom = np.array([0.0 if peak is None else 1 - peak.chance_within(limit) for peak in peaks])
        safe = to_oom <= MAX_OOM_CHANCE / (1 + self.shortages) ** 2
        to_run = self._chance_to_run(configs)
        chance = to_fit * to_run
        if self.best is None:
            careful = (1 + self.shortages) * np.log(np.maximum(chance, 1e-9)) - np.log(self._cost(configs))
            # of what is not expected to fit, the less is known, the better is its chance: taking that would teach nothing of the rest
            need = np.array(
                [math.log(peak.peak_bytes) + TIE * peak.log_std if peak else math.log(limit) for peak in peaks]
            )
            lean = np.log(np.maximum(to_run, 1e-9)) - LEAN * need - np.log(self._cost(configs))
            unsafe = np.where(to_fit > LIKELY, careful, lean - UNSAFE) - UNSAFE
            score = np.where(safe, self._merit(configs, peaks) + careful, unsafe)
            return Posterior(peaks, np.ones(len(configs)), to_fit, chance, score)
        to_win, improvement = self._winning(configs, peaks)
        chance_of_best = np.where(safe, to_win * chance * self._chance_of_speed(configs), 0.0)
        return Posterior(peaks, to_win, to_fit, chance_of_best, improvement * chance_of_best / self._cost(configs))

    def expected_gain(self, config: Config) -> float | None:
        """The expected gain of a config over the best, as a logarithm of the merit; None while nothing is known to fit.

        It is what a probe of it may tell: less where processes differ by more.
        """
        if self.best is None:
            return None
        peaks = self.memory.estimates([config])
        to_win, beyond = self._winning([config], peaks, noise=self.speed_weight * self.pace.noise)
        to_run = self.posterior([config]).to_fit * self._chance_to_run([config]) * self._chance_of_speed([config])
        return float(((beyond + BETTER * to_win) * to_run)[0])

    def chance_to_be_better(self, config: Config, other: Config) -> float | None:
        """The chance that a config is better than another, where both were measured; else None."""
        found, beside = (self.seen[one].measurement if one in self.seen else None for one in (config, other))
        if found is None or beside is None:
            return None
        speeds = self.pace.speeds([config, other])
        logs = self._over_the_training(speeds.mean, [config, other])
        gain = self.speed_weight * (logs[0] - logs[1])
        gain += self.memory_weight * math.log(beside.long_run_peak_bytes / found.long_run_peak_bytes)
        variance = speeds.variance[0] + speeds.variance[1] - 2 * speeds.covariance_with(1)[0]
        std = max(1e-6, self.speed_weight * math.sqrt(max(0.0, variance)))
        return float(_normal_cdf(np.array([gain / std]))[0])

    def _cost(self, configs: Sequence[Config]) -> Array:
        """How long a probe of each config takes, in units of one that has nothing to compile."""
        return np.array([1 + self._setup_s(config) / self._probe_s for config in configs])

    def _over_the_training(self, log_speeds: Array, configs: Sequence[Config]) -> Array:
        """Log throughputs of configs over the whole training, where its length is known: compiling then counts."""
        if self.objective.train_samples is None or not any(outcome.ok for outcome in self.seen.values()):
            return log_speeds
        whole = self.objective.whole_samples_per_s
        pairs = zip(np.exp(log_speeds), map(self._setup_s, configs), strict=True)
        return np.log([whole(speed, setup_s) for speed, setup_s in pairs])

    def _winning(
        self, configs: Sequence[Config], peaks: Sequence[MemoryEstimate | None], noise: float = 0.0
    ) -> tuple[Array, Array]:
        """Chance to be better than the best by 1 %, and the expected gain beyond that.

        Both are averaged over the model and its leave-one-out versions without one influential probe.

        Args:
            noise: of a probe; with it, the chance to be found so by one, and the gain that is then expected.
        """
        weights = [1 - UNSEEN_FAULT * len(self.leave_one_out), *[UNSEEN_FAULT] * len(self.leave_one_out)]
        to_win, improvement = np.zeros(len(configs)), np.zeros(len(configs))
        for weight, pace in zip(weights, (self.pace, *self.leave_one_out), strict=True):
            gain, std = self._gain(pace, configs, peaks)
            std = std * std / np.sqrt(std * std + noise * noise)
            z = (gain - BETTER) / std
            to_win += weight * _normal_cdf(z)
            improvement += weight * std * (z * _normal_cdf(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
        return to_win, improvement

    def _merit(self, configs: Sequence[Config], peaks: Sequence[MemoryEstimate | None]) -> Array:
        """Expected log merit, up to a constant: only the order of the configs matters."""
        merit = self.speed_weight * self._over_the_training(self.pace.speeds(configs).mean, configs)
        known = [peak.peak_bytes for peak in peaks if peak] or [1]
        need_bytes = [peak.peak_bytes if peak else float(np.median(known)) for peak in peaks]
        return np.asarray(merit - self.memory_weight * np.log(need_bytes))

    def _gain(
        self, pace: TimeModel, configs: Sequence[Config], peaks: Sequence[MemoryEstimate | None]
    ) -> tuple[Array, Array]:
        """Log merit over the best's: mean and standard deviation. Common terms cancel."""
        assert self.best is not None
        measured = self.seen[self.best].measurement
        assert measured is not None
        speeds = pace.speeds([*configs, self.best])
        shared = speeds.covariance_with(len(configs))
        logs = self._over_the_training(speeds.mean, [*configs, self.best])
        gain = self.speed_weight * (logs - logs[-1])
        variance = self.speed_weight**2 * (speeds.variance + speeds.variance[-1] - 2 * shared)
        log_peaks = np.log([peak.peak_bytes if peak else measured.long_run_peak_bytes for peak in peaks])
        stds = np.array([peak.log_std if peak else UNKNOWN_MEMORY_STD for peak in peaks])
        gain = gain[:-1] + self.memory_weight * (math.log(measured.long_run_peak_bytes) - log_peaks)
        return gain, np.sqrt(np.maximum(variance[:-1], 1e-12) + (self.memory_weight * stds) ** 2)

    def _chance_of_speed(self, configs: Sequence[Config]) -> Array:
        """Chance that a probe finds the speed that has to be kept; 1 where any will do."""
        if (needed := self.objective.least_samples_per_s) is None:
            return np.ones(len(configs))
        speeds = self.time.speeds(configs)
        return _normal_cdf((speeds.mean - math.log(needed)) / np.sqrt(speeds.variance + self.time.noise**2))

    def _chance_to_run(self, configs: Sequence[Config]) -> Array:
        """Chance that a config does not fail for a reason that the models do not know.

        Each failure is blamed on the choices of its config that have never run: first on techniques, then on the batch
        size. If all of them have run in other configs, it is blamed on the whole config. What failed where everything else
        was seen to run is blamed more. Running out of memory is not blamed, as the memory model knows of it, unless as many
        samples were seen to fit. Failures of like studies are blamed as far as the choice has not run here.
        """
        ran = {choice for config, outcome in self.seen.items() if _trained(outcome) for choice in _choices(config)}
        largest = max((config.batch_size for config, outcome in self.seen.items() if _trained(outcome)), default=0)
        pairs = pairs_of(self.seen.items(), self.space.techniques).items()
        proven = {switch for switch, found in pairs if any(_broke(with_it) for with_it, _ in found)} - ran
        blame = PROVEN * np.array([len(proven & _choices(config)) for config in configs], dtype=float)
        if self._blame:
            blame += [sum(self._blame.get(switch, 0.0) for switch in _choices(config) - ran) for config in configs]
        for failed, outcome in self.seen.items():
            choices = _choices(failed)
            unseen = choices - ran
            suspects = {suspect for suspect in unseen if suspect[0] != BATCH_SIZE} or unseen or choices
            surprising = outcome.kind is Kind.OOM and failed.batch_size <= largest and bool(unseen)
            if _broke(outcome) or surprising:
                blame += [len(suspects & _choices(config)) / len(suspects) for config in configs]
        return np.asarray(RUNS_AFTER_FAILURE**blame)

    def _idle(self) -> dict[str, Choice]:
        """Techniques that make no difference to the best, with its choices."""
        if self.best is None:
            return {}
        searched = [n for n, choices in self.space.choices.items() if len(choices) > 1 and self.best[n] in choices]
        return {n: self.best[n] for n in searched if n in self.space.techniques and self.is_idle(self.best, n)}

    def is_idle(self, config: Config, name: str) -> bool:
        """Whether a technique acts on next to nothing of a config's cost, so that no choice of it can make a difference."""
        return not self.memory_weight and self.pace.reach(config, name) <= TRIFLE

    def believed(self, running: Sequence[Config]) -> list[tuple[Config, Outcome]]:
        """What probes that have not ended are believed to find: what is predicted. None of one that is not likely to fit and to run."""
        if not running or self.best is None:
            return []
        measured = self.seen[self.best].measurement
        assert measured is not None
        found = self.posterior(running)
        speeds, paces = ([one.samples_per_s for one in model.estimate(running)] for model in (self.time, self.pace))
        likely = found.to_fit * self._chance_to_run(running) >= LIKELY
        return [
            (
                config,
                Outcome(
                    kind=Kind.OK, measurement=self.objective.at_pace(_as_measured(config, speed, peak, measured), pace)
                ),
            )
            for config, speed, pace, peak, is_likely in zip(running, speeds, paces, found.peaks, likely, strict=True)
            if is_likely
        ]

    def predict(self, config: Config) -> Prediction:
        """The prediction for one config."""
        found = self.posterior([config])
        peak = found.peaks[0]
        speed = self.time.estimate([config])[0] if any(o.ok for o in self.seen.values()) else None
        win = float(found.to_win[0]) if self.best is not None else None
        return Prediction(
            samples_per_s=speed.samples_per_s if speed else None,
            samples_per_s_low=speed.low if speed else None,
            samples_per_s_high=speed.high if speed else None,
            peak_bytes=peak.peak_bytes if peak else None,
            peak_low_bytes=peak.low_bytes if peak else None,
            peak_high_bytes=peak.high_bytes if peak else None,
            chance_to_win=win,
            chance_to_fit=float(found.to_fit[0]),
            reason=self._reason(config, win),
            world=self.space.world,
        )

    def _reason(self, config: Config, win: float | None) -> str:
        if config == self.space.baseline:
            return "what you run today"
        if win is None or self.best is None:
            return "likely to fit"
        changes = self._in_words(config, self.best)
        likely = "likely" if win >= 0.5 else "may be"
        return f"{likely} {self.objective.better}: {changes}"

    def _in_words(self, config: Config, other: Config) -> str:
        """The differences from another config, in a few words."""
        words = []
        for name, choice in config.differences(other).items():
            if name == "batch_size":
                ratio = int(choice) / other.batch_size
                words.append(f"batch {choice}" if ratio % 1 else f"{ratio:.0f}x the batch")
            elif name != ACCUMULATION:
                is_off = self.space.techniques.is_off(name, choice)
                words.append(
                    f"without {name}" if is_off else f"{choice}" if isinstance(choice, str) else f"{name}={choice}"
                )
        return ", ".join(words)


def _as_measured(config: Config, samples_per_s: float, peak: MemoryEstimate | None, like: Measurement) -> Measurement:
    """A measurement of what is predicted, as precise as another one, whose peak it has where none is predicted."""
    precision = like.samples_per_s_low / like.samples_per_s, like.samples_per_s_high / like.samples_per_s
    return replace(
        like,
        samples_per_s=samples_per_s,
        samples_per_s_low=samples_per_s * precision[0],
        samples_per_s_high=samples_per_s * precision[1],
        step_s=config.samples_per_step / samples_per_s,
        peak_bytes=like.long_run_peak_bytes if peak is None else peak.peak_bytes,
        long_run_growth_bytes=0,  # it is part of what is predicted
        phases_s={},
    )


def _trained(outcome: Outcome) -> bool:
    """Whether a config ran, even if it was ended as too slow: then its speed has a bound, and nothing is to blame."""
    slow = outcome.kind is Kind.TIMEOUT and outcome.bound is not None and outcome.bound.peak_bytes_low > 0
    return outcome.ok or slow


def _broke(outcome: Outcome) -> bool:
    """Whether a config failed for a reason that the models do not know."""
    return outcome.kind is not Kind.OOM and not _trained(outcome)


@functools.lru_cache(maxsize=2 * MAX_ENUMERATED)
def _choices(config: Config) -> frozenset[tuple[str, Choice]]:
    """The choices that may cause a failure, without accumulation, which follows from the rest."""
    return frozenset((name, choice) for name, choice in config.choices if name != ACCUMULATION)


def pairs_of(probes: Iterable[tuple[Config, Outcome]], techniques: Techniques) -> Mapping[Switch, list[Pair]]:
    """Switch -> outcomes of configs that differ in its technique alone; at least one of the two ran."""
    outcomes = dict(probes)
    configs, names = list(outcomes), [BATCH_SIZE, *techniques]
    codes: dict[tuple[str, Choice], int] = {}  # numbers are compared in a hundredth of the time
    coded = np.array([[codes.setdefault((n, c[n]), len(codes)) for n in names] for c in configs], dtype=int)
    differ = coded.reshape(-1, 1, len(names)) != coded.reshape(1, -1, len(names))
    found: dict[Switch, list[Pair]] = {}
    for row, other in zip(*np.nonzero(differ.sum(axis=2) == 1), strict=True):
        name = names[int(np.argmax(differ[row, other]))]
        a, b = outcomes[configs[row]], outcomes[configs[other]]
        if name != BATCH_SIZE and (a.ok or b.ok):
            found.setdefault((name, configs[row][name]), []).append((a, b))
    return found


def _normal_cdf(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))
