"""Power and coverage of the play-off, over closed forms with known truths: run by `make bench-play-off`.

Equal processes differ by 5, 12 or 20 %, and the whole machine by 15 % from round to round. `play-off alone` takes the best of
eight noisy figures into a play-off with 40 % of the budget; `whole search` is `autotune search` itself, its clock a
simulated one. With `--write` the table goes into `studies/README.md`.

`--disturbed N` runs N whole searches instead, over closed forms and recorded tables, while other work slows some of their
processes, and looks for speeds that are told and that no undisturbed process measured.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.records.config import Config, ProbeSettings
from autotune.records.objective import Throughput
from autotune.records.options import SearchOptions
from autotune.records.outcome import Measurement, Outcome
from autotune.records.result import Result
from autotune.runners.jobs import InspectJob, Job, ProbeJob
from autotune.runners.replay import ReplayRunner
from autotune.runners.runner import Runner
from autotune.techniques import find_techniques
from autotune.tuning import confirm
from autotune.tuning.budget import MAX_SHARE, MOST_FINALISTS
from autotune.tuning.entrant import Entrant
from autotune.tuning.evidence import Searched
from autotune.tuning.playoff import PlayOff
from autotune.tuning.search import search
from tests.benchmarks.memory import TABLES
from tests.benchmarks.searches import write
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, measurement

techniques = find_techniques()

NOISES = (0.05, 0.12, 0.2)
GAINS = (0.95, 1.0, 1.1, 1.2, 1.3, 1.5)  # of the best config over the baseline
SEARCHED_GAINS = (1.0, 1.3)  # of whole searches, which take seconds each
BUDGETS_S = (60.0, 120.0)
MOOD = 0.15  # by which the machine as a whole differs from round to round
WITHIN = 0.005  # of one second's samples
OVERHEAD_S = 1.0  # of a process: start, set-up, warm-up
SHARES = (1.0, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0)  # of the best config's gain, that the candidates have
INSPECTED = inspection()
BASELINE = techniques.complete(INSPECTED.baseline)
DISTURBED_BUDGETS_S = (15.0, 30.0, 60.0)  # one round of the play-off, a few, and many
DISTURBED_SHARES = ((0.2, 0.0), (0.5, 0.0), (0.2, 0.05))  # of the processes: seen, and unseen
SLOWER = 0.98  # of the baseline, below which a recommendation is wrong
OBJECTIVE = Throughput(memory_limit_bytes=LIMIT_BYTES, headroom=0.05)


@dataclass(frozen=True)
class Found:
    """What one play-off or search found: the true gain of its answer, and of whom it told an interval."""

    answer_gain: float
    is_baseline: bool
    told_gain: float | None
    interval: tuple[float, float] | None

    @property
    def covers(self) -> bool:
        """Whether the interval holds the truth."""
        return self.interval is None or self.interval[0] <= (self.told_gain or 0.0) <= self.interval[1]


@dataclass
class OtherWork:
    """Other work on the machine: it slows some processes, whose probes notice it or not. It knows what the others measured."""

    seen: float = 0.0  # share of the processes
    unseen: float = 0.0
    seed: int = 0
    undisturbed: dict[Config, list[float]] = field(default_factory=dict)
    disturbed: dict[Config, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(f"other work {self.seed}")

    def beside(self, config: Config, outcome: Outcome) -> Outcome:
        """The outcome of a process that may have had it beside it."""
        found, chance = outcome.measurement, self._random.random()
        if found is None or found.disturbances:  # a recorded one
            return outcome
        if chance >= self.seen + self.unseen:
            self.undisturbed.setdefault(config, []).append(found.samples_per_s)
            return outcome
        left = self._random.uniform(0.3, 0.8)
        held = (1 - left) * self._random.uniform(0.5, 1.0)
        told = (f"others held the processor for {held:.0%} of the time",) if chance < self.seen else ()
        slowed = replace(
            found,
            samples_per_s=found.samples_per_s * left,
            samples_per_s_low=found.samples_per_s_low * left,
            samples_per_s_high=found.samples_per_s_high * left,
            step_s=found.step_s / left,
            contention=held if told else 0.0,
            disturbances=told,
        )
        self.disturbed.setdefault(config, []).append(slowed.samples_per_s)
        return replace(outcome, measurement=slowed)

    def measured(self, config: Config) -> list[float]:
        """What the undisturbed processes of a config measured; where there are none, what all did."""
        return self.undisturbed.get(config) or self.disturbed[config]


def told(result: Result) -> Iterator[tuple[Config, float]]:
    """Every speed that a result tells, but for those of finalists that never ran through."""
    yield techniques.complete(result.config), result.samples_per_s
    for one in (result.baseline, result.rival, *result.finalists, *result.front):
        if one is not None and one.num_processes:
            yield techniques.complete(one.config), one.samples_per_s


def never_measured(result: Result, work: OtherWork) -> list[str]:
    """The speeds and the gain of a result that lie beyond what undisturbed processes measured, in words.

    A baseline that was slowed unseen may be the only one there is, and makes a gain that was measured so.
    """
    rounding = 1 + 1e-9
    beyond = [
        f"{speed:.4g} samples/s of {config}, measured: {work.measured(config)}"
        for config, speed in told(result)
        if speed > rounding * max(work.measured(config))
    ]
    if result.baseline is not None and result.speedup is not None and not work.unseen:
        ran, base = (work.measured(techniques.complete(c)) for c in (result.config, result.baseline.config))
        if not min(ran) / max(base) / rounding <= result.speedup <= rounding * max(ran) / min(base):
            beyond.append(f"{result.speedup:.2f}x, measured: {ran} and {base}")
    return beyond


@dataclass
class World(ClosedFormRunner):
    """Configs whose gains over the baseline are known, on a noisy machine with a clock of its own."""

    gain: float = 1.0
    work: OtherWork = field(default_factory=OtherWork)
    clock_s: float = 0.0
    mood: float = field(default=0.0)

    def now_s(self) -> float:
        return self.clock_s

    def result_of(self, job: Job[Any]) -> Any:
        return INSPECTED if isinstance(job, InspectJob) else super().result_of(job)

    def true_gain(self, config: Config) -> float:
        """Over the baseline: bf16 brings two thirds of the best gain, the fused optimizer a quarter, the batch the rest."""
        parts = {"off": 0.0, "bf16": 0.67, "fp16": 0.5}[str(config["amp"])]
        parts += 0.25 if config["optimizer_impl"] == "fused" else 0.0
        parts += 0.08 * (1 - 4 / config.batch_size) / (1 - 4 / 96)
        return float(self.gain**parts * (1 - 0.04 * int(config["checkpoint_segments"])))

    def samples_per_s(self, config: Config) -> float:
        return 100.0 * self.true_gain(config)

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        """Its noise does not fall with the time: processes differ."""
        self.mood = 0.9 * self.mood + math.sqrt(1 - 0.9**2) * self._random.gauss(0, MOOD)
        outcome = super().outcome_of(config, settings)
        wall_s = OVERHEAD_S + settings.max_timed_s
        if outcome.measurement is not None:
            speed = self.samples_per_s(config) * math.exp(self.mood + self._random.gauss(0, self.noise))
            outcome = replace(outcome, measurement=timed(config, speed, outcome.measurement.peak_bytes, settings))
        self.clock_s += wall_s
        return self.work.beside(config, replace(outcome, wall_s=wall_s))


class Replayed(ReplayRunner):
    """A recorded table, some of whose repeats other work slows."""

    def __init__(self, path: Path, work: OtherWork) -> None:
        super().__init__(path, seed=work.seed)
        self.work = work

    def result_of(self, job: Job[Any]) -> Any:
        """As recorded, or slowed."""
        result = super().result_of(job)
        return (
            self.work.beside(job.config, result)
            if isinstance(job, ProbeJob) and isinstance(result, Outcome)
            else result
        )


def timed(config: Config, speed: float, peak_bytes: int, settings: ProbeSettings) -> Measurement:
    """A measurement over as many seconds as the settings say."""
    half = 1.96 * WITHIN / math.sqrt(settings.max_timed_s)
    return replace(
        measurement(config, speed, peak_bytes),
        samples_per_s_low=speed * (1 - half),
        samples_per_s_high=speed * (1 + half),
        timed_s=settings.max_timed_s,
    )


def answer_of(runner: Runner, budget_s: float, seed: int, limit_bytes: int | None = LIMIT_BYTES) -> Result:
    """The answer of a search in a study that is not kept."""
    options = SearchOptions(budget_s=budget_s, memory_limit_bytes=limit_bytes, seed=seed, storage="sqlite:///:memory:")
    return search(None, options, runner=runner)


def whole_search(noise: float, gain: float, budget_s: float, seed: int) -> Found:
    """A search on a noisy machine."""
    world = World(noise=noise, gain=gain, seed=seed)
    return judged(world, answer_of(world, budget_s, seed))


def judged(world: World, result: Result) -> Found:
    """A result beside the truth."""
    answer = techniques.complete(result.config)
    config, interval = (
        (result.config, result.speedup_ci) if result.rival is None else (result.rival.config, result.rival.speedup_ci)
    )
    base = world.true_gain(BASELINE)
    return Found(
        world.true_gain(answer) / base,
        answer == BASELINE,
        world.true_gain(techniques.complete(config)) / base,
        interval,
    )


def play_off_alone(noise: float, gain: float, budget_s: float, seed: int) -> Found:
    """The best of eight candidates by one noisy figure each, in 40 % of the budget."""
    generator = random.Random(f"{noise} {gain} {budget_s} {seed}")
    truth = {
        BASELINE.replace(batch_size=size, accumulation_steps=96 // size): gain**share
        for size, share in zip((1, 2, 3, 6, 8, 12, 16, 24), SHARES, strict=True)
    } | {BASELINE: 1.0}
    moods: dict[int, float] = {}
    clock_s = 0.0

    def run(config: Config, number: int) -> Outcome:
        nonlocal clock_s
        settings = ProbeSettings(memory_limit_bytes=LIMIT_BYTES, max_timed_s=play_off.timed_s(budget_s / 60))
        mood = moods.setdefault(number, generator.gauss(0, MOOD))
        speed = 100 * truth[config] * math.exp(mood + generator.gauss(0, noise))
        clock_s += OVERHEAD_S + settings.max_timed_s
        outcome = World().outcome_of(config, settings)
        return replace(outcome, measurement=timed(config, speed, 2**20, settings))

    found = {config: true * math.exp(generator.gauss(0, noise)) for config, true in truth.items()}
    ranked = sorted((config for config in found if config != BASELINE), key=lambda config: -found[config])
    playing = [config for config in ranked if found[config] >= confirm.NEAR_BEST * found[ranked[0]]][:MOST_FINALISTS]
    play_off = PlayOff(Entrant(BASELINE, Searched(math.log(found[BASELINE]))), run, OBJECTIVE, seed=seed)
    for config in playing:
        others = [other for other in ranked if other != config]
        play_off.enter(Entrant(config, confirm.chosen(config, others, len(playing), found)))
    standing = play_off.play(lambda round_s, number: clock_s + round_s < MAX_SHARE * budget_s)
    assert standing is not None and standing.answer is not None
    candidate, interval = standing.candidate, standing.speedup
    return Found(
        truth[standing.answer.config],
        standing.answer.config == BASELINE,
        truth[candidate.config] if candidate else None,
        interval[1:] if interval else None,
    )


def table(num_alone: int, num_searches: int) -> list[str]:
    """A Markdown table: a row for each noise, budget and gain."""
    lines = [
        "| noise | budget | true gain | recommended | covered | slower | recommended | covered | slower |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for noise in NOISES:
        for budget_s in BUDGETS_S:
            for gain in GAINS:
                alone = [play_off_alone(noise, gain, budget_s, seed) for seed in range(num_alone)]
                seeds = range(num_searches if gain in SEARCHED_GAINS else 0)
                whole = [whole_search(noise, gain, budget_s, seed) for seed in seeds]
                figures = " | ".join([*shares(alone), *shares(whole)])
                lines.append(f"| {noise:.0%} | {budget_s:.0f} s | {gain:g}x | {figures} |")
                print(lines[-1], flush=True)
    return lines


def shares(found: Sequence[Found]) -> tuple[str, str, str]:
    """How often something but the baseline was recommended, the interval held the truth, and the answer is slower."""
    if not found:
        return "-", "-", "-"
    return (
        f"{fmean(not one.is_baseline for one in found):.0%}",
        f"{fmean(one.covers for one in found):.1%}",
        f"{fmean(one.answer_gain < SLOWER for one in found):.1%}",
    )


def disturbed(num: int) -> list[str]:
    """A Markdown table: whole searches beside other work, on closed forms and over recorded tables."""
    lines = [
        "| processes slowed | machine | searches | told beyond what was measured | recommended | covered | slower |",
        "|---|---|---|---|---|---|---|",
    ]
    for seen, unseen in DISTURBED_SHARES:
        seeds = range(num // len(DISTURBED_SHARES) // 2)
        slowed = f"{seen:.0%} seen, {unseen:.0%} unseen"
        found, beyond = [], 0
        for seed in seeds:
            work = OtherWork(seen, unseen, seed)
            world = World(noise=0.12, gain=1.3, seed=seed, work=work)
            result = answer_of(world, DISTURBED_BUDGETS_S[seed % 3], seed)
            found.append(judged(world, result))
            beyond += told_beyond(result, work)
        lines.append(f"| {slowed} | simulated | {len(seeds)} | {beyond} | {' | '.join(shares(found))} |")
        print(lines[-1], flush=True)
        beyond = 0
        for seed in seeds:
            work = OtherWork(seen, unseen, seed)
            runner = Replayed(TABLES[seed // 3 % len(TABLES)], work)
            result = answer_of(runner, DISTURBED_BUDGETS_S[seed % 3], seed, limit_bytes=None)
            beyond += told_beyond(result, work)
        lines.append(f"| {slowed} | recorded | {len(seeds)} | {beyond} | - | - | - |")
        print(lines[-1], flush=True)
    return lines


def told_beyond(result: Result, work: OtherWork) -> bool:
    """Whether a result tells a speed that nobody measured; prints which."""
    beyond = never_measured(result, work)
    for said in beyond:
        print(f"seed {work.seed}: {said}", file=sys.stderr)
    return bool(beyond)


def main() -> None:
    """Run, print, and write into the README if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="play-offs a row")
    parser.add_argument("--searches", type=int, default=20, help="whole searches a row")
    parser.add_argument(
        "--disturbed", type=int, default=0, help="whole searches beside other work, in place of the others"
    )
    parser.add_argument("--write", action="store_true", help="into the README")
    options = parser.parse_args()
    if options.disturbed:
        lines = disturbed(options.disturbed)
        if options.write:
            write("disturbed", lines)
        return
    head = f"{options.seeds} play-offs alone (left) and {options.searches} whole searches (right) a row."
    lines = [head, "", *table(options.seeds, options.searches)]
    if options.write:
        write("play-off", lines)


if __name__ == "__main__":
    main()
