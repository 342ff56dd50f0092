"""The batch size for evaluation: found after the answer, in the time that was kept for it, and kept in the study."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.records.config import Config
from autotune.records.inspection import Inspection
from autotune.records.measured import Evaluated, Evaluation
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.runners.jobs import InspectJob, Job
from autotune.runners.runner import ProbeFault
from autotune.study.reading import load_study
from autotune.techniques import find_techniques
from autotune.tuning.find_eval_batch import next_size
from autotune.tuning.recommend import Interrupted
from autotune.tuning.search import search
from tests.closed_form import MIB, ClosedFormRunner

INF = float("inf")


def tried(*sizes: tuple[int, float | None]) -> list[Evaluated]:
    """Processes by batch size and samples per second, None for one that did not fit."""
    return [
        Evaluated(eval_batch_size=size, kind="ok" if speed else "oom", fits=speed is not None, samples_per_s=speed)
        for size, speed in sizes
    ]


def sizes_tried(speeds: dict[int, float], first: int, most: float = INF) -> list[int]:
    """Batch sizes in order, where each has a known speed and all others do not fit."""
    found: list[Evaluated] = []
    while (size := next_size(found, first, most)) is not None:
        found += tried((size, speeds.get(size)))
    return [one.eval_batch_size for one in found]


def test_it_goes_up_by_powers_of_two_until_memory_runs_out_then_between_and_runs_the_best_again() -> None:
    speeds = {8: 90.0, 16: 100.0, 32: 120.0, 48: 130.0}
    assert sizes_tried(speeds, 24) == [16, 32, 64, 48, 48, 48]


def test_the_smallest_of_those_that_are_as_fast_is_the_best() -> None:
    speeds = dict.fromkeys((4, 6, 8, 12, 16, 24, 32, 64), 100.0) | {2: 80.0, 3: 90.0, 1: 50.0}
    assert sizes_tried(speeds, 8)[-1] == 4


def test_where_the_first_does_not_fit_it_goes_down_and_where_none_does_it_ends() -> None:
    assert sizes_tried({2: 10.0}, 8)[:3] == [8, 4, 2]
    assert sizes_tried({}, 4) == [4, 2, 1]


def test_no_batch_is_larger_than_the_data() -> None:
    assert max(sizes_tried({size: float(size) for size in range(1, 100)}, 8, most=20)) <= 20


def test_a_size_that_fails_when_it_is_run_again_gives_way_to_a_smaller_one() -> None:
    found = tried((16, 100.0), (32, 120.0), (64, None), (8, 80.0), (48, None), (24, 110.0), (32, None))
    assert next_size(found, 16, INF) == 24


class Evaluating(ClosedFormRunner):
    """Knows when it evaluates, and what the inspection says."""

    facts: dict[str, Any] = {}  # noqa: RUF012

    def result_of(self, job: Job[Any]) -> Any:
        found = super().result_of(job)
        if isinstance(job, InspectJob):
            assert isinstance(found, Inspection)
            return replace(found, facts=replace(found.facts, num_parameters=1, num_trainable=1, **self.facts))
        return found


def searched(folder: Path, runner: Evaluating, **options: Any) -> Result:
    storage = str(folder / "closed.db")
    return search(None, SearchOptions(**{"num_trials": 4, "storage": storage, **options}), runner=runner)


def evaluation(result: Result) -> Evaluation:
    assert result.evaluation is not None
    return result.evaluation


def test_nobody_who_does_not_ask_waits_for_it(tmp_path: Path) -> None:
    result = searched(tmp_path, runner := Evaluating())
    assert result.evaluation is None and not runner.evaluations


@pytest.mark.parametrize("by_option", [True, False])
def test_the_option_or_the_task_asks_for_it(tmp_path: Path, by_option: bool) -> None:
    runner = Evaluating()
    runner.facts = {"evaluates": not by_option, "eval_samples": 500}
    found = evaluation(searched(tmp_path, runner, eval=by_option))
    assert (found.eval_batch_size, found.num_processes, found.unfinished) == (48, 3, "")  # 64 are less than 2 % faster
    assert found.peak_bytes == 680 * MIB and found.samples_per_s_ci is not None
    assert found.samples_per_s_ci[0] <= found.samples_per_s <= found.samples_per_s_ci[1]  # type: ignore[operator]


def test_the_result_the_study_and_the_terminal_tell_it(tmp_path: Path) -> None:
    result = searched(tmp_path, Evaluating(), eval=True)
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert load_study(tmp_path / "closed.db").result == result
    assert result.split_s["evaluation"] > 0 and sum(result.split_s.values()) == pytest.approx(result.wall_s, rel=0.01)
    text = " ".join(as_text(answer_sections(result, find_techniques()), width=200).split())
    assert "eval batch" in text and "session.evaluate(dataset, batch_size=48)" in text and "oom" in text


def test_a_search_that_goes_on_repeats_none_of_it(tmp_path: Path) -> None:
    options = {"eval": True, "fix": {"amp": "bf16", "optimizer_impl": "fused"}, "num_trials": 6}
    first = searched(tmp_path, Evaluating(), **options)
    second = searched(tmp_path, runner := Evaluating(), **options)
    if first.config["checkpoint_segments"] == second.config["checkpoint_segments"]:
        assert not runner.evaluations and second.evaluation == first.evaluation
    third = searched(tmp_path, runner, fix={"amp": "bf16", "optimizer_impl": "fused"})
    assert third.evaluation is not None and not runner.evaluations, "known is told, also where nobody asks again"


def test_it_ends_with_its_share_of_the_budget_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    class Slow(Evaluating):
        slow = True

        def evaluated(self, config: Config) -> Outcome:
            self.waited_s += 60.0 if self.slow else 0.0
            return replace(super().evaluated(config), wall_s=60.0)

    result = searched(tmp_path, slow := Slow(), eval=True, budget_s=300.0)
    found = evaluation(result)
    assert "a larger --budget goes on" in found.unfinished and found.eval_batch_size is not None
    assert result.wall_s <= 300.0 and len(slow.evaluations) >= 2
    runner = Slow()
    runner.slow = False
    more = evaluation(searched(tmp_path, runner, eval=True, budget_s=3000.0, num_trials=1))
    assert not more.unfinished and more.tried[: len(found.tried)] == found.tried


def test_where_the_start_took_all_the_time_it_is_said(tmp_path: Path) -> None:
    class SlowToStart(Evaluating):
        def result_of(self, job: Job[Any]) -> Any:
            self.waited_s += 400.0 if isinstance(job, InspectJob) else 0.0
            return super().result_of(job)

    found = evaluation(searched(tmp_path, SlowToStart(), eval=True, budget_s=300.0))
    assert not found.tried and "a larger --budget goes on" in found.unfinished


def test_a_run_that_is_killed_for_want_of_time_says_nothing_of_its_size(tmp_path: Path) -> None:
    class Hanging(Evaluating):
        def evaluated(self, config: Config) -> Outcome:
            self.waited_s += 200.0
            return Outcome(kind=Kind.TIMEOUT, cause="killed", wall_s=200.0)

    found = evaluation(searched(tmp_path, Hanging(), eval=True, budget_s=100.0, probe_timeout_s=500.0))
    assert not found.tried and "--budget" in found.unfinished and found.eval_batch_size is None


def test_an_answer_that_nothing_could_play_against_is_evaluated_too(tmp_path: Path) -> None:
    only = {"batch_size": 4, "amp": "off", "checkpoint_segments": 0, "optimizer_impl": "default"}
    result = searched(tmp_path, Evaluating(), eval=True, fix=only)
    assert not result.confirmed and evaluation(result).eval_batch_size == 48


@pytest.mark.parametrize(
    ("kind", "crowded"), [(Kind.ERROR, False), (Kind.UNSUPPORTED, False), (Kind.CRASHED, False), (Kind.OOM, True)]
)
def test_why_there_is_none_is_said_and_the_answer_stays(tmp_path: Path, kind: Kind, crowded: bool) -> None:
    class Failing(Evaluating):
        def evaluated(self, config: Config) -> Outcome:
            return Outcome(kind=kind, crowded=crowded, cause="ValueError: no labels", wall_s=0.1)

    result = searched(tmp_path, Failing(), eval=True)
    assert result.confirmed and evaluation(result).unfinished == "ValueError: no labels"
    assert not evaluation(result).tried, "nothing is known of the size"
    assert "Not finished: ValueError: no labels" in as_text(answer_sections(result, find_techniques()), width=120)


def test_a_fault_of_the_machinery_ends_it_alone(tmp_path: Path) -> None:
    class Faulty(Evaluating):
        def evaluated(self, config: Config) -> Outcome:
            raise ProbeFault("the process that starts probes died")

    result = searched(tmp_path, Faulty(), eval=True)
    assert result.confirmed and "died" in evaluation(result).unfinished


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_ends_it_and_the_confirmed_answer_stays(tmp_path: Path, times: int) -> None:
    class Interrupting(Evaluating):
        def evaluated(self, config: Config) -> Outcome:
            if len(self.evaluations) == 2:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)
            return super().evaluated(config)

    with pytest.raises(Interrupted) as raised:
        searched(tmp_path, Interrupting(), eval=True)
    result = raised.value.result
    assert result is not None and result.confirmed
    assert evaluation(result).unfinished == "interrupted" and len(evaluation(result).tried) == 4 - times
