"""A budget is used where it helps, and kept: the last probe, the answer's check and the start included."""

import math
import re
import time
from dataclasses import dataclass, replace

import pytest

from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.runners.jobs import CheckJob, InspectJob, ProbeJob
from autotune.techniques import find_techniques
from autotune.tuning.events import Listener
from autotune.tuning.opening import open_search
from autotune.tuning.search import search
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection

FOUND = inspection()
CHECK_S = 2.5


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


@pytest.mark.parametrize("budget_s", [30.0, 40.0, 120.0])
@pytest.mark.parametrize("overhead_s", [0.5, 3.0])
def test_a_noisy_search_uses_its_budget_and_keeps_it(budget_s, overhead_s):
    runner = Timed(noise=0.1, overhead_s=overhead_s)
    result = searched(runner, budget_s)
    assert 0.75 * budget_s < result.wall_s < 1.05 * budget_s


@pytest.mark.parametrize("comparable", [True, False])
def test_time_is_kept_for_a_check_only_where_gradients_can_be_compared(comparable):
    options = SearchOptions(budget_s=40.0, memory_limit_bytes=LIMIT_BYTES, storage="sqlite:///:memory:")
    with open_search(None, options, Timed(comparable=comparable), Listener()) as opening:
        kept_s = opening.budget.budget_s - opening.budget.elapsed_s - opening.budget.free_s
    assert kept_s == pytest.approx(Timed.inspection_s if comparable else 0.0)


@pytest.mark.parametrize("slow_after", [3, 6, 9, 12, 15])
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


def test_too_little_evidence_is_undecided_and_says_what_would_do():
    result = searched(Timed(noise=0.2, overhead_s=2.0), 30.0)
    assert result.verdict == "undecided" and result.config == result.baseline.config
    assert "never run: " in result.undecided and "ran beside the baseline" in result.undecided
    assert re.search(r"--budget \d+[sm] would do|try on a quieter machine", result.undecided)


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


@pytest.mark.parametrize("fast", [2, 4, 6, 8])
@pytest.mark.parametrize("budget_s", [30.0, 45.0])
def test_whoever_is_found_last_plays(fast, budget_s):
    runner = Lucky(noise=0.05, overhead_s=1.5, fast=fast)
    result = searched(runner, budget_s)
    if runner.fastest is not None:
        assert result.config == runner.fastest.as_dict() and result.confirmed and result.verdict == "faster"
    assert result.wall_s < 1.05 * budget_s


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("gain", "budget_s"), [(1.0, 30.0), (1.2, 30.0), (1.2, 60.0), (2.0, 60.0)])
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
