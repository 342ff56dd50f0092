"""A budget is used where it helps, and kept: the last probe, the answer's check and the start included.

Nothing is waited for in vain: a probe that can win nothing any more is ended, and what it did is a bound.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.records.config import Config, ProbeSettings
from autotune.records.options import LONGEST_AUTO_S, SearchOptions
from autotune.records.outcome import Kind, Outcome, Progress
from autotune.records.study import BASELINE, PLAY_OFF, Proposal
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.runners.jobs import CheckJob, InspectJob, Job, ProbeJob
from autotune.runners.runner import Finished
from autotune.space import Space
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.tuning import opening
from autotune.tuning.budget import AHEAD_S, LENIENCE, LOST_SHARE, PATIENCE, Budget, patience_for, play_off_process_s
from autotune.tuning.confirm import confirm
from autotune.tuning.events import Listener, ProbeAdvanced
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.opening import open_search
from autotune.tuning.search import search
from autotune.tuning.state import Search
from tests.benchmarks.play_off import World
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search, measurement

FOUND = inspection()
CHECK_S = 2.5
BUDGET_S = 100.0
Came = Callable[[Config], Progress | None]


@dataclass
class Timed(ClosedFormRunner):
    """Its clock counts what a small model takes: a probe so many seconds more than it is timed, a check 2.5 s."""

    overhead_s: float = 1.0
    inspection_s: float = 2.0
    clock_s: float = 0.0
    gain: float = 1.0
    slow_after: int = 1000  # probes, since when the machine is five times as slow
    comparable: bool = True  # gradients with plain fp32's

    def now_s(self):
        return self.clock_s

    def result_of(self, job):
        result = super().result_of(job)
        if isinstance(job, InspectJob):
            self.clock_s += self.inspection_s
            return replace(FOUND, comparable=self.comparable)
        if isinstance(job, CheckJob):
            self.clock_s += CHECK_S
        if isinstance(job, ProbeJob):
            slowness = 5 if len(self.configs) > self.slow_after else 1
            wall_s = slowness * (self.overhead_s + job.settings.max_timed_s)
            if wall_s > job.settings.timeout_s:
                wall_s, result = job.settings.timeout_s, Outcome(kind=Kind.TIMEOUT, cause="killed")
            self.clock_s += wall_s
            result = replace(result, wall_s=wall_s)
        return result

    def samples_per_s(self, config):
        return 100 * (super().samples_per_s(config) / 100) ** math.log(self.gain) if self.gain != 1 else 100.0


def searched(runner, budget_s):
    options = SearchOptions(budget_s=budget_s, memory_limit_bytes=LIMIT_BYTES, storage="sqlite:///:memory:")
    return search(None, options, runner=runner)


@pytest.mark.parametrize(("budget_s", "overhead_s"), [(30.0, 0.5), (40.0, 3.0), (120.0, 3.0)])
def test_a_noisy_search_uses_its_budget_and_keeps_it(budget_s, overhead_s):
    runner = Timed(noise=0.1, overhead_s=overhead_s)
    result = searched(runner, budget_s)
    assert 0.75 * budget_s < result.wall_s < 1.05 * budget_s


def ended_by_itself(train_steps: int | None, **machine: Any) -> float:
    """Seconds of a search without a budget, over the training that the user has ahead."""
    options = SearchOptions(train_steps=train_steps, memory_limit_bytes=LIMIT_BYTES, storage="sqlite:///:memory:")
    return search(None, options, runner=Timed(gain=1.5, **machine)).cost.wall_s


def test_without_a_budget_a_search_ends_the_sooner_the_shorter_the_training_ahead_is():
    took_s = [ended_by_itself(steps, noise=0.05, overhead_s=3.0) for steps in (100, 10_000, 10_000_000)]
    assert took_s == sorted(took_s) and took_s[0] < took_s[-1] <= 1.05 * LONGEST_AUTO_S


def test_without_a_word_on_the_training_an_hour_is_ahead():
    steps_an_hour = round(AHEAD_S * 100 / 96)  # of the baseline's about 100 samples/s
    assert ended_by_itself(None, overhead_s=3.0) == pytest.approx(
        ended_by_itself(steps_an_hour, overhead_s=3.0), rel=0.5
    )


@pytest.mark.parametrize("comparable", [True, False])
def test_time_is_kept_for_a_check_only_where_gradients_can_be_compared(comparable):
    options = SearchOptions(budget_s=40.0, memory_limit_bytes=LIMIT_BYTES, storage="sqlite:///:memory:")
    with open_search(None, options, Timed(comparable=comparable), Listener()) as opening:
        kept_s = opening.budget.budget_s - opening.budget.elapsed_s - opening.budget.free_s
    assert kept_s == pytest.approx(Timed.inspection_s if comparable else 0.0)


@pytest.mark.parametrize("slow_after", [3, 9, 15])
def test_a_machine_that_becomes_busy_does_not_make_a_search_overrun(slow_after):
    runner = Timed(noise=0.1, overhead_s=0.7, slow_after=slow_after)
    result = searched(runner, 40.0)
    assert result.wall_s < 1.05 * 40.0
    assert "timeout" not in result.outcomes  # who is cut short is not said to hang


def test_a_quiet_search_ends_when_it_knows_enough():
    result = searched(Timed(noise=0.002, gain=2.0), 600.0)
    assert result.verdict == "faster" and result.wall_s < 300


def test_a_search_that_found_nothing_tries_what_it_has_not_tried():
    runner = Timed(noise=0.002)
    result = searched(runner, 600.0)
    assert result.verdict == "same" and not result.undecided
    probed = {choice for config in runner.configs for choice in config.choices}
    assert {("amp", "bf16"), ("amp", "fp16"), ("optimizer_impl", "fused")} <= probed
    assert {("checkpoint_segments", number) for number in (1, 2, 3, 6)} & probed


def test_of_a_baseline_that_is_kept_the_best_of_the_others_is_told():
    result = searched(Timed(noise=0.002), 120.0)
    assert result.rival.config != result.config == result.baseline.config
    low, high = result.rival.speedup_ci
    assert low < 1 < high and result.speedup == 1 and result.speedup_ci is None


@pytest.mark.parametrize("overhead_s", [3.0, 4.0, 4.5, 5.0])
def test_where_probes_take_long_a_second_round_comes_before_further_probes(overhead_s):
    result = searched(Timed(gain=2.0, overhead_s=overhead_s), 45.0)
    assert result.verdict == "faster" and result.num_rounds >= 2


@pytest.mark.parametrize(("accumulation_steps", "shortest_s"), [(1, 4 * 3.5 + 0.2), (4, 3 * 0.95 + 0.95 + 0.2)])
def test_a_process_of_the_play_off_is_reckoned_by_the_steps_that_it_takes(accumulation_steps, shortest_s):
    ran = find_techniques().complete({"batch_size": 12, "accumulation_steps": accumulation_steps})
    found = replace(
        measurement(ran, 13.7, LIMIT_BYTES), step_s=3.5, warmup_s=14.0, timed_s=2.8, phases_s={"optimizer": 0.1}
    )
    outcome = Outcome(kind=Kind.OK, measurement=found, wall_s=17.0)
    assert shortest_s <= play_off_process_s(ran, outcome) <= 1.1 * shortest_s + 0.01


def test_what_looking_into_growth_took_is_no_part_of_a_process_of_the_play_off():
    ran = find_techniques().complete({"batch_size": 12})
    found = replace(measurement(ran, 13.7, LIMIT_BYTES), step_s=0.01, warmup_s=1.0, timed_s=1.0)
    short, grown = (
        play_off_process_s(ran, Outcome(kind=Kind.OK, measurement=replace(found, growth_s=s), wall_s=2.5 + s))
        for s in (0.0, 3.0)
    )
    assert short == pytest.approx(grown) and short < 2


@pytest.mark.parametrize(("left_s", "num"), [(1.0, 1), (11.9, 1), (12.0, 2), (39.9, 2), (40.0, 3), (400.0, 3)])
def test_as_many_finalists_play_as_the_time_is_enough_for(left_s, num):
    budget = Budget(budget_s=left_s, probe_timeout_s=None, now_s=lambda: 0.0, started_s=0.0, keeps_checks=False)
    assert budget.num_finalists([2.0, 2.0, 2.0], baseline_s=2.0) == num


def test_too_little_evidence_is_undecided_and_says_what_would_do():
    result = searched(Timed(noise=0.2, overhead_s=2.0), 22.0)
    assert result.verdict == "undecided" and result.config == result.baseline.config
    assert "never run: " in result.undecided and "ran beside the baseline" in result.undecided
    assert re.search(r"--budget \d+[sm] would be enough|try on a quieter machine", result.undecided)


@pytest.mark.parametrize("overhead_s", [2.5, 3.0, 3.5])
def test_once_the_baseline_has_won_what_was_not_tried_comes_before_further_rounds(overhead_s):
    """Rounds of a play-off that the baseline leads tell nothing of what never ran."""
    result = searched(Timed(noise=0.01, overhead_s=overhead_s), 45.0)
    assert result.num_rounds >= 1 and "never run" not in result.undecided


class Surprising(Timed):
    """Checkpointing, of which nothing is expected, makes it faster by half."""

    def samples_per_s(self, config):
        return 150.0 if config["checkpoint_segments"] else 100.0


@pytest.mark.parametrize("overhead_s", [1.0, 2.0])
def test_what_nothing_was_expected_of_plays_where_it_comes_out_ahead(overhead_s):
    result = searched(Surprising(noise=0.01, overhead_s=overhead_s), 60.0)
    assert result.verdict == "faster" and result.config["checkpoint_segments"] and result.num_rounds >= 1


def test_a_slow_start_leaves_the_rest_to_exploring_and_the_play_off_alike():
    runner = Timed(noise=0.05, gain=2.0, inspection_s=18.0)
    result = searched(runner, 45.0)
    assert len({str(config) for config in runner.configs}) > 2 and result.confirmed


def test_the_time_that_the_user_waited_before_the_search_counts():
    began_s = time.monotonic() - 20.0
    options = SearchOptions(budget_s=40.0, memory_limit_bytes=LIMIT_BYTES, storage="sqlite:///:memory:")
    result = search(None, options, runner=Timed(noise=0.1), began_s=began_s)
    assert 30.0 < result.wall_s < 1.05 * 40.0
    assert result.split_s["import"] >= 20.0


@dataclass
class Lucky(Timed):
    """The config that is probed as the `fast`th of those that surely fit is four times as fast as any other."""

    fast: int = 2

    @property
    def fastest(self):
        fitting = [config for config in dict.fromkeys(self.configs) if self.peak_bytes(config) < 0.9 * LIMIT_BYTES]
        return fitting[self.fast] if len(fitting) > self.fast else None

    def samples_per_s(self, config):
        return 400.0 if config == self.fastest else 100.0


@pytest.mark.parametrize(("fast", "budget_s"), [(2, 30.0), (6, 30.0), (4, 45.0), (8, 45.0)])
def test_whoever_is_found_last_plays(fast, budget_s):
    runner = Lucky(noise=0.05, overhead_s=1.5, fast=fast)
    result = searched(runner, budget_s)
    if runner.fastest is not None:
        assert result.config == runner.fastest.as_dict() and result.confirmed and result.verdict == "faster"
    assert result.wall_s < 1.05 * budget_s


@pytest.mark.parametrize(
    ("gain", "budget_s", "seed"), [(1.0, 30.0, 0), (1.2, 30.0, 1), (1.2, 60.0, 0), (1.2, 60.0, 1), (2.0, 60.0, 1)]
)
def test_the_verdict_the_interval_and_every_figure_agree(gain, budget_s, seed):
    result = searched(Timed(noise=0.15, gain=gain, seed=seed, overhead_s=2.0), budget_s)
    kept, low, high = result.config == result.baseline.config, *(result.speedup_ci or (1.0, 1.0))
    told = "".join(as_text(answer_sections(result, find_techniques()), width=1000).split("Recommended config")[0])
    assert {
        "faster": result.confirmed and low > 1,
        "slower": result.confirmed and high < 1,
        "same": result.confirmed and (kept or (low > 0.9 and high < 1.1)) and not result.undecided,
        "undecided": bool(result.undecided),
    }[result.verdict]
    assert ("Faster" in told) == (result.verdict == "faster") and ("Not confirmed" in told) <= (not result.confirmed)
    for ratio, found in [(result.speedup, result), *([(result.rival.speedup, result.rival)] if result.rival else [])]:
        assert found.samples_per_s / result.baseline.samples_per_s == pytest.approx(ratio)
    shown = {str(one.config): one.samples_per_s for one in (*result.finalists, result.baseline)}
    for one in result.front:
        assert shown.get(str(one.config), one.samples_per_s) == one.samples_per_s
    assert shown[str(result.config)] == result.samples_per_s or not result.confirmed


def test_time_is_not_kept_for_a_play_off_that_nobody_but_the_baseline_could_take_part_in():
    """A script may take a minute to start. It was answered "nothing ran beside the baseline" with half of the budget left."""
    runner = Timed(gain=2.0, overhead_s=15.0, inspection_s=16.0)
    result = searched(runner, 60.0)
    assert len(set(runner.configs)) == 2 and result.wall_s < 1.05 * 60.0


class WithoutBaseline(Timed):
    """Plain fp32 does not fit."""

    def peak_bytes(self, config):
        return 2 * LIMIT_BYTES if config["amp"] == "off" else super().peak_bytes(config)


@pytest.mark.parametrize(("overhead_s", "fewest"), [(2.0, 9), (4.0, 5)])
def test_where_no_baseline_runs_a_few_rounds_of_the_best_are_kept_and_the_rest_is_explored(overhead_s, fewest):
    runner = WithoutBaseline(gain=2.0, noise=0.01, overhead_s=overhead_s)
    result = searched(runner, 45.0)
    assert 0.9 * 45 < result.wall_s < 1.05 * 45
    assert len(set(runner.configs)) >= fewest
    assert sum(config.as_dict() == result.config for config in runner.configs) >= 1 + 2


def test_what_a_settled_play_off_leaves_is_explored():
    result = searched(Timed(gain=2.0, noise=0.002, overhead_s=2.0), 45.0)
    assert result.verdict == "faster" and result.wall_s > 0.95 * 45


class Hanging(ClosedFormRunner):
    """On a clock of its own a probe takes half a second. Where `came` says how far, it comes so far and hangs there."""

    def __init__(self, came: Came = lambda config: None) -> None:
        super().__init__()
        self.came = came
        self.clock_s = 0.0
        self.cancelled = False
        self.hangs: tuple[int, ProbeJob, float, Progress] | None = None

    def now_s(self) -> float:
        return self.clock_s

    def submit(self, job: Job[Any], slot: str = "") -> int:
        ticket = super().submit(job, slot)
        if isinstance(job, ProbeJob) and (came := self.came(job.config)) is not None:
            self.hangs, self.cancelled = (ticket, job, self.clock_s, came), False
        return ticket

    def progress(self, ticket: int) -> Progress | None:
        return super().progress(ticket) if self.hangs is None else self.hangs[3]

    def cancel(self, ticket: int) -> None:
        self.cancelled = True

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        if self.hangs is None:
            self.clock_s += 0.5
            return super().collect(timeout_s)
        ticket, job, began_s, came = self.hangs
        waited_s = self.clock_s - began_s
        if not self.cancelled and waited_s < job.timeout_s:
            self.clock_s += timeout_s or job.timeout_s
            return None
        super().collect()
        self.hangs = None
        cause = "ended early" if self.cancelled else "killed"
        outcome = Outcome(kind=Kind.TIMEOUT, cause=cause, wall_s=waited_s, bound=came.bound)
        return Finished(ticket=ticket, result=outcome)


def warming_up(num_micro_steps: int = 0, samples_per_s: float | None = None, peak_bytes: int = 0) -> Progress:
    return Progress(
        stage="warmup", num_micro_steps=num_micro_steps, samples_per_s_high=samples_per_s, peak_bytes=peak_bytes
    )


def hang_with(**choices: Any) -> Came:
    def came(config: Config) -> Progress | None:
        return warming_up() if any(config[name] == choice for name, choice in choices.items()) else None

    return came


def opened(folder: Path, came: Came, **changes: Any) -> Search:
    search = make_search(folder, Hanging(came), **{"budget_s": BUDGET_S, "sampler": "cost-model", **changes})
    measure_baseline(search)
    return search


def probed(search: Search, **choices: Any) -> Outcome:
    trial = search.probe(Proposal(config=search.history.space.complete(choices)))
    assert trial is not None
    return trial.outcome


def test_a_probe_whose_first_step_takes_too_long_is_ended_and_leaves_a_bound(tmp_path: Path) -> None:
    search = opened(tmp_path, hang_with(amp="bf16"))
    best = search.history.best
    assert best is not None and best[1].measurement is not None
    outcome = probed(search, amp="bf16")
    assert outcome.kind is Kind.TIMEOUT and "ended without a step" in outcome.cause
    # two seconds for what only a first step does, and twice what the best takes for as many samples
    assert 2 < outcome.wall_s < 3
    assert outcome.bound is not None and outcome.bound.samples_per_s_high is not None
    assert outcome.bound.samples_per_s_high < 0.5 * best[1].measurement.samples_per_s


@pytest.mark.parametrize("sampler", ["cost-model", "random", pytest.param("grid", marks=pytest.mark.slow)])
def test_no_search_loses_more_than_a_tenth_of_its_budget_to_time_outs(tmp_path: Path, sampler: str) -> None:

    def hangs(config: Config) -> Progress | None:
        return None if config["amp"] == "off" else warming_up()

    search = opened(tmp_path, hangs, sampler=sampler, num_trials=80)
    explore(search, search.proposer())
    lost_s = sum(trial.wall_s for trial in search.history.trials if trial.outcome.kind is Kind.TIMEOUT)
    assert 0 < lost_s <= LOST_SHARE * BUDGET_S
    assert sum(trial.feasible for trial in search.history.trials) > 5


class Slow(ClosedFormRunner):
    """A micro step takes ten seconds."""

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        found = measurement(config, config.batch_size / 10, self.peak_bytes(config))
        return Outcome(kind=Kind.OK, measurement=replace(found, warmup_s=60.0, timed_s=20.0), wall_s=82.0)


@pytest.mark.parametrize(("stage", "factor"), [(BASELINE, LENIENCE), (PLAY_OFF, LENIENCE), ("search", PATIENCE)])
@pytest.mark.parametrize("lost_s", [0.0, 178.0, 400.0])
def test_what_time_outs_took_shortens_no_first_step_that_is_as_long_as_expected(
    tmp_path: Path, stage: str, factor: float, lost_s: float
) -> None:
    search = make_search(tmp_path, Slow(), budget_s=1800.0, inspection=inspection(step_s=20.0, step_samples=8))
    if stage != BASELINE:
        measure_baseline(search)
    search.budget.lost_s = lost_s
    choices = {"amp": "bf16"} if stage == "search" else {}
    proposal = Proposal(config=search.history.space.complete(choices), stage=stage)
    patience = patience_for(proposal, search.history, search.budget, search.inspection)
    assert patience.allowed_s(warming_up()) >= factor * 2 * 10.0
    assert patience.allowed_s(warming_up(num_micro_steps=2)) >= factor * 3 * 10.0


def test_compiling_in_a_first_step_is_waited_for_as_long_as_it_took_before(tmp_path: Path) -> None:
    search = opened(tmp_path, hang_with(amp="bf16"))
    config = search.history.space.complete({"amp": "fp16"})
    assert probed(search, amp="fp16").measurement is not None
    (trial,) = [trial for trial in search.history.searched if trial.config == config]
    compiled = Outcome(**{**vars(trial.outcome), "measurement": _compiled(trial.outcome, 9.0)})
    search.history._trials[-1] = type(trial)(**{**vars(trial), "outcome": compiled})
    search.history._known = (-1, {})
    assert 9 < probed(search, amp="bf16").wall_s < 10


def test_what_a_technique_needs_to_prepare_is_waited_for_with_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Space, "_setup_s", {("amp", "bf16"): 3.0})
    search = opened(tmp_path, hang_with(amp="bf16", optimizer_impl="fused"))
    assert 11 < probed(search, amp="bf16").wall_s < 12  # 2 s, and three times the 3 s
    assert 2 < probed(search, optimizer_impl="fused").wall_s < 3


def _compiled(outcome: Outcome, compile_s: float) -> Any:
    return type(outcome.measurement)(**{**vars(outcome.measurement), "compile_s": compile_s})


def test_what_may_still_enter_the_front_is_waited_for_longer_but_not_for_ever(tmp_path: Path) -> None:
    def slow(peak_bytes: int) -> Came:
        return lambda config: warming_up(3, 1.0, peak_bytes) if config["amp"] == "bf16" else None

    ended = {}
    for peak_bytes in (1, 2**40):
        folder = tmp_path / str(peak_bytes)
        folder.mkdir()
        ended[peak_bytes] = probed(opened(folder, slow(peak_bytes)), amp="bf16", batch_size=16)
    assert ended[2**40].wall_s < ended[1].wall_s < 20
    assert "after 3 micro steps" in ended[1].cause
    assert ended[1].bound is not None and ended[1].bound.samples_per_s_high == 1.0


def test_a_config_that_hangs_in_the_play_off_is_ended_too(tmp_path: Path) -> None:
    search = opened(tmp_path, lambda config: None)
    assert probed(search, amp="bf16").ok
    runner = search.runner
    assert isinstance(runner, Hanging)
    runner.came = hang_with(amp="bf16")
    standing = confirm(search)
    (lost,) = [trial for trial in search.history.trials if trial.stage == PLAY_OFF and not trial.feasible]
    assert lost.wall_s < 5 and standing is not None


class Cut(ClosedFormRunner):
    """Every probe but the baseline's is cut short after steps that took a tenth of what they take with the waits for data."""

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        if config["amp"] == "off" or outcome.measurement is None:
            return outcome
        fast = 10 * outcome.measurement.samples_per_s
        return replace(outcome, measurement=replace(outcome.measurement, samples_per_s=fast, cut_short=True))


