"""Nothing is waited for in vain: a probe that can win nothing any more is ended, and what it did is a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.records.config import Config, ProbeSettings
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome, Progress
from autotune.records.study import BASELINE, PLAY_OFF, Proposal
from autotune.runners.jobs import Job, ProbeJob
from autotune.runners.runner import Finished
from autotune.space import Space
from autotune.task.source import TaskSource
from autotune.tuning import opening
from autotune.tuning.confirm import confirm
from autotune.tuning.events import Listener, ProbeAdvanced
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.patience import LENIENCE, LOST_SHARE, PATIENCE, patience_for
from autotune.tuning.state import Search
from tests.closed_form import ClosedFormRunner, inspection, make_search, measurement

BUDGET_S = 100.0
Came = Callable[[Config], Progress | None]


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
