"""What takes long before the first step: tried unasked where it is cheap, weighed by its price, and won back or not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.records.config import Config, ProbeSettings
from autotune.records.inspection import Inspection, Support
from autotune.records.options import SearchOptions
from autotune.records.outcome import Outcome
from autotune.records.result import Result
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.runners.jobs import InspectJob, Job, NotCompared
from autotune.techniques import find_techniques
from autotune.tuning.inspecting import drop_slow_setups
from autotune.tuning.search import answer, search
from tests.closed_form import SUPPORT, ClosedFormRunner, inspection, make_search

COLD_S = 40.0
PRICED = Support(choices=("off",), optional=("default",), reason="compiling takes time", setup_s=(("default", COLD_S),))
AGAINST = "against the fastest config that compiles nothing, that is won back"


def found(priced: Support = PRICED) -> Inspection:
    known = inspection()
    return replace(known, support={**known.support, "amp": SUPPORT["amp"], "compile": priced}, step_s=0.1)


def judged(budget_s: float, train_samples: float | None = None, included: tuple[str, ...] = ()) -> Support:
    return drop_slow_setups(found(), budget_s, train_samples, included).support["compile"]


def test_it_is_tried_unasked_where_a_tenth_of_the_time_will_do() -> None:
    assert judged(400.0).choices == ("off", "default") and not judged(400.0).optional
    assert judged(399.0).choices == ("off",) and judged(399.0).optional == ("default",)


def test_where_it_is_not_the_reason_names_the_time_and_both_ways_to_have_it() -> None:
    for words in ("40 s or more for a config", "--include compile", "--budget of 6m40s"):
        assert words in judged(300.0).reason


def test_what_a_training_is_too_short_to_win_back_is_not_tried_unasked() -> None:
    assert judged(1000.0, train_samples=4000.0).choices == ("off", "default")  # of 0.05 s: a quarter is 50 s
    short = judged(1000.0, train_samples=2000.0)
    assert short.optional == ("default",) and "too short to win that back" in short.reason


def test_what_was_asked_for_stays_as_it_is() -> None:
    assert judged(10.0, included=("compile",)) == PRICED


class Compiling(ClosedFormRunner):
    """Compiled code is a quarter faster."""

    cold_s = COLD_S
    gain = 1.25

    def samples_per_s(self, config: Config) -> float:
        return super().samples_per_s(config) * (self.gain if config["compile"] == "default" else 1.0)

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        if config["compile"] == "off" or outcome.measurement is None:
            return outcome
        is_cold = not any(other["compile"] == "default" for other in self.configs[:-1])
        compile_s = self.cold_s if is_cold else 0.0  # as a local runner tells of what was in the cache
        self.waited_s += compile_s
        return replace(
            outcome,
            measurement=replace(outcome.measurement, compile_cold_s=compile_s),
            wall_s=outcome.wall_s + compile_s,
            compiling_s=compile_s,
        )


def searched(folder: Path, **options: Any) -> tuple[Result, Compiling]:
    runner = Compiling(noise=0.002)
    known = drop_slow_setups(found(), 1000.0, None, ())
    search = make_search(folder, runner, inspection=known, sampler="cost-model", **{"budget_s": 400.0, **options})
    return answer(search), runner


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Compiling]:
    return searched(tmp_path_factory.mktemp("answered"))


def test_the_answer_names_the_steps_after_which_compiling_has_paid(answered: tuple[Result, Compiling]) -> None:
    result, runner = answered
    assert result.config["compile"] == "default" and result.compile_cold_s == COLD_S
    plain = [config for config in runner.configs if config["compile"] == "off"]
    step_s, plain_step_s = 96 / result.samples_per_s, 96 / max(map(runner.samples_per_s, plain))
    assert result.break_even_steps == pytest.approx(COLD_S / (plain_step_s - step_s), rel=0.1)
    assert result.break_even_s == pytest.approx(result.break_even_steps * plain_step_s, rel=0.05)
    text = " ".join(as_text(answer_sections(result, find_techniques()), 100).split())
    assert f"40 s to compile at first; {AGAINST} after {result.break_even_steps:,} optimizer steps, 0.0" in text
    assert Result.from_dict(result.to_dict()) == result


def test_a_short_training_is_not_compiled_and_a_long_one_is(tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "long").mkdir()
    short, _ = searched(tmp_path / "short", train_samples=10_000.0)  # some 80 s
    long, _ = searched(tmp_path / "long", train_samples=1_000_000.0)
    assert short.config["compile"] == "off" and long.config["compile"] == "default"
    assert (short.break_even_steps, short.break_even_s, short.compile_cold_s) == (None, None, None)
    assert "Chosen by the time for 10,000 samples, compiling included." in as_text(
        answer_sections(short, find_techniques()), 200
    )


def test_the_gain_of_a_short_training_is_told_of_its_whole_time(tmp_path: Path) -> None:
    """The baseline compiles, and is faster per step than the answer would be told to be."""
    known = drop_slow_setups(found(), 1000.0, None, ())
    compiled = replace(known, baseline={**known.baseline, "compile": "default"})
    options: dict[str, Any] = {"sampler": "cost-model", "budget_s": 400.0, "train_samples": 10_000.0}
    result = answer(make_search(tmp_path, Compiling(noise=0.002), inspection=compiled, **options))
    assert result.config["compile"] == "off" and result.verdict == "faster"
    assert result.play_off.training_speedup is not None and result.speedup is not None
    speedup, low, _ = result.play_off.training_speedup
    assert speedup > low > 1 and speedup > 1.1 * result.speedup
    text = " ".join(as_text(answer_sections(result, find_techniques()), 100).split())
    assert f"Faster: {speedup:.2f}x the baseline's throughput over the whole training, compiling included" in text
    assert f"{result.speedup:.2f}x its throughput" in text
    assert Result.from_dict(result.to_dict()) == result


def test_a_budget_is_not_lost_to_compiling(tmp_path: Path) -> None:
    _, runner = searched(tmp_path, budget_s=40.0)
    assert sum(config["compile"] == "default" for config in runner.configs) == 0


class Long(Compiling):
    """As `Compiling`, asked what it supports."""

    def result_of(self, job: Job[Any]) -> Any:
        return found() if isinstance(job, InspectJob) else super().result_of(job)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "for which no time was left; a --budget of 6m40s or more leaves time for it"),
        ({"train_steps": 50}, "which a training of about .* s is too short to win back"),
    ],
    ids=["short budget", "short training"],
)
def test_what_was_included_and_never_run_is_told_with_the_reason(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    asked = SearchOptions(storage=str(tmp_path / "closed.db"), include=("compile",), budget_s=40.0, **options)
    result = search(None, asked, runner=(runner := Long(noise=0.002)))
    assert not [config for config in runner.configs if config["compile"] != "off"]
    (text,) = [text for text in result.warnings if "compile" in text]
    before = "compile was included, and no config with it was run: it takes about 40 s before its first step, "
    assert re.fullmatch(before + reason, text)


def test_what_is_faster_once_compiled_and_does_not_pay_in_the_training_is_told(tmp_path: Path) -> None:
    asked = SearchOptions(
        storage=str(tmp_path / "closed.db"), include=("compile",), budget_s=400.0, train_steps=50, sampler="cost-model"
    )
    result = search(None, asked, runner=(runner := Long(noise=0.002)))
    assert result.config["compile"] == "off"
    assert [config for config in runner.configs if config["compile"] == "default"]
    (text,) = [text for text in result.warnings if "compile" in text]
    steps = r"takes 40 s to compile at first: that is won back after about .* optimizer steps, and the training has 50"
    unchecked = "; its gradients were not compared with plain fp32"
    assert re.fullmatch(rf".*compiled.* ran 1\.\d\d times as fast as the answer, and {steps}{unchecked}", text)


def test_what_is_hardly_faster_once_compiled_by_one_process_is_not_told(tmp_path: Path) -> None:
    class Hardly(Long):
        gain = 1.05

    asked = SearchOptions(
        storage=str(tmp_path / "closed.db"), include=("compile",), budget_s=400.0, train_steps=50, sampler="cost-model"
    )
    result = search(None, asked, runner=(runner := Hardly(noise=0.002)))
    assert [config for config in runner.configs if config["compile"] == "default"]
    assert not [text for text in result.warnings if "compile" in text]


def test_what_the_baseline_compiles_is_no_reason_why_another_technique_was_not_run(tmp_path: Path) -> None:
    class Compiled(Long):
        """Of a user who compiles already."""

        def result_of(self, job: Job[Any]) -> Any:
            known = super().result_of(job)
            if not isinstance(job, InspectJob):
                return known
            return replace(known, baseline={**known.baseline, "compile": "default"})

    asked = SearchOptions(storage=str(tmp_path / "closed.db"), include=("amp", "compile"), budget_s=20.0)
    result = search(None, asked, runner=(runner := Compiled(noise=0.002)))
    assert {config["amp"] for config in runner.configs} == {"off"} and result.config["compile"] == "default"
    assert not [text for text in result.warnings if text.startswith("amp") and "before its first step" in text]


def test_what_compiles_comes_after_what_promises_as_much_for_less_time(answered: tuple[Result, Compiling]) -> None:
    _, runner = answered
    first = next(place for place, config in enumerate(runner.configs) if config["compile"] == "default")
    assert any(config["amp"] == "bf16" for config in runner.configs[:first])


def test_a_comparison_with_plain_training_has_the_time_that_compiling_was_seen_to_take(tmp_path: Path) -> None:
    timeouts_s = []

    class Watched(Compiling):
        cold_s = 300.0

        def check_of(self, config: Config, settings: ProbeSettings, batch_size: int) -> NotCompared:
            timeouts_s.extend([settings.timeout_s] if config["compile"] != "off" else [])
            return super().check_of(config, settings, batch_size)

    known = drop_slow_setups(found(), 2000.0, None, ())
    answer(make_search(tmp_path, Watched(noise=0.002), inspection=known, sampler="cost-model", budget_s=2000.0))
    assert timeouts_s and min(timeouts_s) > Watched.cold_s
