"""One device beside several: measured in rounds of their play-off, told with what they add, and taken for no config of theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.records.config import ALONE, Config, ProbeSettings, World, divisors
from autotune.records.inspection import BatchSupport, Inspection
from autotune.records.measured import OneDevice
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.runners.jobs import InspectJob, Job
from autotune.study.reading import load_study
from autotune.techniques import find_techniques
from autotune.tuning.guest import NUM_ROUNDS
from autotune.tuning.search import search
from tests.closed_form import LIMIT_BYTES, MIB, SUPPORT, ClosedFormRunner, inspection, measurement

PAIR = World(size=2)
GAIN = 1.8  # of a second device
OOM = Outcome(
    kind=Kind.OOM, cause="an allocation of 1 GiB failed", peak_bytes=LIMIT_BYTES, attempted_bytes=MIB, wall_s=0.1
)
BATCH = BatchSupport(sizes=tuple(divisors(48)), accumulation_steps=tuple(divisors(48)))
techniques = find_techniques()


def baseline(batch_size: int, world: World) -> dict[str, Any]:
    return techniques.complete({"batch_size": batch_size}, global_batch=96, world=world).as_dict()


@dataclass
class Pair(ClosedFormRunner):
    """Two devices train 1.8 times as fast as one. Notes what runs on one alone."""

    given: bool = True
    fits_alone: int = 96  # samples of a micro batch that one device has room for
    batch: BatchSupport = BATCH
    alone: list[Config] = field(default_factory=list)

    world = PAIR

    def result_of(self, job: Job[Any]) -> Any:
        return self.inspected() if isinstance(job, InspectJob) else super().result_of(job)

    def inspected(self) -> Inspection:
        return inspection(
            world=PAIR,
            baseline=baseline(8, PAIR),
            baseline_alone=baseline(8, ALONE),
            baseline_given=self.given,
            batch=self.batch,
        )

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        if settings.world == PAIR:
            return super().outcome_of(config, settings)
        self.alone.append(config)
        if config.batch_size > self.fits_alone:
            return OOM
        found = super().outcome_of(config, settings).measurement
        self.configs.pop()
        assert found is not None
        slower = measurement(config, found.samples_per_s / GAIN, found.peak_bytes)
        return Outcome(kind=Kind.OK, measurement=slower, wall_s=0.1)


def searched(folder: Path, runner: Pair, **options: Any) -> Result:
    options = {"num_trials": 6, "storage": str(folder / "closed.db"), "sampler": "random", **options}
    beside = options.pop("beside_one_device", True)
    return search(None, SearchOptions(**options), runner=runner, beside_one_device=beside)


def found(result: Result) -> OneDevice:
    assert result.one_device is not None
    return result.one_device


def told(result: Result) -> str:
    return " ".join(as_text(answer_sections(result, techniques), 200).split())


def test_the_baseline_is_measured_on_one_device_with_the_same_global_batch(tmp_path: Path) -> None:
    one = found(searched(tmp_path, runner := Pair(noise=0.01)))
    assert one.config == baseline(8, ALONE) and one.config["accumulation_steps"] == 12
    assert len(runner.alone) == one.num_processes == NUM_ROUNDS
    assert one.efficiency is not None and one.efficiency_ci is not None
    low, high = one.efficiency_ci
    assert low <= GAIN / 2 <= high
    assert high - low < 0.2


def test_what_is_told_of_one_device_and_of_several_is_one_ratio(tmp_path: Path) -> None:
    result = searched(tmp_path, Pair(noise=0.02))
    one = found(result)
    assert result.baseline is not None and one.efficiency is not None and one.speedup is not None
    assert one.efficiency == pytest.approx(result.baseline.samples_per_s / one.samples_per_s / 2)
    assert one.speedup == pytest.approx(result.samples_per_s / one.samples_per_s)
    assert result.config != result.baseline.config
    words = told(result)
    assert "as fast on 2 as on 1." in words and "as fast as the baseline on 1." in words
    assert "The fastest config of one device was not searched" in words


def test_it_is_no_trial_of_the_search_and_no_config_of_the_answer(tmp_path: Path) -> None:
    result = searched(tmp_path, runner := Pair(noise=0.01))
    study = load_study(tmp_path / "closed.db")
    assert result.cost.probes == len(study.probes) == len(runner.configs)
    assert all(probe.outcome.world == PAIR for probe in study.probes)
    assert [run.outcome.world for run in study.facts.one_device] == [ALONE] * NUM_ROUNDS
    slow = found(result).config
    shown = [*result.front, *result.play_off.finalists, *study.front_configs()]
    assert slow not in [each.config for each in shown]
    assert study.result == result


def test_a_search_that_goes_on_measures_it_no_more_and_tells_it_again(tmp_path: Path) -> None:
    first = found(searched(tmp_path, Pair(noise=0.01)))
    again = found(searched(tmp_path, runner := Pair(noise=0.01, seed=1), num_trials=1))
    assert not runner.alone
    assert again.num_processes == first.num_processes and again.efficiency is not None


def test_that_the_baseline_does_not_fit_on_one_device_is_told_and_remembered(tmp_path: Path) -> None:
    result = searched(tmp_path, runner := Pair(fits_alone=4))
    assert len(runner.alone) == 1
    assert found(result).failure == "the baseline does not fit on one device: an allocation of 1 GiB failed"
    assert found(result).efficiency is None
    assert "The baseline does not fit on one device: an allocation of 1 GiB failed." in told(result)
    again = searched(tmp_path, runner := Pair(fits_alone=4), num_trials=1)
    assert not runner.alone
    assert found(again).failure == found(result).failure


def test_a_batch_that_nobody_gave_is_halved_for_one_device_as_for_several(tmp_path: Path) -> None:
    one = found(searched(tmp_path, runner := Pair(given=False, fits_alone=4, noise=0.01)))
    assert [config.batch_size for config in runner.alone[:2]] == [8, 4]
    assert one.config == baseline(4, ALONE)
    assert one.efficiency is not None


def test_without_a_rival_the_baseline_plays_beside_one_device_alone(tmp_path: Path) -> None:
    runner = Pair(noise=0.01, batch=BatchSupport(sizes=(8,), accumulation_steps=(6,)))
    result = searched(tmp_path, runner, exclude=tuple(SUPPORT))
    assert result.config == baseline(8, PAIR) and result.verdict == "same"
    assert len(runner.alone) == NUM_ROUNDS
    assert found(result).efficiency == pytest.approx(GAIN / 2, rel=0.05)
    assert "as fast as the baseline on 1" not in told(result)  # the answer is that baseline


def test_an_error_of_one_device_alone_costs_the_search_nothing(tmp_path: Path) -> None:
    class Broken(Pair):
        def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
            if settings.world == ALONE:
                return Outcome(kind=Kind.ERROR, cause="ValueError: no group", wall_s=0.1)
            return super().outcome_of(config, settings)

    result = searched(tmp_path, Broken(noise=0.01))
    assert result.verdict == "faster"
    assert found(result).failure == "the baseline does not run on one device: error: ValueError: no group"


def test_it_is_left_out_where_one_device_is_searched_or_alone(tmp_path: Path) -> None:
    assert searched(tmp_path, runner := Pair(), beside_one_device=False).one_device is None
    assert not runner.alone
    single = search(None, SearchOptions(num_trials=3, storage=str(tmp_path / "single.db")), runner=ClosedFormRunner())
    assert single.one_device is None