def test_a_config_whose_probe_was_cut_short_is_not_expected_to_be_as_fast_in_the_play_off(tmp_path: Path) -> None:
    search = make_search(tmp_path, Cut(), budget_s=BUDGET_S)
    measure_baseline(search)
    assert probed(search, amp="bf16").ok
    proposal = Proposal(config=search.history.space.complete({"amp": "bf16"}), stage=PLAY_OFF)
    patience = patience_for(proposal, search.history, search.budget, search.inspection)
    assert patience.allowed_s(warming_up(num_micro_steps=36)) == math.inf


class CrowdedOnce(Hanging):
    """The first probe that is ended had already found its memory taken by others."""

    crowded = False

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        finished = super().collect(timeout_s)
        if finished is None or not self.cancelled or self.crowded:
            return finished
        self.crowded = True
        return replace(finished, result=Outcome(kind=Kind.OOM, crowded=True, wall_s=100.0))


def test_a_second_run_is_watched_anew(tmp_path: Path) -> None:
    search = make_search(tmp_path, CrowdedOnce(hang_with(amp="bf16")), budget_s=1000.0, sampler="cost-model")
    measure_baseline(search)
    outcome = probed(search, amp="bf16")
    assert outcome.cause.startswith("ended without a step") and 2 < outcome.wall_s < 3


def test_how_far_a_probe_has_come_is_told_while_it_runs(tmp_path: Path) -> None:
    told = []

    class Watching(Listener):
        def on(self, event: object) -> None:
            if isinstance(event, ProbeAdvanced):
                told.append(event.progress)

    search = opened(tmp_path, lambda config: warming_up(3, 1.0, 5), listener=Watching())
    assert told and set(told) == {warming_up(3, 1.0, 5)} and search.history.baseline is not None


MODEL = """
import time

import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def make_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randn(batch_size, 64)


def training_step(model, batch):
    if torch.is_autocast_enabled("cpu"):
        time.sleep(600)
    x, y = batch
    return nn.functional.mse_loss(model(x).float(), y)


BASELINE = {"batch_size": 8}
"""


def test_a_real_probe_that_hangs_is_ended_from_outside_long_before_its_time_out(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    options = SearchOptions.of(
        {"device": "cpu", "budget": "5m", "storage": str(tmp_path / "hang.db"), "include": ["amp"]},
        total_bytes=lambda device: 2**34,
    )
    with opening.open_search(TaskSource.of(tmp_path / "model.py"), options, None, Listener()) as search:
        measure_baseline(search)
        outcome = probed(search, amp="bf16")
        assert outcome.kind is Kind.TIMEOUT and outcome.cause.startswith("ended without a step in")
        assert outcome.wall_s < search.settings.timeout_s / 2
        assert outcome.bound is not None and outcome.bound.samples_per_s_high is not None
        assert probed(search, batch_size=12).ok


def test_a_search_that_ends_by_itself_ends_long_before_the_longest_that_it_may_take():
    world = World(noise=0.05, gain=2.0)
    options = SearchOptions(budget_s=None, memory_limit_bytes=LIMIT_BYTES, storage="sqlite:///:memory:")
    result = search(None, options, runner=world)
    assert result.verdict == "faster" and world.clock_s < LONGEST_AUTO_S / 2  # by the closed form's own clock
